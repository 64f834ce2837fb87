"""A recurrent agent with known outputs, and the sampler workers that run it.

Its state counts the rows since the last reset and sums the observed step numbers, halving the sum at each row. Its
action is the count modulo 4, so that a wrong state gives a wrong reward, and its value is 100 * count + sum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from remuda.agents import PolicyOutput
from remuda.data import ArrayTuple
from remuda.envs import AsyncPooledEnvs, EnvSpec, LocalEnvs
from remuda.sampling.exploration import Exploration
from remuda.sampling.sampler_worker import serve


class Count(ArrayTuple):
    rows: Any
    total: Any


class CountingRNN(nn.Module):
    """The agent that the module's docstring describes. It has one parameter, so that there are weights to publish."""

    noise = (("uniform", 1),)
    exploration = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))

    def initial_state(self, batch):
        return Count(torch.zeros(batch), torch.zeros(batch))

    def act(self, obs, state, explore, noise):
        action = state.rows.long() % 4
        said = PolicyOutput(-noise[:, 0], self.value(obs, state))
        return action, said, Count(state.rows + 1, state.total / 2 + obs[:, 2])

    def value(self, obs, state):
        return 100 * state.rows + state.total / 2 + obs[:, 2] + self.offset.detach()


def main(fds: Sequence[int]) -> int:
    return serve(fds, make_parts)


def make_parts(order: Mapping[str, Any], beat: Any, tell: Any) -> tuple[Any, Any, Any]:
    size = order["last"] - order["first"]
    spec = EnvSpec.from_json(order["spec"])
    if order.get("is_central"):
        groups, limits = order["groups"], order["limits"]
        envs = AsyncPooledEnvs(spec, size, groups, groups, order["gamma"], should_stop=beat, **limits)
        return envs, CountingRNN(), Exploration()
    envs = LocalEnvs(spec, size, gamma=order["gamma"], should_stop=beat, first_env=order["first"], on_notice=tell)
    return envs, CountingRNN(), Exploration()
