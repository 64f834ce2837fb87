"""Replays: they store what was sampled, and yield the batches that updates learn from."""

from remuda.replay.counters import ReplayCounters, RowCounters
from remuda.replay.frames import FrameRing
from remuda.replay.priorities import Priorities
from remuda.replay.ring import Ring, Row
from remuda.replay.rollout_buffer import RolloutBuffer
from remuda.replay.sequence_index import RecurrentStates
from remuda.replay.sequences import SequencePriority, SequenceReplay
from remuda.replay.transitions import TransitionPriority, TransitionReplay, as_row

__all__ = [
    "FrameRing",
    "Priorities",
    "RecurrentStates",
    "ReplayCounters",
    "Ring",
    "RolloutBuffer",
    "Row",
    "RowCounters",
    "SequencePriority",
    "SequenceReplay",
    "TransitionPriority",
    "TransitionReplay",
    "as_row",
]
