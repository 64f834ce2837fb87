"""Evaluate an agent by complete episodes with given seeds and, by default, greedy actions.

Every episode is played to its end in an env that is reset with the episode's own seed. The result is therefore not
biased toward short episodes and, with greedy actions, does not depend on the number of envs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from remuda.core import Agent, Envs
from remuda.data import map_tree
from remuda.randomness import Purpose
from remuda.sampling.noise import Noise
from remuda.sampling.sampler import ToEnv

NOISE_BLOCK = 128  # rows of noise drawn at once, because creating a generator for each row would take longer


@dataclass(frozen=True)
class Evaluation:
    """The returns and lengths of the episodes, ordered by episode number."""

    returns: list[float]
    lengths: list[float]

    def summary(self) -> dict[str, Any]:
        return {
            "mean_reward": float(np.mean(self.returns)),
            "std_reward": float(np.std(self.returns)),
            "mean_length": float(np.mean(self.lengths)),
            "episodes": len(self.returns),
            "returns": self.returns,
        }


def evaluate(
    envs: Envs,
    agent: Agent,
    episodes: int,
    *,
    explore: bool = False,
    seed: int = 0,
) -> Evaluation:
    """Play `episodes` episodes and return their statistics.

    Env i of B plays episodes i, i + B, i + 2B, ... with the seeds that it received when it was made; the envs ignore
    the seed of `reset`. `seed` determines the agent's noise. With `explore`, the agent acts with `agent.exploration`
    instead of greedily.
    """
    played: list[list[Mapping[str, float]]] = [[] for _ in range(envs.num_envs)]
    to_env = ToEnv(envs.action)
    exploring = torch.full((envs.num_envs,), agent.exploration if explore else 0.0)
    noise = Noise(seed, range(envs.num_envs), agent.noise, Purpose.EVALUATION)
    state, initial = agent.initial_state(envs.num_envs), agent.initial_state(envs.num_envs)
    envs.reset(seed)
    done = row = 0
    with torch.inference_mode(), in_eval_mode(agent):
        while done < episodes:
            slot, step = envs.recv()
            for episode in envs.episodes():
                played[episode.env].append(episode.values)
                done += 1
            obs = map_tree(torch.from_numpy, step.obs)  # views that are valid until the next `envs.send`
            if state is not None and not step.mask.all():
                was_reset = torch.from_numpy(~step.mask)
                state[was_reset] = initial[was_reset]
            if row % NOISE_BLOCK == 0:
                block = noise.rows(row, NOISE_BLOCK)
            action, _, state = agent.act(obs, state, exploring, block[row % NOISE_BLOCK])
            envs.send(slot, to_env(map_tree(lambda x: x.numpy(), action)))
            row += 1
    ordered = [played[k % envs.num_envs][k // envs.num_envs] for k in range(episodes)]
    return Evaluation([values["ep_rew"] for values in ordered], [values["ep_len"] for values in ordered])


@contextmanager
def in_eval_mode(agent: Any) -> Iterator[None]:
    """Put an nn.Module into evaluation mode until the context ends."""
    was_training = agent.training
    agent.eval()
    try:
        yield
    finally:
        agent.train(was_training)
