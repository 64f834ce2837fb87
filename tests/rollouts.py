"""Streams and rollouts as samplers make them, for tests that have no envs: rows after an end are reset rows."""

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

torch.set_num_threads(1)  # more are many times slower on networks this small when the machine is busy


@dataclass(frozen=True)
class Stream:
    """[T, B] rows in float64; v is [T + 1, B]."""

    r_t: Tensor
    discount_t: Tensor
    mask_t: Tensor
    v: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.r_t, self.discount_t, self.mask_t, self.v


def random_stream(seed: int, T: int | None = None, B: int | None = None) -> Stream:
    """Episodes of random length that end in either way, some of them before the first or with the last row."""
    rng = np.random.default_rng(seed)
    T, B = T or int(rng.integers(1, 13)), B or int(rng.integers(1, 5))
    terminates, truncates = rng.random(2) * 0.4
    reward, discount = rng.normal(size=(T, B)), np.ones((T, B))
    mask = np.ones((T, B), dtype=bool)
    resets = rng.random(B) < 0.3  # ended with the last row of the rollout before
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
    """What this agent would have said and done in random episodes over random observations."""
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
    """Recurrent state that is not the initial one."""
    generator = torch.Generator().manual_seed(1)
    return map_tree(lambda x: torch.randn(x.shape, generator=generator) * 0.5, agent.initial_state(batch))


def observations(space: Space, *leading: int) -> Any:
    """Random ones of any space, with these leading axes."""
    generator = torch.Generator().manual_seed(2)

    def make(_: str, leaf: Space) -> torch.Tensor:
        if leaf.kind == "discrete":
            return torch.arange(math.prod(leading)).reshape(leading) % leaf.n
        if leaf.dtype == "uint8":
            return torch.randint(256, (*leading, *leaf.shape), generator=generator, dtype=torch.uint8)
        return torch.randn(*leading, *leaf.shape, generator=generator)

    return space.tree(make)


def move(agent: Any, by: float = 0.3, seed: int = 1) -> None:
    """Other parameters: what the agent said while acting is no longer what it says."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))


class TableAgent(torch.nn.Module):
    """Logits and a value for each of n observations: for numbers that are worked by hand."""

    observation = discrete(1)

    def __init__(self, logits: list[list[float]], values: list[float]) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))
        self.values = torch.nn.Parameter(torch.tensor(values))

    def unroll(self, obs: Tensor, state: Any, reset: Any) -> tuple[Outputs, Any]:
        return Outputs(Categorical(self.logits[obs]), self.values[obs]), None


def worked_batch() -> tuple[Any, Batch]:
    """r=1 with a ratio of 2; r=3 with 1/2, truncated; its reset row. Values are 1, 2, 4, and 8 after the last row.

    Both policies choose between two actions; that of now says 1/2, the one that acted said 1/4, then 1.
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
