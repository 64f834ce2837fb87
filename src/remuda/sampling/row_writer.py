"""Write the rows of a rollout: the agent's observations and actions, and the steps that the envs return.

    inputs = AgentInputs(agent, envs.observation, num_envs)     # the next observation and state of every env
    (writer,) = make_writers(inputs, envs, agent, seed, explore)  # one for each slot of the envs
    writer.write_to(buffers)
    writer.begin(row, num_steps)                                # draws the noise of these rows
    for t in range(num_steps):
        writer.write_action(t, actions, policy_output)
        envs.send(...)
        writer.write_step(t, step)                              # writes what the envs returned and updates `inputs`
    inputs.finish(agent, buffers, writer.columns)               # writes what follows the last row

All samplers write their rows with the two classes of this module. The samplers differ in when they act for a slot of
the envs, and in which buffers they fill.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remuda.core import Agent, Envs, Space, Step
from remuda.data import ArrayTuple, NumpyArray, map_tree
from remuda.sampling.buffers import Buffers, Tree, blank_obs
from remuda.sampling.exploration import Exploration, RandomActions
from remuda.sampling.noise import Noise

ALL = slice(None)


class AgentInputs:
    """The next inputs of the agent for each of B envs: the observation and, for agents with memory, the state.

    The state of an env returns to its initial value exactly where the env was reset.
    """

    def __init__(self, agent: Agent, observation: Space, num_envs: int) -> None:
        self.obs = blank_obs(observation, num_envs)
        self.obs_arrays = map_tree(lambda tensor: tensor.numpy(), self.obs)  # NumPy views of `obs`
        self.state = agent.initial_state(num_envs)  # None for agents without memory
        self._initial_state = agent.initial_state(num_envs)
        self.begins = torch.ones(num_envs, dtype=torch.bool)  # True where the next row starts a new episode

    def reset(self) -> None:
        """Reset all recurrent states, and mark the next row of every env as the first of an episode."""
        if self.state is not None:
            self.state[...] = self._initial_state
        self.begins.fill_(True)

    def reset_state(self, envs: NDArray[np.int64]) -> None:
        """Reset the recurrent state of these envs, whose next observation is the first of an episode."""
        index = torch.from_numpy(envs)
        self.state[index] = self._initial_state[index]

    def finish(self, agent: Agent, buffers: Buffers, columns: slice = ALL) -> None:
        """Complete the rollout of the envs `columns`: store the next observation, its value, and the next state."""
        if buffers.last_value is not None:  # `allocate` provides `last_value` only for agents with a `value` method
            state = None if self.state is None else self.state[columns]
            value: Tensor = agent.value(self.obs[columns], state)  # type: ignore[attr-defined]
            buffers.last_value.copy_(value)
        self.store_next(buffers, columns)
        self.begins[columns] = ~buffers.steps.mask[-1]

    def store_next(self, buffers: Buffers, columns: slice = ALL) -> None:
        """Store the observation and state that follow the last row."""
        buffers.next_obs[...] = self.obs[columns]
        if self.state is not None:
            buffers.next_state[...] = self.state[columns]


class RowWriter:
    """Writes the rows of the envs of one slot into the buffers of a rollout."""

    def __init__(self, inputs: AgentInputs, columns: slice, noise: Noise, random: RandomActions, random_rows: int):
        self.inputs, self.columns = inputs, columns
        self.obs, self.obs_arrays = inputs.obs[columns], inputs.obs_arrays[columns]
        self._noise, self._random, self._random_rows = noise, random, random_rows
        self.buffers: Buffers | None = None
        self.noise: Sequence[Tensor] = ()  # the noise of each row of the rollout
        # Random actions for the first rows of the rollout; empty once the run has passed row `random_rows`.
        self.random: Sequence[NumpyArray] | NumpyArray = ()

    def write_to(self, buffers: Buffers) -> None:
        """Use `buffers` for the next rollout. They must have one column for each env of the slot."""
        self.buffers, self.steps = buffers, buffers.steps
        arrays = map_tree(lambda tensor: tensor.numpy(), buffers.steps)  # NumPy views of the tensors
        # Keep these arrays as attributes, which are read faster than fields of an ArrayTuple, for every step.
        self._obs, self._action, self._reward = arrays.obs, arrays.action, arrays.reward
        self._discount, self._mask = arrays.discount, arrays.mask

    def begin(self, row: int, num_steps: int) -> None:
        """Begin a rollout whose first row is row number `row` of the run."""
        assert self.buffers is not None
        self.noise = self._noise.rows(row, num_steps).unbind()
        num_random = min(num_steps, self._random_rows - row)
        self.random = self._random.rows(row, num_random) if num_random > 0 else ()
        self.buffers.begins.copy_(self.inputs.begins[self.columns])
        if self.inputs.state is not None:
            self.buffers.state[...] = self.inputs.state[self.columns]

    def write_action(self, t: int, action: Tree, output: ArrayTuple | None) -> None:
        """Write the observation, the action, and the policy output (if there is one) to row t."""
        self._obs[t] = self.obs_arrays
        self._action[t] = action
        if output is not None:
            self.steps.policy[t] = output

    def write_step(self, t: int, step: Step) -> None:
        """Write to row t the step that the envs returned; its observations become the agent's next inputs."""
        mask = step.mask
        self._reward[t] = step.reward
        self._discount[t] = ~step.terminated
        self._mask[t] = mask
        self.obs_arrays[...] = step.obs
        if self.inputs.state is not None and not mask.all():
            self.inputs.reset_state(self.columns.start + np.flatnonzero(~mask))


def make_writers(
    inputs: AgentInputs, envs: Envs, agent: Agent, seed: int, exploration: Exploration, first_env: int = 0
) -> list[RowWriter]:
    """Return a writer for each slot of `envs`. `first_env` is the index of env 0 among all envs of the run."""
    width = envs.num_envs // envs.num_slots
    writers = []
    for start in range(0, envs.num_envs, width):
        own = range(first_env + start, first_env + start + width)
        noise, random = Noise(seed, own, agent.noise), RandomActions(envs.action, seed, own)
        writers.append(RowWriter(inputs, slice(start, start + width), noise, random, exploration.random_rows))
    return writers
