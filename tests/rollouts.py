"""Streams and rollouts as samplers make them, for tests without envs. Each end of an episode has a reset row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remuda.agents import PolicyAgent
from remuda.agents.heads import PolicyOutput
from remuda.agents.policy import Outputs
from remuda.core import Space
from remuda.data import Batch, Rollout, Steps, map_tree
from remuda.maths import Categorical
from remuda.nets import MLP

torch.set_num_threads(1)  # with small networks on a busy machine, more threads are many times slower


@dataclass(frozen=True)
class Stream:
    """Rewards, discounts and masks of shape [T, B], and values of shape [T + 1, B], in float64."""

    r_t: Tensor
    discount_t: Tensor
    mask_t: Tensor
    v: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.r_t, self.discount_t, self.mask_t, self.v


def random_stream(seed: int, T: int | None = None, B: int | None = None) -> Stream:
    """Return episodes of random length that terminate or are truncated, some before the first or at the last row."""
    rng = np.random.default_rng(seed)
    T, B = T or int(rng.integers(1, 13)), B or int(rng.integers(1, 5))
    terminates, truncates = rng.random(2) * 0.4
    reward, discount = rng.normal(size=(T, B)), np.ones((T, B))
    mask = np.ones((T, B), dtype=bool)
    resets = rng.random(B) < 0.3  # an episode ended with the last row of the previous rollout
    for t in range(T):
        mask[t] = ~resets
        reward[t, resets] = 0
        terminated = mask[t] & (rng.random(B) < terminates)
        truncated = mask[t] & (rng.random(B) < truncates)
        discount[t, terminated] = 0
        resets = terminated | truncated
    v = rng.normal(size=(T + 1, B)) * 3
    return Stream(*(torch.from_numpy(x) for x in (reward, discount, mask, v)))


def box(shape: tuple[int, ...], dtype: str = "float32", bound: float = 1.0) -> Space:
    low, high = (-bound, bound) if dtype.startswith("float") else (0, 255)
    return Space("box", shape, dtype, np.full(shape, low, dtype), np.full(shape, high, dtype))


def discrete(n: int, start: int = 0) -> Space:
    return Space("discrete", (), "int64", n=n, start=start)


def make_agent(observation: Space | None = None, action: Space | None = None, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return PolicyAgent(
        observation or box((3,)), action or discrete(4), lambda shape: MLP(shape, (16,), "tanh"), **options
    )


def make_rollout(agent: Any, T: int = 8, B: int = 4, seed: int = 0, version: int = 0) -> Rollout:
    """Return a rollout in which this agent acts on random observations in random episodes."""
    stream = random_stream(seed, T, B)
    generator = torch.Generator().manual_seed(seed)
    ((kind, width),) = agent.noise
    draw = torch.rand if kind == "uniform" else torch.randn
    if agent.observation.kind == "discrete":
        obs = torch.randint(agent.observation.n, (T + 1, B), generator=generator)
    else:
        obs = torch.randn(T + 1, B, *agent.observation.shape, generator=generator)
    with torch.no_grad():
        acted = [agent.act(obs[t], None, None, draw(B, width, generator=generator)) for t in range(T)]
        last_value = agent.value(obs[T], None)
    steps = Steps(
        obs=obs[:T],
        action=torch.stack([action for action, _, _ in acted]),
        reward=stream.r_t.float(),
        discount=stream.discount_t.float(),
        mask=stream.mask_t,
        policy=type(acted[0][1])(
            *(torch.stack(field) for field in zip(*(said for _, said, _ in acted), strict=True))
        ),
        version=torch.full((T, B), version),
    )
    return Rollout(steps, obs[T], last_value)


def somewhere(agent: Any, batch: int) -> Any:
    """Return a recurrent state that differs from the initial one."""
    generator = torch.Generator().manual_seed(1)
    return map_tree(lambda x: torch.randn(x.shape, generator=generator) * 0.5, agent.initial_state(batch))


def observations(space: Space, *leading: int) -> Any:
    """Return random observations of any space, with these leading axes."""
    generator = torch.Generator().manual_seed(2)

    def make(_: str, leaf: Space) -> torch.Tensor:
        if leaf.kind == "discrete":
            return torch.arange(math.prod(leading)).reshape(leading) % leaf.n
        if leaf.dtype == "uint8":
            return torch.randint(256, (*leading, *leaf.shape), generator=generator, dtype=torch.uint8)
        return torch.randn(*leading, *leaf.shape, generator=generator)

    return space.tree(make)


def move(agent: Any, by: float = 0.3, seed: int = 1) -> None:
    """Perturb the parameters, so that the policy differs from the one that acted."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))


class TableAgent(torch.nn.Module):
    """An agent with a table of logits and a value for each of n observations, for hand-computed examples."""

    observation = discrete(1)

    def __init__(self, logits: list[list[float]], values: list[float]) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))
        self.values = torch.nn.Parameter(torch.tensor(values))

    def unroll(self, obs: Tensor, state: Any, reset: Any) -> tuple[Outputs, Any]:
        return Outputs(Categorical(self.logits[obs]), self.values[obs]), None


def worked_batch() -> tuple[Any, Batch]:
    """Return an agent and a batch of three rows for hand-computed losses.

    The rows have reward 1 and importance ratio 2, then reward 3 and ratio 1/2 with a truncation, then its reset row.
    The values are 1, 2, 4, and 8 for the observation after the last row. There are two actions; the probability of
    the chosen one is 1/2 under the current policy, and was 1/4, then 1 under the policy that acted.
    """
    agent = TableAgent([[0.0, 0.0]] * 4, [1.0, 2.0, 4.0, 8.0])
    one = torch.ones(3, 1)
    steps = Steps(
        obs=torch.tensor([[0], [1], [2]]),
        action=torch.tensor([[0], [1], [0]]),
        reward=torch.tensor([[1.0], [3.0], [0.0]]),
        discount=one,
        mask=torch.tensor([[True], [True], [False]]),
        policy=PolicyOutput(torch.tensor([[0.25], [1.0], [1.0]]).log(), torch.tensor([[1.5], [2.0], [0.0]])),
        version=one,
    )
    return agent, Batch(steps, next_obs=torch.tensor([3]))
