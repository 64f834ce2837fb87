"""Native vector envs as `core.Envs`: one vector env per slot, stepped in this process by the library's own code.

    spec = resolve("ALE/Pong-v5")
    with NativeEnvs(spec, backends.choose("ale", spec), num_envs=16, slots=2, threads=2) as envs:
        envs.reset(seed=1)
        while training:
            slot, step = envs.recv()             # slots come in the order in which they were sent
            envs.send(slot, act(step.obs))       # starts a step in the library's threads, if it has any

`recv` returns the same kind of `Step` as PooledEnvs. A native env cannot be killed or rebuilt: an exception ends the
run, and there is no time limit for an env that hangs. Native envs also cannot play given seeds, report entries of
info, or be held at the end of an episode. Use PooledEnvs for envs that may fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NoReturn, Self

from remuda.core import Actions, Array, EnvsState, Episode, Step
from remuda.envs.backends import Backend
from remuda.envs.episodes import EpisodeStats, resolve_stats
from remuda.envs.failures import FAILURES
from remuda.envs.import_paths import sentence
from remuda.envs.native_slot import NativeSlot
from remuda.envs.slots import envs_per_slot
from remuda.envs.spec import EnvSpec
from remuda.errors import EnvSpecError, Interrupted, NoState


class NativeEnvs:
    """Implements `core.Envs` with a native backend, which may use up to `threads` threads for each slot."""

    def __init__(
        self,
        spec: EnvSpec,
        backend: Backend,
        num_envs: int,
        slots: int = 1,
        threads: int = 1,
        gamma: float = 0.99,
        stats: str | type[EpisodeStats] | None = None,
        should_stop: Callable[[], bool] | None = None,
        first_env: int = 0,
    ) -> None:
        """`first_env` is the first env's index among all envs of the run; an env's seed is derived from its index."""
        per_slot = envs_per_slot(num_envs, slots)
        self.num_envs, self.num_slots, self.should_stop = num_envs, slots, should_stop
        stats_class = resolve_stats(stats)
        self._slots: list[NativeSlot] = []
        try:
            for slot in range(slots):
                try:
                    vector = backend.make(spec, per_slot, min(threads, per_slot))
                except FAILURES as error:
                    raise EnvSpecError(
                        f"{spec.label} could not be made by the backend {backend.NAME}, {sentence(error)}: "
                        "change envs.kwargs or use envs.backend=python."
                    ) from error
                label = f"{spec.label} in this process (backend {backend.NAME})"
                self._slots.append(
                    NativeSlot(vector, label, first_env + slot * per_slot, per_slot, gamma, stats_class)
                )
        except BaseException:
            self.close()
            raise
        self.observation, self.action = self._slots[0].observation, self._slots[0].action
        self._sent: deque[int] = deque()
        self._is_in_flight = [False] * slots  # for each slot, whether `recv` still has to return it

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start new episodes and take up to `warm_up` random steps in each env; return the total of these steps."""
        self._sent.clear()
        taken = sum(slot.reset(seed, warm_up, self._check_stop) for slot in self._slots)
        self._sent.extend(range(self.num_slots))
        self._is_in_flight = [True] * self.num_slots
        return taken

    def send(self, slot: int, action: Actions, hold: bool = False) -> None:
        """Send the actions of a slot; `hold` raises RuntimeError, because native envs reset themselves."""
        if hold:
            self.renew(slot)
        if self._is_in_flight[slot]:
            raise RuntimeError(f"slot {slot} has not been received since its last send.")
        self._slots[slot].send(action)
        self._is_in_flight[slot] = True
        self._sent.append(slot)

    def renew(self, slot: int) -> NoReturn:
        raise RuntimeError("native envs reset by themselves and cannot be held: use backend=python.")

    def prepare(self, seed: int, restarts: int) -> NoReturn:
        raise RuntimeError("native envs cannot take the place of lost ones: use backend=python.")

    def recv(self) -> tuple[int, Step]:
        if not self._sent:
            raise RuntimeError("recv() without a send() or reset() before it.")
        self._check_stop()
        slot = self._sent.popleft()
        self._is_in_flight[slot] = False
        return slot, self._slots[slot].recv()

    def _check_stop(self) -> None:
        if self.should_stop is not None and self.should_stop():
            raise Interrupted("asked to stop while stepping envs")

    def episodes(self) -> list[Episode]:
        finished = [episode for slot in self._slots for episode in slot.finished]
        for slot in self._slots:
            slot.finished.clear()
        return finished

    def info(self, slot: int) -> dict[str, Array]:
        """Return an empty dict, because native envs report no entries of info."""
        return {}

    def waited(self) -> float:
        """Return 0 seconds, because it is unknown how much of the time in `recv` was spent on waiting."""
        return 0.0

    def restarts(self) -> int:
        return 0

    def get_state(self) -> NoReturn:
        raise NoState("native envs keep their state to themselves")

    def set_state(self, state: EnvsState) -> NoReturn:
        raise NoState("native envs keep their state to themselves")

    def close(self) -> None:
        while self._slots:
            self._slots.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
