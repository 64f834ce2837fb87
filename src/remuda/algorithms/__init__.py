"""Learning algorithms, which compute the losses of a batch. The learner (learning/) updates the parameters."""

from remuda.algorithms.a2c import A2C
from remuda.algorithms.actor_critic import ActorCritic, Targets
from remuda.algorithms.appo import APPO
from remuda.algorithms.ddpg import DDPG
from remuda.algorithms.dqn import DQN
from remuda.algorithms.impala import IMPALA
from remuda.algorithms.off_policy import OffPolicy
from remuda.algorithms.ppo import PPO
from remuda.algorithms.r2d1 import R2D1
from remuda.algorithms.reward_scale import RewardScale
from remuda.algorithms.sac import SAC
from remuda.algorithms.td3 import TD3

__all__ = [
    "A2C",
    "APPO",
    "ActorCritic",
    "DDPG",
    "DQN",
    "IMPALA",
    "OffPolicy",
    "PPO",
    "R2D1",
    "RewardScale",
    "SAC",
    "TD3",
    "Targets",
]
