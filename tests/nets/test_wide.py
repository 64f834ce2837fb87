"""Tests that the wide linear layer equals nn.Linear, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remuda.nets import A3CNet, ImpalaNet, NatureCNN
from remuda.nets.wide import HAS_ONEDNN, WideLinear


def both(inputs: int, outputs: int) -> tuple[WideLinear, nn.Linear]:
    torch.manual_seed(1)
    wide, plain = WideLinear(inputs, outputs), nn.Linear(inputs, outputs)
    plain.load_state_dict(wide.state_dict())
    return wide, plain


@pytest.mark.skipif(not HAS_ONEDNN, reason="without oneDNN what is compared is one and the same")
@pytest.mark.parametrize("rows", [1, 2, 8, 33, 256])
@pytest.mark.parametrize(("inputs", "outputs"), [(3136, 512), (2592, 256), (7, 3), (1, 1)])
def test_outputs_and_gradients_equal_those_of_the_plain_layer(rows: int, inputs: int, outputs: int) -> None:
    wide, plain = both(inputs, outputs)
    x, weight = torch.randn(rows, inputs), torch.randn(rows, outputs)
    found = []
    for layer in (wide, plain):
        seen = x.clone().requires_grad_()
        y = layer(seen)
        found.append([y, *torch.autograd.grad((y.relu() * weight).sum(), [seen, layer.weight, layer.bias])])
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_gradients_and_inputs_may_have_any_strides() -> None:
    wide, plain = both(12, 5)
    base = torch.randn(12, 9).t()  # elements of a column are adjacent in memory
    for x in (base, torch.randn(1, 12).expand(9, 12), torch.randn(9, 24)[:, ::2]):
        # The gradient of a sum is an expanded scalar.
        mine, theirs = (torch.autograd.grad(layer(x).sum(), layer.weight)[0] for layer in (wide, plain))
        torch.testing.assert_close(mine, theirs)


def test_cases_without_onednn_equal_the_plain_layer() -> None:
    wide, plain = both(12, 5)
    for x in (torch.randn(0, 12), torch.randn(12), torch.randn(2, 3, 12)):
        assert torch.equal(wide(x), plain(x))
    assert torch.equal(wide.double()(torch.ones(2, 12).double()), plain.double()(torch.ones(2, 12).double()))


def test_gradients_are_computed_only_where_required() -> None:
    wide, _ = both(12, 5)
    wide.requires_grad_(False)
    assert not wide(torch.randn(2, 12)).requires_grad
    x = torch.randn(2, 12, requires_grad=True)
    wide(x).sum().backward()
    assert x.grad is not None
    assert wide.weight.grad is None


@pytest.mark.parametrize("net", [NatureCNN, A3CNet, ImpalaNet])
def test_large_image_nets_have_one_wide_linear_layer(net: type[nn.Module]) -> None:
    assert sum(isinstance(layer, WideLinear) for layer in net((4, 84, 84)).modules()) == 1
