"""Tests of recurrent cores against cells that are stepped one row at a time."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from remuda.data import leaves, map_tree
from remuda.nets import Core, GRUState, LSTMState

torch.set_num_threads(1)  # more threads are many times slower on a busy machine
KINDS: list[Literal["lstm", "gru"]] = ["lstm", "gru"]
T, B, WIDTH, SIZE = 9, 4, 5, 6
RESETS = {
    "never": torch.zeros(T, B, dtype=torch.bool),
    "always": torch.ones(T, B, dtype=torch.bool),
    "first row": torch.arange(T).unsqueeze(1).eq(0).expand(T, B),
    "last row": torch.arange(T).unsqueeze(1).eq(T - 1).expand(T, B),
    "here and there": torch.rand(T, B, generator=torch.Generator().manual_seed(3)) < 0.2,
}


def make(kind: Literal["lstm", "gru"]) -> tuple[Core, Tensor, Any]:
    """Return a float64 core with nonzero biases, inputs, and an initial state."""
    torch.manual_seed(0)
    core = Core(kind, WIDTH, SIZE).double()
    for parameter in core.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    state = map_tree(lambda x: torch.randn_like(x).requires_grad_(), core.initial_state(B))
    return core, torch.randn(T, B, WIDTH, dtype=torch.float64, requires_grad=True), state


def slow(core: Core, x: Tensor, state: Any, reset: Tensor) -> tuple[Tensor, Any]:
    """Unroll a cell of torch with the same weights, one env and one row at a time."""
    cell = (nn.LSTMCell if core.kind == "lstm" else nn.GRUCell)(WIDTH, SIZE, dtype=torch.float64)
    cell.weight_ih, cell.weight_hh = core.layer.weight_ih_l0, core.layer.weight_hh_l0
    cell.bias_ih, cell.bias_hh = core.layer.bias_ih_l0, core.layer.bias_hh_l0
    columns, ends = [], []
    for b in range(B):
        own = tuple(part[b : b + 1] for part in state)
        outputs = []
        for t in range(T):
            if reset[t, b]:
                own = tuple(torch.zeros_like(part) for part in own)
            own = cell(x[t, b : b + 1], own) if core.kind == "lstm" else (cell(x[t, b : b + 1], own[0]),)
            outputs.append(own[0])
        columns.append(torch.stack(outputs))
        ends.append(own)
    return torch.cat(columns, 1), type(state)(*(torch.cat(parts) for parts in zip(*ends, strict=True)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", RESETS)
def test_unroll_and_its_gradients_agree_with_cells(kind: Literal["lstm", "gru"], which: str) -> None:
    core, x, state = make(kind)
    sources = [x, *state, *core.parameters()]
    results = []
    for unroll in (core.unroll, lambda *args: slow(core, *args)):
        y, end = unroll(x, state, RESETS[which])
        weights = torch.arange(y.numel(), dtype=torch.float64).reshape(y.shape).sin()
        loss = (y * weights).sum() + sum(part.square().sum() for part in end)
        results.append([y, *end, *torch.autograd.grad(loss, sources, materialize_grads=True)])
    assert results[0][0].shape == (T, B, SIZE)
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_flags_that_are_all_false_equal_none(kind: Literal["lstm", "gru"]) -> None:
    core, x, state = make(kind)
    with_flags, without = core.unroll(x, state, RESETS["never"]), core.unroll(x, state, None)
    assert torch.equal(with_flags[0], without[0])
    assert all(torch.equal(a, b) for a, b in zip(with_flags[1], without[1], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_step_is_bit_equal_to_an_unroll_of_one_row(kind: Literal["lstm", "gru"]) -> None:
    core = Core(kind, WIDTH, SIZE)
    state = map_tree(torch.randn_like, core.initial_state(B))
    x = torch.randn(B, WIDTH)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            y, after = core.step(x, state)
            rows, end = core.unroll(x.unsqueeze(0), state, torch.zeros(1, B, dtype=torch.bool))
        assert y.shape == (B, SIZE)
        assert torch.equal(y, rows[0])
        assert type(after) is type(end) is type(state)
        assert all(torch.equal(a, b) for a, b in zip(after, end, strict=True))
        assert all(part.shape == (B, SIZE) for part in after)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_resets_equal_the_unroll(kind: Literal["lstm", "gru"]) -> None:
    core, x, state = make(kind)
    reset, outputs, own = RESETS["here and there"], [], state
    with torch.no_grad():
        for t in range(T):
            fresh = core.initial_state(B)
            own = map_tree(lambda old, new, t=t: torch.where(reset[t].unsqueeze(-1), new, old), own, fresh)
            y, own = core.step(x[t], own)
            outputs.append(y)
        rows, end = core.unroll(x, state, reset)
    torch.testing.assert_close(torch.stack(outputs), rows, atol=1e-12, rtol=0)
    for a, b in zip(own, end, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_crosses_a_reset(kind: Literal["lstm", "gru"]) -> None:
    core, x, state = make(kind)
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[4, 1] = True
    y, _ = core.unroll(x, state, reset)
    gradient, *of_state = torch.autograd.grad(y[6].sum(), [x, *state])
    assert not gradient[:4, 1].any()
    assert gradient[4:7, 1].any(-1).all()
    assert gradient[:7, [0, 2, 3]].any(-1).all()
    for part in of_state:
        assert not part[1].any()
        assert part[[0, 2, 3]].any(-1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_reset_clears_states_that_are_not_finite(kind: Literal["lstm", "gru"]) -> None:
    core, x, state = make(kind)
    spoilt = map_tree(lambda part: torch.full_like(part, torch.nan), state)
    y, end = core.unroll(x, spoilt, RESETS["first row"])
    assert y.isfinite().all()
    assert all(part.isfinite().all() for part in end)


@pytest.mark.parametrize("kind", KINDS)
def test_unroll_calls_the_layer_once_per_segment_between_resets(kind: Literal["lstm", "gru"]) -> None:
    core, x, state = make(kind)
    lengths: list[int] = []
    core.layer.register_forward_pre_hook(lambda _, args: lengths.append(len(args[0])))
    core.unroll(x, state, None)
    core.unroll(x, state, RESETS["never"])
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[0, 0] = reset[3, 1] = reset[3, 2] = reset[7, 0] = True
    core.unroll(x, state, reset)
    assert lengths == [9, 9, 3, 4, 2]


@pytest.mark.parametrize(("kind", "type_", "fields"), [("lstm", LSTMState, ["h", "c"]), ("gru", GRUState, ["h"])])
def test_initial_state_is_zero_and_not_shared(kind: Any, type_: type, fields: list[str]) -> None:
    core = Core(kind, WIDTH, SIZE)
    state = core.initial_state(3)
    assert type(state) is type_
    assert core.size == SIZE
    assert [name for name, _ in leaves(state)] == fields
    assert all(part.shape == (3, SIZE) and part.dtype == torch.float32 and not part.any() for part in state)
    assert len({part.data_ptr() for part in state}) == len(fields)
    assert not any(part.requires_grad for part in state)


@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3)])
def test_gates_start_orthogonal_with_a_forget_gate_bias_of_1(kind: Any, gates: int) -> None:
    layer = Core(kind, WIDTH, SIZE).layer
    for gate in layer.weight_hh_l0.chunk(gates):
        torch.testing.assert_close(gate @ gate.T, torch.eye(SIZE), atol=1e-5, rtol=0)
    for gate in layer.weight_ih_l0.chunk(gates):
        torch.testing.assert_close(gate.T @ gate, torch.eye(WIDTH), atol=1e-5, rtol=0)
    bias = layer.bias_ih_l0 + layer.bias_hh_l0
    expected = torch.zeros(gates * SIZE)
    if kind == "lstm":
        expected[SIZE : 2 * SIZE] = 1  # the forget gate is the second
    assert torch.equal(bias.detach(), expected)
