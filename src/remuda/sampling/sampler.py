"""Sample rollouts: one agent acts for all envs.

    sampler = EnvSampler(envs, agent, weights, num_steps, seed)
    sampler.reset(seed)
    while training:
        rollout = sampler.collect()      # num_steps rows of every env; the next call reuses the arrays
    sampler.close()

The same loop runs over all kinds of `Envs`: in-process envs, native vector envs, a process pool with central
inference (one slot), and alternating groups (two slots: the agent acts for one slot while the envs of the other slot
step). Sampler workers run this loop, too, each with its own envs (sampler_worker.py).
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from remuda.core import Agent, Envs, Episode, FastAgent, FastPolicy, Space, Weights
from remuda.data import NumpyArray, Rollout, leaves, map_tree
from remuda.data.packing import pack, unpack
from remuda.sampling.buffers import Buffers, Tree, allocate
from remuda.sampling.exploration import Exploration
from remuda.sampling.row_writer import AgentInputs, RowWriter, make_writers


class ToEnv:
    """Converts flat, unbounded actions of an agent to the shape and bounds of a Box; keeps discrete actions."""

    def __init__(self, action: Space) -> None:
        self.space = action
        self._spaces = action.tree(lambda _, leaf: leaf)
        self._clips = action.tree(lambda _, leaf: has_bounds(leaf))

    def __call__(self, action: Tree) -> Tree:
        if self.space.kind == "discrete":
            return action
        return map_tree(self._leaf, action, self._spaces, self._clips)

    @staticmethod
    def _leaf(action: NumpyArray, space: Space, clips: bool) -> NumpyArray:
        action = action.reshape(len(action), *space.shape)
        return np.clip(action, space.low, space.high) if clips else action


def has_bounds(leaf: Space) -> bool:
    return leaf.low is not None and leaf.high is not None and bool(np.isfinite([leaf.low, leaf.high]).any())


class EnvSampler:
    """Samples rollouts with one agent for all slots of an `Envs`, each rollout with one version of the weights.

    With `wait_reset`, an env whose episode ends is reset only when the next rollout begins. Every column then holds
    rows of one episode, padded with masked rows; models that attend over a whole rollout need this.
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
        explore: Exploration = Exploration(),  # noqa: B008  (immutable)
    ) -> None:
        """Start at row number `first_row`; `first_env` is the index of the first env among all envs of the run."""
        self.envs, self.agent, self.weights, self.num_steps = envs, agent, weights, num_steps
        self.seed, self.row, self.wait_reset = seed, first_row, wait_reset
        self.version = -1
        self._seconds = {"env": 0.0, "inference": 0.0}
        self._waited = 0.0
        self._to_env = None if envs.action.kind == "discrete" else ToEnv(envs.action)
        B = envs.num_envs
        self._explore = explore
        self._inputs = AgentInputs(agent, envs.observation, B)
        self._writers = make_writers(self._inputs, envs, agent, seed, explore, first_env)
        self.write_to(buffers or allocate(agent, envs.observation, num_steps, B))
        self._fast_policy: FastPolicy | None = None
        self._is_checked = False  # whether `collect` has compared the agent's fast policy with `act`
        self._is_over = np.zeros(B, bool)  # True for envs that wait for a reset (with wait_reset)
        self._is_running = np.zeros(B, bool)  # True for envs that are in the middle of an episode

    def write_to(self, buffers: Buffers) -> None:
        """Use `buffers` for the next rollout."""
        self._buffers = buffers
        for writer in self._writers:
            own = writer.columns
            writer.write_to(buffers if len(self._writers) == 1 else buffers.columns(own.start, own.stop))

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Reset every env; return the number of random warm-up steps, of which each env takes at most `warm_up`."""
        taken = self.envs.reset(seed, warm_up)
        for _ in self._writers:
            slot, step = self.envs.recv()
            self._writers[slot].obs_arrays[...] = step.obs
        self._inputs.reset()
        self._is_over.fill(False)
        self._inputs.store_next(self._buffers)  # if this worker is lost, its replacement reads these values
        self._waited = self.envs.waited()
        return taken

    def resume(self) -> None:
        """Continue where the rollout in the buffers ends. The replacement of a lost worker calls this.

        The new envs are reset in row 0 of the next rollout, so this row is masked and belongs to the episodes that
        were lost. With `wait_reset`, the envs are reset before row 0, so this row is the first of new episodes.
        """
        inputs, buffers = self._inputs, self._buffers
        inputs.begins.fill_(False)
        inputs.obs[...] = buffers.next_obs
        if inputs.state is not None:
            inputs.state[...] = buffers.next_state
        self._is_over.fill(True)  # the envs are new and wait for their first reset

    def get_state(self) -> bytes:
        """Return everything that later rollouts depend on, except the weights and the row number."""
        inputs = self._inputs
        obs, memory = (_as_arrays(tree) for tree in (inputs.obs, inputs.state))
        own = {"is_over": self._is_over, "begins": inputs.begins.numpy()}
        return pack({"obs": obs, "memory": memory, **own, "envs": self.envs.get_state()})

    def set_state(self, state: bytes) -> None:
        saved, inputs = unpack(state), self._inputs
        self.envs.set_state(saved["envs"])
        _fill(inputs.obs, saved["obs"])
        _fill(inputs.state, saved["memory"])
        self._is_over[:] = saved["is_over"]
        inputs.begins.copy_(torch.from_numpy(saved["begins"]))
        inputs.store_next(self._buffers)
        self._waited = self.envs.waited()

    def collect(self) -> Rollout:
        """Sample num_steps rows of every env with one version of the weights."""
        self.version = self.weights.pull(self.version)
        buffers, writers, recv, clock = self._buffers, self._writers, self.envs.recv, time.perf_counter
        amount, env_seconds = None, 0.0
        has_amount = self._explore.amount is not None
        with torch.inference_mode():
            if self.wait_reset:
                self._renew()
            for writer in writers:
                writer.begin(self.row, self.num_steps)
            if not self._is_checked:
                self._is_checked, fast = True, self.agent.fast_policy if isinstance(self.agent, FastAgent) else None
                noise = torch.cat([writer.noise[0] for writer in writers])
                agrees = fast is not None and fast.agrees_with(self.agent, self._inputs.obs, noise)
                self._fast_policy = fast if agrees else None
            for t in range(self.num_steps):
                if has_amount:
                    amount = self._explore.at(self.row + t)
                for slot in range(len(writers)):
                    if t > 0:
                        start = clock()
                        received, step = recv()
                        writers[received].write_step(t - 1, step)
                        env_seconds += clock() - start
                    self._act(slot, t, amount)
            start = clock()
            for _ in writers:
                received, step = recv()
                writers[received].write_step(self.num_steps - 1, step)
                self._is_running[writers[received].columns] = step.mask & ~(step.terminated | step.truncated)
            self._seconds["env"] += env_seconds + clock() - start
            if self.wait_reset:
                # An env with a masked last row needs a reset, too: its episode ended earlier, or its worker was lost.
                np.logical_not(self._is_running, out=self._is_over)
            if self._fast_policy is not None:
                self._evaluate_actions(self._fast_policy)
            self._inputs.finish(self.agent, buffers)
        buffers.steps.version.fill_(self.version)
        self.row += self.num_steps
        return Rollout(buffers.steps, buffers.next_obs, buffers.last_value, buffers.state, begins=buffers.begins)

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds spent on stepping envs, on waiting for envs, and on inference since the last call."""
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

    def _act(self, slot: int, t: int, amount: Tensor | None) -> None:
        """Choose the actions of one slot, write them to row t, and send them to the envs."""
        start = time.perf_counter()
        writer: RowWriter = self._writers[slot]
        inputs, output = writer.inputs, None
        is_random = t < len(writer.random)
        if is_random and inputs.state is None:
            actions = writer.random[t]
        else:
            if self._fast_policy is not None:
                action = self._fast_policy.choose(writer.obs, writer.noise[t])
            else:
                own = writer.columns
                explore = None if amount is None else amount[own]
                state = None if inputs.state is None else inputs.state[own]
                action, output, state = self.agent.act(writer.obs, state, explore, writer.noise[t])
                if inputs.state is not None:
                    inputs.state[own] = state
            actions = action.numpy() if isinstance(action, Tensor) else map_tree(lambda x: x.numpy(), action)
            if is_random:
                actions = writer.random[t]
        writer.write_action(t, actions, output)
        if self._to_env is not None:
            actions = self._to_env(actions)
        if self.wait_reset:
            self.envs.send(slot, actions, hold=True)
        else:
            self.envs.send(slot, actions)
        self._seconds["inference"] += time.perf_counter() - start

    def _evaluate_actions(self, policy: FastPolicy) -> None:
        """Compute the policy outputs of all rows of the rollout in one batch, and write them to the rows."""
        start = time.perf_counter()
        steps = self._buffers.steps
        obs, action = map_tree(lambda x: x.reshape(-1, *x.shape[2:]), (steps.obs, steps.action))
        output = policy.evaluate_actions(obs, action)
        steps.policy[...] = map_tree(lambda x: x.reshape(*steps.mask.shape, *x.shape[1:]), output)
        self._seconds["inference"] += time.perf_counter() - start

    def _renew(self) -> None:
        """Reset the envs whose episodes ended during the last rollout. This is needed only with `wait_reset`."""
        if not self._is_over.any():
            return
        ended = [slot for slot, writer in enumerate(self._writers) if self._is_over[writer.columns].any()]
        for slot in ended:
            self.envs.renew(slot)
        for _ in ended:
            slot, step = self.envs.recv()
            self._writers[slot].obs_arrays[...] = step.obs
        if self._inputs.state is not None:
            self._inputs.reset_state(np.flatnonzero(self._is_over))
        self._inputs.begins |= torch.from_numpy(self._is_over)
        self._is_over.fill(False)


def _as_arrays(tree: Tree) -> dict[str, NumpyArray]:
    return {path: tensor.numpy() for path, tensor in leaves(tree)}


def _fill(tree: Tree, arrays: dict[str, NumpyArray]) -> None:
    for path, tensor in leaves(tree):
        tensor.copy_(torch.from_numpy(arrays[path]))
