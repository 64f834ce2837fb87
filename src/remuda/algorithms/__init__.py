"""Algorithms: the losses of a batch, and nothing else. One page each."""

from remuda.algorithms.a2c import A2C
from remuda.algorithms.actor_critic import ActorCritic, RewardScale, Targets
from remuda.algorithms.ppo import PPO

__all__ = ["A2C", "ActorCritic", "PPO", "RewardScale", "Targets"]
