"""Intervals, in env steps, between the metrics lines, checkpoints and evaluations of a run.

interval = Interval(every=1_000)
interval.start(steps=200)          # due from 1,200 steps on
if interval.is_due(steps):
    ...
    interval.restart(steps)        # due again 1,000 steps later
"""

from __future__ import annotations


class Interval:
    """Tells when an action that is repeated every `every` env steps is due; if `every` is 0, it is never due."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.next_steps = every

    def start(self, steps: int, saved: int | None = None) -> None:
        """Set `next_steps`, the number of steps at which the action is next due, to `steps + every`.

        In a resumed run, `saved` is the value of `next_steps` in the checkpoint. `next_steps` then becomes `saved`,
        unless `steps + every` is earlier because the run was resumed with a shorter interval.
        """
        self.restart(steps)
        if saved is not None:
            self.next_steps = min(self.next_steps, saved)

    def restart(self, steps: int) -> None:
        """Set `next_steps` to `steps + every`."""
        self.next_steps = steps + self.every

    def is_due(self, steps: int) -> bool:
        """Return whether `steps` has reached `next_steps`; always False if `every` is 0."""
        return self.every > 0 and steps >= self.next_steps
