"""Recurrent cores: an LSTM or GRU that carries a state from row to row of every env.

    core = Core("lstm", width=64, size=128)
    state = core.initial_state(B)
    features, state = core.step(net(obs), state)                    # sampling: one row of B envs
    features, _ = core.unroll(net(obs_rows), state, reset)          # learning: T rows of B envs, from a stored state

Where `reset[t, b]` is True, the state of env b is set to the initial state before row t, and gradients end there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from remuda.data import ArrayTuple


class LSTMState(ArrayTuple):
    """Hidden and cell state, [B, size] each."""

    h: Tensor
    c: Tensor


class GRUState(ArrayTuple):
    """Hidden state [B, size]."""

    h: Tensor


State = LSTMState | GRUState


class Core(nn.Module):
    """One recurrent layer that maps `width` features to `size` features.

    The weights of every gate start orthogonal, and biases start at 0. Only the bias of an LSTM's forget gate starts
    at 1. The LSTM's memory then lasts 1 / (1 - sigmoid(1)), about four rows. With a bias of 0, it would last two.
    """

    def __init__(self, kind: Literal["lstm", "gru"], width: int, size: int) -> None:
        super().__init__()
        self.kind, self.width, self.size = kind, width, size
        self.layer: nn.LSTM | nn.GRU = nn.LSTM(width, size) if kind == "lstm" else nn.GRU(width, size)
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                if name.startswith("weight"):
                    for gate in parameter.chunk(4 if kind == "lstm" else 3):
                        nn.init.orthogonal_(gate)
                else:
                    nn.init.zeros_(parameter)
                if kind == "lstm" and name == "bias_ih_l0":  # torch orders gates: input, forget, cell, output
                    parameter[size : 2 * size] = 1.0

    def initial_state(self, batch: int) -> State:
        zeros = next(self.layer.parameters()).new_zeros(batch, self.size)
        return LSTMState(zeros, zeros.clone()) if self.kind == "lstm" else GRUState(zeros)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Return features [B, size] of one row of B envs, x [B, width], and the next state."""
        y, state = self._run(x.unsqueeze(0), state)
        return y.squeeze(0), state

    def unroll(self, x: Tensor, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Return features [T, B, size] of T rows of B envs, x [T, B, width], and the state after the last row.

        One call of torch computes all rows up to the next reset of any env, because long calls cost less per row.
        """
        if reset is None:
            return self._run(x, state)
        starts = sorted({0, *reset.any(1).nonzero().flatten().tolist()})  # only this line waits for the device
        outputs: list[Tensor] = []
        for start, end in zip(starts, [*starts[1:], len(x)], strict=True):
            # The state is filled with 0, not multiplied by 0. This ends gradients, and it also resets states that are
            # not finite.
            state = type(state)(*(part.masked_fill(reset[start].unsqueeze(-1), 0.0) for part in state))
            y, state = self._run(x[start:end], state)
            outputs.append(y)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state

    def _run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if isinstance(state, LSTMState):
            y, (h, c) = self.layer(x, (state.h.unsqueeze(0), state.c.unsqueeze(0)))
            return y, LSTMState(h.squeeze(0), c.squeeze(0))
        y, h = self.layer(x, state.h.unsqueeze(0))
        return y, GRUState(h.squeeze(0))
