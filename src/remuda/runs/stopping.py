"""Conditions under which a run ends before its last step: a stop signal, a callback, or `Training.close`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from remuda.recipe import Round
from remuda.runs.signals import StopSignals

Callback = Callable[[Round], object]  # called with every round; returning True stops the run


class StopConditions:
    """Decides whether the run should stop before its last step, how soon, and for which reason."""

    def __init__(self, signals: StopSignals) -> None:
        self.signals = signals
        self.callbacks: Sequence[Callback] = ()
        self.has_begun = False  # whether training has begun; before that, a signal stops the run at once
        self._by_callback = False
        self.is_closed = False  # whether the user has called `Training.close` (runs/training.py)

    def call_callbacks(self, round: Round) -> None:
        """Call every callback, even after one has returned True, because each may add metrics to the round."""
        if True in [callback(round) for callback in self.callbacks]:
            self._by_callback = True

    def should_end(self) -> bool:
        """Return whether the run stops now, at the end of a round."""
        return self._by_callback or self.is_requested()

    def signal_received(self) -> bool:
        """Return whether a stop signal has arrived."""
        return self.signals.received is not None

    def is_requested(self) -> bool:
        """Return whether a signal or `Training.close` asks the run to stop at the end of the round."""
        return self.is_closed or self.signal_received()

    def must_end_now(self) -> bool:
        """Return whether a signal ends the current round early.

        Before training begins, a signal takes effect at once; during training, only if the round is still running at
        `signals.deadline`.
        """
        return self.signal_received() and (not self.has_begun or time.monotonic() > self.signals.deadline)

    @property
    def reason(self) -> str:
        """What stopped the run: the name of the signal, `close` or `callback`."""
        signal = self.signals.received
        if signal is not None:
            return signal.name
        return "close" if self.is_closed else "callback"
