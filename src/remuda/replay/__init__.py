"""Replays: batches in, the batches that are due out."""

from remuda.replay.frames import FrameRing
from remuda.replay.initial_priority import SequencePriority, TransitionPriority
from remuda.replay.priorities import Priorities
from remuda.replay.ring import Ring, Row
from remuda.replay.rollout_buffer import RolloutBuffer
from remuda.replay.sequence_index import RecurrentStates
from remuda.replay.sequences import SequenceReplay
from remuda.replay.transitions import TransitionReplay, as_row

__all__ = [
    "TransitionReplay",
    "FrameRing",
    "RolloutBuffer",
    "Priorities",
    "Ring",
    "Row",
    "TransitionPriority",
    "SequencePriority",
    "SequenceReplay",
    "RecurrentStates",
    "as_row",
]
