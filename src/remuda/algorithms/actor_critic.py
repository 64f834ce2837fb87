"""What A2C, PPO, IMPALA and APPO share: an actor-critic agent, its rewards, advantages, and running normalisers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from remuda.agents import PolicyAgent
from remuda.core import Clock
from remuda.data import ArrayTuple, Batch, Rollout, Steps, resets
from remuda.maths import Distribution, explained_variance, gae
from remuda.nets import RunningMoments


class Targets(ArrayTuple):
    """What `prepare` adds to every row."""

    advantage: Any
    value: Any  # what the value net should have said: advantage + its old estimate


def over_progress(value: float | Callable[[float], float]) -> Callable[[float], float]:
    """A number as the schedule that never changes."""
    return value if callable(value) else lambda progress: value


class RewardScale(nn.Module):
    """Divide rewards by the deviation of the discounted return, so that value targets are about 1 in size.

    The running return of each env is carried from rollout to rollout until its episode ends. Rewards are not shifted,
    which would change what is optimal where episodes can end.
    """

    carry: Tensor

    def __init__(self, num_envs: int, gamma: float, clip: float = 10.0) -> None:
        super().__init__()
        self.moments, self.gamma, self.clip = RunningMoments(), gamma, clip
        self.register_buffer("carry", torch.zeros(num_envs, dtype=torch.float64))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """It stays on the CPU, where rollouts are, whatever device learns."""
        return self

    def forward(
        self, r_t: Tensor, mask_t: Tensor, envs: Tensor | None = None, begins: Tensor | None = None
    ) -> Tensor:
        """Return scaled rewards [T, B] of these envs, by default of all, and update the statistics.

        Call it once per rollout. `begins` [B] says where row 0 continues no earlier rollout, although no masked row
        precedes it: the running return starts from 0 there.
        """
        returns = torch.empty(r_t.shape, dtype=torch.float64)
        envs = torch.arange(len(self.carry)) if envs is None else envs
        for columns in one_by_one(envs):
            carry = self.carry[envs[columns]]
            if begins is not None:
                carry = carry.masked_fill(begins[columns], 0.0)
            for t in range(len(r_t)):
                carry = mask_t[t, columns] * (self.gamma * carry + r_t[t, columns])  # a reset row starts from nothing
                returns[t, columns] = carry
            self.carry[envs[columns]] = carry
        self.moments.update(returns[mask_t])
        return (r_t / (self.moments.var + 1e-8).sqrt().float()).clamp(-self.clip, self.clip)


def one_by_one(envs: Tensor) -> list[Tensor]:
    """Columns in groups that hold every env once at the most: of two rollouts of an env the first goes first."""
    groups: dict[int, list[int]] = defaultdict(list)
    times: Counter[int] = Counter()
    for column, env in enumerate(envs.tolist()):
        groups[times[env]].append(column)
        times[env] += 1
    return [torch.tensor(group) for group in groups.values()]


class ActorCritic(nn.Module):
    """Base of the algorithms that learn from fresh rollouts; each adds `losses`."""

    def __init__(
        self,
        agent: PolicyAgent,
        num_envs: int,
        gamma: float,
        gae_lambda: float = 1.0,
        normalize_reward: bool = False,
        clip_reward: bool = False,
    ) -> None:
        super().__init__()
        self.agent, self.gamma, self.gae_lambda, self.clip_reward = agent, gamma, gae_lambda, clip_reward
        self.reward_scale = RewardScale(num_envs, gamma) if normalize_reward else None

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"policy": list(self.agent.parameters())}

    def rewards(self, rollout: Rollout) -> Tensor:
        """[T, B], clipped and scaled as asked; once per rollout, as scaling counts what it sees."""
        steps = rollout.steps
        # Clipped here and not in the env: what is logged is what the game gave.
        reward: Tensor = steps.reward.clamp(-1.0, 1.0) if self.clip_reward else steps.reward
        if self.reward_scale is None:
            return reward
        scaled: Tensor = self.reward_scale(reward, steps.mask, rollout.envs, rollout.begins)
        return scaled

    def prepare(self, rollout: Rollout) -> Batch:
        """Advantages and value targets from the values that were said while acting."""
        steps = rollout.steps
        reward = self.rewards(rollout)
        v = torch.cat([steps.policy.value, rollout.last_value.unsqueeze(0)])
        advantage = gae(reward, steps.discount, steps.mask, v, self.gamma, self.gae_lambda)
        targets = Targets(advantage, advantage + v[:-1])
        explained = explained_variance(steps.policy.value[steps.mask], targets.value[steps.mask])
        metrics = {"explained_variance": explained}
        steps = steps.replace(obs=self.agent.inputs.arrange(steps.obs))
        return Batch(steps, targets, rollout.state, rollout.next_obs, metrics=metrics)

    def real_rows(self, batch: Batch) -> tuple[Distribution, Tensor, Steps, Targets]:
        """Policy and value of the batch's real rows, with what was stored of them.

        Shuffled rows are all real. Sequences are unrolled whole, as recurrent state needs every row, and their masked
        rows are dropped afterwards.
        """
        steps, targets = batch.steps, batch.targets
        if batch.state is None:
            (policy, value), _ = self.agent.unroll(steps.obs, None, None)
            return policy, value, steps, targets
        (policy, value), _ = self.agent.unroll(steps.obs, batch.state, resets(steps.mask))
        real = steps.mask
        return policy.rows(real), value[real], steps.replace(obs=None)[real], targets[real]

    def after_update(self, clock: Clock) -> None:
        """No target networks here."""

    def after_rollout(self, rollout: Rollout) -> bool:
        """Merge real rows into the observation statistics, and return whether there are any.

        They stand still while a rollout is learned from: all of its gradients see those that acted.
        """
        if self.agent.inputs.has_statistics:
            self.agent.inputs.update(rollout.real_obs())
        return bool(self.agent.inputs.has_statistics)
