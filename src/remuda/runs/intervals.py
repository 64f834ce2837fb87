"""Intervals, in env steps, between the metrics lines, checkpoints and evaluations of a run.

interval = Interval(every=1_000)
interval.start(steps=200)          # due from 1,200 steps on
if interval.is_due(steps):
    ...
    interval.restart(steps)        # due again 1,000 steps later
"""

from __future__ import annotations


class Interval:
    """A number of steps after which something is due; 0 means never."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.next_steps = every

    def start(self, steps: int, saved: int | None = None) -> None:
        """Count from `steps`.

        `saved` is the value that `next_steps` had in the checkpoint of a resumed run. It becomes the next point,
        unless the user has resumed the run with such a short interval that `steps + every` is earlier.
        """
        self.restart(steps)
        if saved is not None:
            self.next_steps = min(self.next_steps, saved)

    def restart(self, steps: int) -> None:
        """Set the next point to `every` steps after `steps`."""
        self.next_steps = steps + self.every

    def is_due(self, steps: int) -> bool:
        """Return whether `steps` has reached the next point."""
        return self.every > 0 and steps >= self.next_steps
