"""The trunk, which is the part of an agent below its heads: a network and, optionally, a recurrent core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from remuda.core import Space, TensorTree
from remuda.data import leaves, map_tree
from remuda.nets import Core, Inputs
from remuda.nets.inputs import Shapes
from remuda.nets.recurrent import State

NetFactory = Callable[[Shapes], nn.Module]  # makes a network from an observation's shape, or from {path: shape}


class Trunk(nn.Module):
    """A network with an optional recurrent core on top."""

    def __init__(self, net: nn.Module, width: int, core: Literal["lstm", "gru"] | None, size: int) -> None:
        super().__init__()
        self.net = net
        self.core = Core(core, width, size) if core is not None else None
        self.width = width if core is None else size

    def step(self, inputs: TensorTree, state: State | None) -> tuple[Tensor, State | None]:
        """Return the features of `inputs` [B, ...], one row of each of B envs, and the next state."""
        features: Tensor = self.net(inputs)
        if self.core is None:
            return features, None
        assert state is not None
        return self.core.step(features, state)

    def unroll(
        self, inputs: TensorTree, leading: tuple[int, ...], state: State | None, reset: Tensor | None
    ) -> tuple[Tensor, State | None]:
        """Return the features of the rows in `inputs` [N, ...], and the state after the last row.

        `leading` is (N,) for single rows, and (T, B) for B sequences of T rows, flattened to N = T * B rows. `state`
        and `reset` are for a recurrent core, which needs sequences. Without a core, the returned state is None.
        """
        features: Tensor = self.net(inputs)
        if self.core is None:
            return features, None
        assert state is not None
        sequence, state = self.core.unroll(features.reshape(*leading, -1), state, reset)
        return sequence.flatten(0, 1), state


def net_width(net: nn.Module, inputs: Inputs, observation: Space) -> int:
    """Return the number of a network's features. To find it, call the network on observations of zeros."""
    blank = observation.tree(lambda _, leaf: torch.zeros(2, *leaf.shape, dtype=getattr(torch, leaf.dtype)))
    with torch.no_grad():
        return int(net(inputs(blank)).shape[-1])


def make_trunk(
    inputs: Inputs, observation: Space, make_net: NetFactory, core: Literal["lstm", "gru"] | None, core_size: int
) -> Trunk:
    net = make_net(inputs.shapes)
    return Trunk(net, net_width(net, inputs, observation), core, core_size)


def unroll_trunk(
    trunk: Trunk, inputs: Inputs, observation: Space, obs: TensorTree, state: State | None, reset: Tensor | None
) -> tuple[Tensor, State | None]:
    """Return features, and the state after the last row.

    `obs` holds N single rows [N, ...], or B sequences of T rows [T, B, ...] that start from `state` [B]. Where
    reset[t, b] is True, the state of sequence b is reset before row t.
    """
    leading = leading_axes(observation, obs)
    seen = inputs(obs if len(leading) == 1 else map_tree(lambda x: x.flatten(0, 1), obs))
    features, state = trunk.unroll(seen, leading, state, reset)
    return features if len(leading) == 1 else features.reshape(*leading, -1), state


def leading_axes(observation: Space, obs: TensorTree) -> tuple[int, ...]:
    """Return the sizes of the axes of `obs` that precede the axes of one observation: (N,) or (T, B)."""
    (_, leaf), (_, tensor) = next(observation.leaves()), next(leaves(obs))
    return tuple(tensor.shape[: tensor.dim() - len(leaf.shape)])
