"""The base class of algorithms that learn from a replay; it moves target networks and selects rows of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from remuda.core import Clock, TensorTree
from remuda.data import Batch, Rollout, Tree, map_tree, resets
from remuda.randomness import Purpose, keyed_generator

# A function that takes observations, state and reset flags. It returns the outputs for each row, and the state after
# the last row.
Unroll = Callable[[TensorTree, Tree, Tensor | None], tuple[Tensor, Tree]]
Module = TypeVar("Module", bound=nn.Module)


class Rows(NamedTuple):
    """The rows [N] from which a loss is computed."""

    action: Tree
    reward: Tensor  # discounted sum of the n-step return's rewards
    discount: Tensor  # factor by which the n-step return multiplies the value from which it bootstraps
    weight: Tensor | float  # importance weight of a prioritized draw, before it is raised to the power beta


class OffPolicy(nn.Module):
    """Base of the algorithms that learn from a replay; subclasses define `groups` and `losses`."""

    eta = 0.9  # priority of a sequence: eta * largest error + (1 - eta) * mean error

    def __init__(
        self,
        agent: Any,
        seed: int,
        tau: float,
        target_interval: int,
        clip_reward: bool = False,
        burn_in: int = 0,
        reward_scale: float = 1.0,
    ) -> None:
        """Every `target_interval` updates, target networks move toward online networks by the fraction `tau`."""
        super().__init__()
        self.agent, self.seed, self.tau, self.target_interval = agent, seed, tau, target_interval
        self.clip_reward, self.burn_in, self.reward_scale = clip_reward, burn_in, reward_scale
        self._online: list[Tensor] = []  # online parameters, in the same order as `_targets`
        self._targets: list[Tensor] = []

    def make_target(self, online: Module) -> Module:
        """Return a copy of `online` that `move_targets` updates; it shares the agent's observation statistics."""
        inputs = self.agent.inputs
        target = deepcopy(online, {id(inputs): inputs})
        self._online += online.parameters()
        self._targets += target.parameters()
        return target.requires_grad_(False)

    def prepare(self, rollout: Rollout) -> Batch:
        steps = rollout.steps
        if self.clip_reward:  # rewards are not clipped in the env, so that logs show the true scores of a game
            steps = steps.replace(reward=steps.reward.clamp(-1.0, 1.0))
        if self.reward_scale != 1.0:
            steps = steps.replace(reward=steps.reward * self.reward_scale)
        return Batch(steps, state=rollout.state, next_obs=rollout.next_obs)

    @torch.no_grad()
    def after_update(self, clock: Clock) -> None:
        if clock.version % self.target_interval == 0:
            self.move_targets(self.tau)

    def move_targets(self, tau: float) -> None:
        """Move all target networks toward the online networks by the fraction `tau`."""
        if not self._targets:
            return
        if tau == 1.0:
            torch._foreach_copy_(self._targets, self._online)
        else:
            torch._foreach_lerp_(self._targets, self._online, tau)

    def reward_statistics(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return an empty dict, because these algorithms do not scale rewards by running statistics."""
        return {}

    def obs_statistics(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return statistics of the observations in real rows (mask True), to pass to `absorb`.

        `absorb` may be called between any two updates, because a replay stores raw observations, which are normalized
        each time they are used.
        """
        inputs = self.agent.inputs
        return inputs.statistics(rollout.real_obs()) if inputs.has_statistics else {}

    def absorb(self, statistics: Mapping[str, Tensor]) -> None:
        """Merge the result of `obs_statistics` into the running statistics."""
        if statistics:
            self.agent.inputs.absorb(statistics)

    def generator(self, clock: Clock) -> torch.Generator:
        """Return a random generator that depends only on the seed, the number of updates, and `clock.part`."""
        seed = keyed_generator(Purpose.LOSSES, self.seed, clock.version, part=clock.part).integers(1 << 32)
        return torch.Generator().manual_seed(int(seed))

    # --- rows of a batch ---

    def rows(self, batch: Batch) -> Rows:
        """Return the rows from which the loss is computed.

        In a batch of single rows, these are all rows. A sequence consists of burn-in rows, learned rows, and rows
        that serve only for bootstrapping. In a batch of sequences, the loss is computed from the real rows (mask
        True) among the learned rows.
        """
        steps, targets = batch.steps, batch.targets
        weight = 1.0 if batch.weight is None else batch.weight
        if batch.state is None:
            return Rows(steps.action, targets.reward, targets.discount, weight)
        real = self.real(batch)
        if batch.weight is not None:
            weight = batch.weight.expand(real.shape)[real]
        learned = steps.action[self.burn_in : self.burn_in + len(real)]
        return Rows(learned[real], targets.reward[real], targets.discount[real], weight)

    def real(self, batch: Batch) -> Tensor:
        """Return the mask of the learned rows of B sequences, [learned rows, B]; True where an action was taken."""
        mask: Tensor = batch.steps.mask[self.burn_in : self.burn_in + len(batch.targets.reward)]
        return mask

    def num_learned(self, batch: Batch) -> int:
        """Return the number of rows that `rows` selects."""
        return int((batch.steps.mask if batch.state is None else self.real(batch)).sum())

    def now(self, batch: Batch, unroll: Unroll, state: Tree = None) -> Tensor:
        """Return the outputs of `unroll` for the rows that `rows` selects.

        `unroll` starts sequences from `state`; for single rows, `state` is not used.
        """
        if batch.state is None:
            return unroll(batch.steps.obs, None, None)[0]
        return self._sequence(batch, unroll, state)[: len(batch.targets.reward)][self.real(batch)]

    def after(self, batch: Batch, unroll: Unroll, state: Tree = None) -> Tensor:
        """Return the outputs of `unroll` for the observations n steps after the rows that `rows` selects.

        The n-step returns of the selected rows bootstrap from these outputs. `state` is used as in `now`.
        """
        if batch.state is None:
            return unroll(batch.next_obs, None, None)[0]
        return self._later(batch, self._sequence(batch, unroll, state))

    def now_and_after(self, batch: Batch, unroll: Unroll, state: Tree = None) -> tuple[Tensor, Tensor]:
        """Return the results of `now` (with a gradient) and `after` (without), but unroll sequences only once."""
        if batch.state is None:
            with torch.no_grad():
                after = self.after(batch, unroll)
            return self.now(batch, unroll), after
        sequence = self._sequence(batch, unroll, state)
        now = sequence[: len(batch.targets.reward)][self.real(batch)]
        return now, self._later(batch, sequence.detach())

    def priority(self, size: Tensor, batch: Batch) -> Tensor:
        """Return priorities, given the absolute errors `size` of the rows that `rows` selects.

        The priority of a row is its error. The priority of a sequence is a mixture of its largest error, with weight
        `eta`, and its mean error.
        """
        if batch.state is None:
            return size
        real = self.real(batch)
        sizes = torch.zeros(real.shape, device=size.device)
        sizes[real] = size
        mean = sizes.sum(0) / real.sum(0).clamp(min=1)
        return self.eta * sizes.amax(0) + (1 - self.eta) * mean

    def _sequence(self, batch: Batch, unroll: Unroll, state: Tree) -> Tensor:
        """Return the outputs of `unroll` for the rows after the burn-in rows.

        The burn-in rows are unrolled without gradient, only to update the recurrent state.
        """
        obs, reset, burn_in = batch.steps.obs, resets(batch.steps.mask), self.burn_in
        if burn_in:
            with torch.no_grad():
                _, state = unroll(map_tree(lambda x: x[:burn_in], obs), state, reset[:burn_in])
        return unroll(map_tree(lambda x: x[burn_in:], obs), state, reset[burn_in:])[0]

    def _later(self, batch: Batch, sequence: Tensor) -> Tensor:
        columns = torch.arange(sequence.shape[1], device=sequence.device)
        return sequence[batch.targets.row - self.burn_in, columns][self.real(batch)]
