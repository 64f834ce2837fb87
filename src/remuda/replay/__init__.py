"""Replays: batches in, the batches that are due out."""

from remuda.replay.fresh import Fresh

__all__ = ["Fresh"]
