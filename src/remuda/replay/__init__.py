"""Replays: batches in, the batches that are due out."""

from remuda.replay.experience import Experience, as_row
from remuda.replay.frames import FrameRing
from remuda.replay.fresh import Fresh
from remuda.replay.judging import RowJudge, SequenceJudge
from remuda.replay.priorities import Priorities
from remuda.replay.ring import Ring, Row
from remuda.replay.sequences import Sequences
from remuda.replay.starts import States

__all__ = [
    "Experience",
    "FrameRing",
    "Fresh",
    "Priorities",
    "Ring",
    "Row",
    "RowJudge",
    "SequenceJudge",
    "Sequences",
    "States",
    "as_row",
]
