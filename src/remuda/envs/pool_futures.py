"""`EnvPool`: batches of envs whose steps are futures, for your own training loops.

    with EnvPool("CartPole-v1", num_processes=2, batch_size=16, num_batches=2) as pool:
        actions = [np.zeros(16, np.int64)] * 2
        futures = [pool.step(batch, actions[batch]) for batch in range(2)]     # the first step of a batch resets it
        while training:
            for batch in range(2):
                step = futures[batch].result()
                actions[batch] = act(step.obs)                                 # while the other batch is stepped
                futures[batch] = pool.step(batch, actions[batch])

An env is reset by the step after the end of its episode. That step ignores the env's action, and its result has mask
False. The arrays of a result are views of shared memory that the next step of the batch overwrites. A process that
dies or hangs is replaced, and the next step of its envs resets them. Processes are forked from a fork server without
threads, so a pool may be created at any time, whatever threads the program has. One thread at a time may use a pool.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from remuda.core import Actions, Array, ArrayTree, Episode, derive_seed
from remuda.envs.import_paths import OR_SERIAL
from remuda.envs.pool import PooledEnvs
from remuda.envs.spec import EnvSpec, Factory, resolve
from remuda.errors import ConfigError, EnvSpecError


@dataclass(frozen=True, eq=False)
class BatchStep:
    """The result of one step of one batch; every array has the shape [batch_size, ...]."""

    obs: ArrayTree  # at the last step of an episode, the true final observation
    reward: Array
    terminated: Array
    truncated: Array
    mask: Array  # False where the env was reset instead of taking its action
    info: Mapping[str, Array]  # entries named by `info` of the EnvPool; nan where an env's info has no such number


class StepFuture:
    """The result of one `step`, which may not be available yet."""

    def __init__(self, pool: EnvPool, batch: int) -> None:
        self._pool, self._batch = pool, batch
        self._sent_at = time.monotonic()

    def result(self, timeout: float | None = None) -> BatchStep:
        """Wait for the result and return it; raise TimeoutError after `timeout` seconds, if given.

        The method may be called again after a TimeoutError. Once there is a result, every call returns this result
        until the batch is stepped or reset again.
        """
        return self._pool._result(self, self._batch, timeout)

    def done(self) -> bool:
        """Return True if result() would return at once, or if `step_timeout` has passed since the step was sent.

        In the second case result() must be called, because hanging workers are replaced only while result() waits.
        """
        return self._pool._is_done(self, self._batch, self._sent_at)


class EnvPool:
    """`num_batches` batches of `batch_size` envs in `num_processes` processes."""

    def __init__(
        self,
        env: str | Factory | EnvSpec,  # an id, "package.module:factory", or a callable
        num_processes: int,
        batch_size: int,
        num_batches: int = 1,
        *,
        kwargs: Mapping[str, object] | None = None,  # keyword arguments of the env
        info: Sequence[str] = (),  # names of numbers in the env's info to return as `BatchStep.info`
        seed: int = 0,
        step_timeout: float = 60.0,  # seconds after which a process that has not answered is replaced
        build_timeout: float = 120.0,
        max_restarts: int = 1000,  # limit on how often each env is rebuilt after it raised
        max_worker_restarts: int = 10,  # limit on how often each process is replaced within a minute
    ) -> None:
        if min(num_processes, batch_size, num_batches) < 1:
            given = f"num_processes={num_processes}, batch_size={batch_size}, num_batches={num_batches}"
            raise ConfigError(f"{given}: each is at least 1.")
        if num_processes > batch_size:
            raise ConfigError(
                f"num_processes={num_processes} for batch_size={batch_size}: every process steps its share of every "
                f"batch, so use 1 to {batch_size} processes."
            )
        self.batch_size, self.num_batches = batch_size, num_batches
        self._seed, self._resets, self._step_timeout = seed, 0, step_timeout
        self._futures: list[StepFuture | None] = [None] * num_batches  # the future of each batch's last step
        self._results: list[BatchStep | None] = [None] * num_batches  # each batch's last result; None until received
        try:
            self._envs = PooledEnvs(
                resolve(env, kwargs),
                batch_size * num_batches,
                num_processes,
                num_batches,
                step_timeout=step_timeout,
                build_timeout=build_timeout,
                max_restarts=max_restarts,
                max_worker_restarts=max_worker_restarts,
                info=info,
                seed=seed,
            )
        except EnvSpecError as error:
            raise EnvSpecError(str(error).replace(OR_SERIAL, "")) from error
        self.observation, self.action = self._envs.observation, self._envs.action

    def reset(self, seed: int | None = None) -> list[BatchStep]:
        """Start new episodes in all envs and drop steps in flight; return one BatchStep per batch, with mask False.

        If `seed` is None, the first call uses the pool's seed, and later calls use seeds derived from that seed.
        """
        if seed is None:
            seed = derive_seed(self._seed, self._resets) if self._resets else self._seed
        self._resets += 1
        self._futures = [None] * self.num_batches
        self._envs.reset(seed)
        return [self._receive(batch) for batch in range(self.num_batches)]

    def step(self, batch: int, action: Actions) -> StepFuture:
        """Send actions [batch_size, ...] without blocking. Actions of a Dict space may be a dict with its keys."""
        if not 0 <= batch < self.num_batches:
            raise ValueError(f"batch {batch} of num_batches={self.num_batches}: they are numbered from 0.")
        if self._futures[batch] is not None and self._results[batch] is None:
            raise RuntimeError(f"batch {batch} is in flight: take the result of its last step before the next one.")
        self._envs.send(batch, action)
        future = StepFuture(self, batch)
        self._futures[batch], self._results[batch] = future, None
        return future

    def _result(self, future: StepFuture, batch: int, timeout: float | None) -> BatchStep:
        if self._futures[batch] is not future:
            raise RuntimeError(
                f"batch {batch} was stepped or reset again, which overwrote this result: take it before that."
            )
        result = self._results[batch]
        if result is not None:
            return result
        if timeout is not None and not self._envs.is_ready(batch, timeout):
            raise TimeoutError(f"batch {batch} was not ready within {timeout:g} s: ask again, or wait longer.")
        return self._receive(batch)

    def _is_done(self, future: StepFuture, batch: int, sent_at: float) -> bool:
        if self._futures[batch] is not future or self._results[batch] is not None:
            return True  # result() would return at once, or raise at once because its result was overwritten
        return self._envs.is_ready(batch) or time.monotonic() - sent_at > self._step_timeout

    def _receive(self, batch: int) -> BatchStep:
        _, step = self._envs.recv(batch)
        info = self._envs.info(batch)
        result = BatchStep(step.obs, step.reward, step.terminated, step.truncated, step.mask, info)
        self._results[batch] = result
        return result

    def episodes(self) -> list[Episode]:
        """Return statistics of the episodes that ended in results received since the last call of this method."""
        return self._envs.episodes()

    def restarts(self) -> int:
        """Return how often envs were rebuilt so far, because they raised or their process was lost."""
        return self._envs.restarts()

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        self._envs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
