"""The sampler: envs x agent -> rollouts.

    sampler.reset(seed)
    while training:
        rollout = sampler.collect()      # T steps of every env; arrays are reused by the next collect
    sampler.close()

In-process envs, native vector envs, a process pool with central inference (one slot) and alternating groups (two
slots: one acts while the other steps) are the same loop over different `Envs`. Workers that act run it too, each over
envs of its own: see acting.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remuda.core import Agent, Envs, Episode, FastAgent, FastPolicy, Space, Weights
from remuda.data import Rollout, leaves, map_tree
from remuda.data.packing import pack, unpack
from remuda.sampling.buffers import Buffers, allocate, blank_obs
from remuda.sampling.exploration import Exploration, RandomActions
from remuda.sampling.noise import Noise


class ToEnv:
    """Actions as the agent makes them (flat and unbounded) to actions as an Envs takes them; whole numbers stay."""

    def __init__(self, action: Space) -> None:
        self.space = action
        self._spaces = action.tree(lambda _, leaf: leaf)
        self._clips = action.tree(lambda _, leaf: has_bounds(leaf))

    def __call__(self, action: Any) -> Any:
        if self.space.kind == "discrete":
            return action
        return map_tree(self._leaf, action, self._spaces, self._clips)

    @staticmethod
    def _leaf(action: Any, space: Space, clips: bool) -> Any:
        action = action.reshape(len(action), *space.shape)
        return np.clip(action, space.low, space.high) if clips else action


def has_bounds(leaf: Space) -> bool:
    return leaf.low is not None and leaf.high is not None and bool(np.isfinite([leaf.low, leaf.high]).any())


class EnvSampler:
    """One agent that acts for all slots of an Envs, strictly with the weights it held when the rollout began.

    With `wait_reset` an env whose episode ends is reset only when the next rollout begins: every column holds rows of
    one episode, padded with masked rows, which is what models that attend over a whole rollout need.

    Recurrent state is kept per env, put back exactly where an env was reset, and stored with each rollout.
    """

    def __init__(
        self,
        envs: Envs,
        agent: Agent,
        weights: Weights,
        num_steps: int,
        seed: int,
        first_row: int = 0,
        *,
        wait_reset: bool = False,
        first_env: int = 0,
        buffers: Buffers | None = None,
        explore: Exploration = Exploration(),  # noqa: B008  (it never changes)
    ) -> None:
        self.envs, self.agent, self.weights, self.num_steps = envs, agent, weights, num_steps
        self.seed, self.row, self.wait_reset = seed, first_row, wait_reset
        self.version = -1
        self._seconds = {"env": 0.0, "inference": 0.0}
        self._waited = 0.0
        self._to_env = ToEnv(envs.action)
        B, width = envs.num_envs, envs.num_envs // envs.num_slots
        self._columns = [slice(slot * width, (slot + 1) * width) for slot in range(envs.num_slots)]
        self._noise = Noise(seed, range(first_env, first_env + B), agent.noise)
        self._explore, self._amount = explore, explore.at(first_row)
        self._random: RandomActions | None = None
        if explore.random_rows > first_row:
            self._random = RandomActions(envs.action, seed, range(first_env, first_env + B))
        self.write_to(buffers or allocate(agent, envs.observation, num_steps, B))
        self._obs = blank_obs(envs.observation, B)  # what comes next
        self._obs_arrays = map_tree(lambda tensor: tensor.numpy(), self._obs)
        self._seen = [(self._obs[columns], self._obs_arrays[columns]) for columns in self._columns]
        self._state, self._blank = agent.initial_state(B), agent.initial_state(B)
        self._fast_policy: FastPolicy | None = None
        self._is_checked = False  # whether the agent's fast policy agrees with `act`
        self._is_over = np.zeros(B, bool)  # ended, and waiting for the next rollout
        self._is_running = np.zeros(B, bool)  # in the middle of an episode after the last row of a rollout
        self._begins = torch.ones(B, dtype=torch.bool)  # True where the next row starts a new episode

    def write_to(self, buffers: Buffers) -> None:
        """Where the next rollout goes."""
        self._buffers, self._steps = buffers, buffers.steps
        # The same memory as numpy, for what envs write.
        self._arrays = map_tree(lambda tensor: tensor.numpy(), self._steps)

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start every env; returns the random steps that were taken to spread them over their episodes."""
        taken = self.envs.reset(seed, warm_up)
        for _ in self._columns:
            slot, step = self.envs.recv()
            self._obs_arrays[self._columns[slot]] = step.obs
        if self._state is not None:
            self._state[...] = self._blank
        self._is_over.fill(False)
        self._begins.fill_(True)
        self._keep_end()  # of a rollout before the first, as it were: see `resume`
        self._waited = self.envs.waited()
        return taken

    def resume(self) -> None:
        """Continue after the last rollout in the buffers, in place of a worker that was lost.

        The envs answer row 0 with a reset, which masks it: no episode begins there.
        """
        self._begins.fill_(False)
        self._obs[...] = self._buffers.next_obs
        if self._state is not None:
            self._state[...] = self._buffers.next_state
        self._is_over.fill(True)  # the envs are new ones, and wait for their first reset

    def get_state(self) -> bytes:
        """What the coming rollouts depend on, beside weights and the number of rows done."""
        seen, memory = (_as_arrays(tree) for tree in (self._obs, self._state))
        own = {"is_over": self._is_over, "begins": self._begins.numpy()}
        return pack({"obs": seen, "memory": memory, **own, "envs": self.envs.get_state()})

    def set_state(self, state: bytes) -> None:
        saved = unpack(state)
        self.envs.set_state(saved["envs"])
        _fill(self._obs, saved["obs"])
        _fill(self._state, saved["memory"])
        self._is_over[:] = saved["is_over"]
        self._begins.copy_(torch.from_numpy(saved["begins"]))
        self._keep_end()
        self._waited = self.envs.waited()

    def collect(self) -> Rollout:
        """T rows of every env with one version of the weights."""
        self.version = self.weights.pull(self.version)
        noise = self._noise.rows(self.row, self.num_steps)
        noises = [noise[:, columns].unbind() for columns in self._columns]
        buffers = self._buffers
        with torch.inference_mode():
            if self.wait_reset:
                self._renew()
            if not self._is_checked:
                self._is_checked, fast = True, self.agent.fast_policy if isinstance(self.agent, FastAgent) else None
                self._fast_policy = fast if fast and fast.agrees_with(self.agent, self._obs, noise[0]) else None
            if self._state is not None:
                buffers.state[...] = self._state
            buffers.begins.copy_(self._begins)
            random = self._random_actions()
            for t in range(self.num_steps):
                self._amount = self._explore.at(self.row + t)
                for slot in range(len(self._columns)):
                    if t > 0:
                        self._receive(t - 1)
                    self._act(t, slot, noises[slot][t], random[t] if t < len(random) else None)
            for _ in self._columns:
                self._receive(self.num_steps - 1)
            if self._fast_policy is not None:
                self._evaluate_actions(self._fast_policy)
            if buffers.last_value is not None:
                value: Callable[..., Tensor] = self.agent.value  # type: ignore[attr-defined]  # the buffers say so
                buffers.last_value.copy_(value(self._obs, self._state))
            self._keep_end()
        self._steps.version.fill_(self.version)
        self.row += self.num_steps
        self._begins.copy_(~self._steps.mask[-1])
        return Rollout(self._steps, buffers.next_obs, buffers.last_value, buffers.state, begins=buffers.begins)

    def _random_actions(self) -> Any:
        """[up to T, B] of the rows that are still to be random."""
        count = min(self.num_steps, self._explore.random_rows - self.row)
        if self._random is None or count <= 0:
            return ()
        return self._random.rows(self.row, count)

    def _keep_end(self) -> None:
        """What comes after the last row."""
        self._buffers.next_obs[...] = self._obs
        if self._state is not None:
            self._buffers.next_state[...] = self._state

    def take_seconds(self) -> dict[str, float]:
        """Where the time went since the last call: envs stepping, waiting for them, inference."""
        waited, seconds = self.envs.waited() - self._waited, self._seconds
        self._waited += waited
        self._seconds = dict.fromkeys(seconds, 0.0)
        return {**seconds, "env": seconds["env"] - waited, "wait": waited}

    def episodes(self) -> list[Episode]:
        return self.envs.episodes()

    def restarts(self) -> int:
        return self.envs.restarts()

    def running(self) -> int:
        """Return the number of envs that were in the middle of an episode when the last rollout ended."""
        return int(self._is_running.sum())

    def close(self) -> None:
        self.envs.close()

    def _act(self, t: int, slot: int, noise: Tensor, random: Any) -> None:
        start = time.perf_counter()
        columns = self._columns[slot]
        obs, obs_arrays = self._seen[slot]
        said = None
        if random is not None and self._state is None:
            actions = random[columns]
        else:
            if self._fast_policy is not None:
                action = self._fast_policy.choose(obs, noise)
            else:
                explore = None if self._amount is None else self._amount[columns]
                state = None if self._state is None else self._state[columns]
                action, said, state = self.agent.act(obs, state, explore, noise)
                if self._state is not None:
                    self._state[columns] = state
            actions = action.numpy() if isinstance(action, Tensor) else map_tree(lambda x: x.numpy(), action)
            if random is not None:
                actions = random[columns]
        self._arrays.obs[t, columns] = obs_arrays
        self._arrays.action[t, columns] = actions
        if said is not None:
            self._steps.policy[t, columns] = said
        taken = self._to_env(actions)
        if self.wait_reset:
            self.envs.send(slot, taken, hold=True)
        else:
            self.envs.send(slot, taken)
        self._seconds["inference"] += time.perf_counter() - start

    def _evaluate_actions(self, policy: FastPolicy) -> None:
        """Of all rows in one go."""
        start = time.perf_counter()
        steps = self._steps
        obs, action = map_tree(lambda x: x.reshape(-1, *x.shape[2:]), (steps.obs, steps.action))
        said = policy.evaluate_actions(obs, action)
        steps.policy[...] = map_tree(lambda x: x.reshape(*steps.mask.shape, *x.shape[1:]), said)
        self._seconds["inference"] += time.perf_counter() - start

    def _receive(self, t: int) -> None:
        """The answer of the slot that was sent to first, into the row it belongs to."""
        start = time.perf_counter()
        slot, step = self.envs.recv()
        columns, arrays = self._columns[slot], self._arrays
        arrays.reward[t, columns] = step.reward
        arrays.discount[t, columns] = ~step.terminated
        arrays.mask[t, columns] = step.mask
        self._obs_arrays[columns] = step.obs
        if t == self.num_steps - 1:
            self._is_running[columns] = step.mask & ~(step.terminated | step.truncated)
        if self._state is not None and not step.mask.all():
            self._forget(columns.start + np.flatnonzero(~step.mask))
        if self.wait_reset:
            # A masked row is padding after an end, or an env that was lost and waits as well.
            self._is_over[columns] = ~step.mask | step.terminated | step.truncated
        self._seconds["env"] += time.perf_counter() - start

    def _forget(self, envs: Any) -> None:
        """These were reset: what they see next is the first observation of an episode."""
        index = torch.from_numpy(envs)
        self._state[index] = self._blank[index]

    def _renew(self) -> None:
        """Begin new episodes where the last rollout's padding ended."""
        if not self._is_over.any():
            return
        asked = [slot for slot, columns in enumerate(self._columns) if self._is_over[columns].any()]
        for slot in asked:
            self.envs.renew(slot)
        for _ in asked:
            slot, step = self.envs.recv()
            self._obs_arrays[self._columns[slot]] = step.obs
        if self._state is not None:
            self._forget(np.flatnonzero(self._is_over))
        self._begins |= torch.from_numpy(self._is_over)
        self._is_over.fill(False)


def _as_arrays(tree: Any) -> dict[str, Any]:
    return {path: tensor.numpy() for path, tensor in leaves(tree)}


def _fill(tree: Any, arrays: dict[str, Any]) -> None:
    for path, tensor in leaves(tree):
        tensor.copy_(torch.from_numpy(arrays[path]))
