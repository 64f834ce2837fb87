"""The base of A2C, PPO, IMPALA and APPO: rewards, advantages and observation statistics of an actor-critic agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from remuda.agents import PolicyAgent
from remuda.algorithms.reward_scale import RewardScale
from remuda.data import ArrayTuple, Batch, Rollout, Steps, resets
from remuda.maths import Distribution, ExplainedVariance, gae


class Targets(ArrayTuple):
    """Learning targets of each row of a rollout, computed by `ActorCritic.prepare`."""

    advantage: Tensor
    value: Tensor  # target of the value network: the advantage plus the value estimated while sampling


def over_progress(value: float | Callable[[float], float]) -> Callable[[float], float]:
    """Return `value` if it is a function of the run's progress, or a constant function if it is a number."""
    return value if callable(value) else lambda progress: value


class ActorCritic(nn.Module):
    """Base class of the algorithms that discard each rollout after learning from it; subclasses define `losses`."""

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
        """Return the rewards [T, B], clipped if `clip_reward` is set, and scaled if `normalize_reward` is set."""
        reward = self.clipped(rollout)
        if self.reward_scale is None:
            return reward
        scaled: Tensor = self.reward_scale(reward)
        return scaled

    def clipped(self, rollout: Rollout) -> Tensor:
        """Return the rewards [T, B], clipped to the range from -1 to 1 if `clip_reward` is set."""
        # Rewards are not clipped in the env, so that logs show the true scores of a game.
        reward: Tensor = rollout.steps.reward
        return reward.clamp(-1.0, 1.0) if self.clip_reward else reward

    def reward_statistics(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return a rollout's reward statistics, to pass to `absorb` before `prepare`; {} without reward scaling."""
        if self.reward_scale is None:
            return {}
        return self.reward_scale.statistics(self.clipped(rollout), rollout.steps.mask, rollout.envs, rollout.begins)

    def prepare(self, rollout: Rollout) -> Batch:
        """Return a batch whose targets are computed from the value estimates that were stored while sampling."""
        steps = rollout.steps
        reward = self.rewards(rollout)
        v = torch.cat([steps.policy.value, rollout.last_value.unsqueeze(0)])
        advantage = gae(reward, steps.discount, steps.mask, v, self.gamma, self.gae_lambda)
        targets = Targets(advantage, advantage + v[:-1])
        explained = ExplainedVariance.of(steps.policy.value[steps.mask], targets.value[steps.mask])
        metrics = {"explained_variance": explained}
        steps = steps.replace(obs=self.agent.inputs.arrange(steps.obs))
        return Batch(steps, targets, rollout.state, rollout.next_obs, metrics=metrics)

    @staticmethod
    def loss_metrics(
        loss: Tensor, value_loss: Tensor, entropy: Tensor, **policy_loss: Tensor
    ) -> dict[str, Tensor | float]:
        """Return the metrics that all subclasses log. The keyword of the policy loss is the name of its metric."""
        losses = {"loss": loss, **policy_loss, "value_loss": value_loss, "entropy_loss": -entropy}
        return {name: value.detach() for name, value in losses.items()}

    def real_rows(self, batch: Batch) -> tuple[Distribution, Tensor, Steps, Targets]:
        """Return the current action distributions and values, the stored steps, and the targets of all real rows.

        A row is real if its mask is True; shuffled rows are all real. Sequences are unrolled over all rows, because
        the recurrent state depends on all of them. The rows that are not real are dropped afterwards.
        """
        steps, targets = batch.steps, batch.targets
        if batch.state is None:
            (policy, value), _ = self.agent.unroll(steps.obs, None, None)
            return policy, value, steps, targets
        (policy, value), _ = self.agent.unroll(steps.obs, batch.state, resets(steps.mask))
        real = steps.mask
        return policy.rows(real), value[real], steps.replace(obs=None)[real], targets[real]

    def obs_statistics(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return statistics of the observations in real rows, to pass to `absorb` after the rollout's last gradient.

        The running statistics therefore stay the same for all gradients of a rollout. In a synchronous scheme, the
        rollout was also sampled with these running statistics.
        """
        inputs = self.agent.inputs
        return inputs.statistics(rollout.real_obs()) if inputs.has_statistics else {}

    def absorb(self, statistics: Mapping[str, Tensor]) -> None:
        """Merge the result of `reward_statistics` or `obs_statistics` into the running statistics."""
        if "reward.size" in statistics and self.reward_scale is not None:
            self.reward_scale.absorb(statistics)
        elif statistics:
            self.agent.inputs.absorb(statistics)
