"""The sampler: envs x agent -> rollouts.

    sampler.reset(seed)
    while training:
        rollout = sampler.collect()      # T steps of every env; arrays are reused by the next collect

In-process envs, a process pool with central inference (one slot) and alternating groups (two slots: one acts
while the other steps) are the same loop over different `Envs`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remuda.core import Agent, Envs, Space, Weights
from remuda.data import Rollout, Steps, map_tree
from remuda.sampling.noise import Noise

TORCH_DTYPES = {"float32": torch.float32, "int64": torch.int64, "uint8": torch.uint8, "bool": torch.bool}


class ToEnv:
    """Actions as the agent makes them (flat and unbounded) to actions as an Envs takes them; integers stay."""

    def __init__(self, action: Space) -> None:
        self.space = action
        low, high = action.low, action.high
        self.clips = low is not None and high is not None and bool(np.isfinite(low).any() or np.isfinite(high).any())

    def __call__(self, action: NDArray[Any]) -> NDArray[Any]:
        if self.space.kind == "discrete":
            return action
        action = action.reshape(len(action), *self.space.shape)
        return np.clip(action, self.space.low, self.space.high) if self.clips else action


class EnvSampler:
    """One agent that acts for all slots of an Envs, strictly with the weights it held when the rollout began."""

    def __init__(
        self,
        envs: Envs,
        agent: Agent,
        weights: Weights,
        num_steps: int,
        seed: int,
        first_row: int = 0,
    ) -> None:
        self.envs, self.agent, self.weights, self.num_steps = envs, agent, weights, num_steps
        self.seed, self.row = seed, first_row
        self.version = -1
        self._seconds = {"env": 0.0, "inference": 0.0}
        self._waited = 0.0
        self._to_env = ToEnv(envs.action)
        B, width = envs.num_envs, envs.num_envs // envs.num_slots
        self._columns = [slice(slot * width, (slot + 1) * width) for slot in range(envs.num_slots)]
        self._noise = Noise(seed, range(B), agent.noise)
        self._obs = torch.zeros(B, *envs.observation.shape, dtype=torch_dtype(envs.observation))
        self._last_value = torch.zeros(B)
        self._steps = self._allocate()
        # The same memory as numpy, for what envs write.
        self._arrays = map_tree(lambda tensor: tensor.numpy(), self._steps)
        self._obs_array = self._obs.numpy()
        self._state = agent.initial_state(B)

    def _allocate(self) -> Steps:
        """[T, B] buffers in the shape of what the agent says of one batch."""
        T, B = self.num_steps, self.envs.num_envs
        with torch.no_grad():
            action, said, _ = self.agent.act(self._obs, self.agent.initial_state(B), None, self._noise.rows(0, 1)[0])
        return Steps(
            obs=self._obs.new_zeros((T, *self._obs.shape)),
            action=action.new_zeros((T, *action.shape)),
            reward=torch.zeros(T, B),
            discount=torch.zeros(T, B),
            mask=torch.zeros(T, B, dtype=torch.bool),
            policy=map_tree(lambda x: x.new_zeros((T, *x.shape)), said),
            version=torch.zeros(T, B, dtype=torch.int64),
        )

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start every env; returns the random steps that were taken to spread them over their episodes."""
        taken = self.envs.reset(seed, warm_up)
        for _ in self._columns:
            slot, step = self.envs.recv()
            self._obs_array[self._columns[slot]] = step.obs
        self._waited = self.envs.waited()
        return taken

    def collect(self) -> Rollout:
        """T rows of every env with one version of the weights."""
        self.version = self.weights.pull(self.version)
        noise = self._noise.rows(self.row, self.num_steps)
        with torch.inference_mode():
            for t in range(self.num_steps):
                for slot in range(len(self._columns)):
                    if t > 0:
                        self._receive(t - 1)
                    self._act(t, slot, noise[t])
            for _ in self._columns:
                self._receive(self.num_steps - 1)
            self._last_value.copy_(self.agent.value(self._obs, self._state))
        self._steps.version.fill_(self.version)
        self.row += self.num_steps
        return Rollout(self._steps, self._obs, self._last_value)

    def take_seconds(self) -> dict[str, float]:
        """Where the time went since the last call: envs stepping, waiting for them, inference."""
        waited, seconds = self.envs.waited() - self._waited, self._seconds
        self._waited += waited
        self._seconds = dict.fromkeys(seconds, 0.0)
        return {**seconds, "env": seconds["env"] - waited, "wait": waited}

    def _act(self, t: int, slot: int, noise: Tensor) -> None:
        start = time.perf_counter()
        columns = self._columns[slot]
        obs = self._obs[columns]
        action, said, _ = self.agent.act(obs, None, None, noise[columns])
        self._steps.obs[t, columns] = obs
        self._steps.action[t, columns] = action
        self._steps.policy[t, columns] = said
        self.envs.send(slot, self._to_env(self._arrays.action[t, columns]))
        self._seconds["inference"] += time.perf_counter() - start

    def _receive(self, t: int) -> None:
        """The answer of the slot that was sent to first, into the row it belongs to."""
        start = time.perf_counter()
        slot, step = self.envs.recv()
        columns, arrays = self._columns[slot], self._arrays
        arrays.reward[t, columns] = step.reward
        arrays.discount[t, columns] = ~step.terminated
        arrays.mask[t, columns] = step.mask
        self._obs_array[columns] = step.obs
        self._seconds["env"] += time.perf_counter() - start


def torch_dtype(space: Space) -> torch.dtype:
    return TORCH_DTYPES.get(space.dtype) or getattr(torch, space.dtype)
