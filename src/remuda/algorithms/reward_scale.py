"""Divide rewards by a running estimate of the standard deviation of the discounted return."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from remuda.nets import Moments, RunningMoments


class RewardScale(nn.Module):
    """Divides rewards by the standard deviation of the discounted return, so that value targets are of order 1.

    Each env has a running return R, which is 0 at the start of an episode and becomes gamma * R + reward in each row.
    `carry` holds the R of every env between two rollouts. The mean of rewards is not subtracted, because this would
    change the optimal policy of tasks whose episodes can end early.
    """

    carry: Tensor

    def __init__(self, num_envs: int, gamma: float, clip: float = 10.0) -> None:
        super().__init__()
        self.moments, self.gamma, self.clip = RunningMoments(), gamma, clip
        self.register_buffer("carry", torch.zeros(num_envs, dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep this module on the CPU, where rollouts are, even if the algorithm is moved to another device."""
        return self

    def statistics(
        self, r_t: Tensor, mask_t: Tensor, envs: Tensor | None = None, begins: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the moments of the running returns in rows with mask True, and each env's return after the last row.

        Rewards `r_t` and masks `mask_t` are [T, B]. `envs` [B] holds the index of each column's env; None means all
        envs, in order. Where `begins` [B] is True, row 0 starts a new episode, and the running return starts from 0.
        The flag is needed only if the env's previous row was not a reset row.
        """
        returns, carried = torch.empty(r_t.shape, dtype=torch.float64), self.carry.clone()
        envs = torch.arange(len(self.carry)) if envs is None else envs
        for columns in unique_envs(envs):
            carry = carried[envs[columns]]
            if begins is not None:
                carry = carry.masked_fill(begins[columns], 0.0)
            for t in range(len(r_t)):
                # The running return becomes 0 in a reset row, whose mask is False.
                carry = mask_t[t, columns] * (self.gamma * carry + r_t[t, columns])
                returns[t, columns] = carry
            carried[envs[columns]] = carry
        seen = torch.tensor(sorted(set(envs.tolist())))
        return {**Moments.of(returns[mask_t]).named("reward"), "reward.envs": seen, "reward.carry": carried[seen]}

    def absorb(self, statistics: Mapping[str, Tensor]) -> None:
        """Merge a result of `statistics`, which may come from another process and cover only some of the envs."""
        self.moments.merge(Moments.find(statistics, "reward"))
        self.carry[statistics["reward.envs"]] = statistics["reward.carry"]

    def forward(self, r_t: Tensor) -> Tensor:
        """Return rewards scaled and clipped to +-`clip`. The statistics of their rollout must have been absorbed."""
        return (r_t / (self.moments.var + 1e-8).sqrt().float()).clamp(-self.clip, self.clip)


def unique_envs(envs: Tensor) -> list[Tensor]:
    """Split the columns of a rollout into groups in which each env occurs at most once.

    `envs` [B] holds the env of each column. If an env has several columns, the first is in the first group, the
    second in the second group, and so on.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    times: Counter[int] = Counter()
    for column, env in enumerate(envs.tolist()):
        groups[times[env]].append(column)
        times[env] += 1
    return [torch.tensor(group) for group in groups.values()]
