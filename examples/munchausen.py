"""Munchausen DQN (arXiv 2007.14430) as a subclass of DQN: the logarithm of the policy is added to the reward.

remuda train examples.munchausen:MunchausenDQN --env CartPole-v1
"""

import torch

from remuda.algorithms.dqn import DQN, pick
from remuda.core import Losses

TAU, ALPHA, LOWEST = 0.03, 0.9, -1.0  # temperature of the policy; factor and lower bound of the bonus


class MunchausenDQN(DQN):
    """Learns the soft values of a policy, which is the softmax of the target net's values."""

    def losses(self, batch, clock):
        rows = self.rows(batch)
        q = pick(self.now(batch, self.agent.unroll, batch.state), rows.action)
        with torch.no_grad():
            before = self.now(batch, self.target.unroll, batch.state)
            later = self.after(batch, self.target.unroll, batch.state)
            bonus = TAU * pick((before / TAU).log_softmax(-1), rows.action)
            log_policy = (later / TAU).log_softmax(-1)
            next_value = (log_policy.exp() * (later - TAU * log_policy)).sum(-1)
        rows = rows._replace(reward=rows.reward + ALPHA * bonus.clamp(LOWEST, 0.0))
        each, size = self.scalar_loss(q, next_value, rows)
        loss = (rows.weight ** self.beta(clock.progress) * each).mean()
        return Losses({"q": loss}, {"loss": loss.detach(), "bonus": bonus.mean()}, self.priority(size, batch))
