"""A linear layer for the thousands of features that convolutions leave, by oneDNN's products instead of MKL's.

    layer = WideLinear(3136, 512)           # an nn.Linear: the same parameters, the same numbers to rounding

Torch takes MKL for matrices on x86 and oneDNN for convolutions. Where a matrix is mostly weights, MKL splits the work
between threads badly. Milliseconds of MKL / oneDNN, 3136 to 512 features, on two Zen 4 cores (torch 2.13):

| rows | threads | forward | gradient by inputs | gradient by weights |
|---|---|---|---|---|
| 1 | 2 | 0.11 / 0.07 | 0.11 / 0.08 | 0.13 / 0.10 |
| 8 | 1 | 0.44 / 0.42 | 0.45 / 0.28 | 0.47 / 0.36 |
| 8 | 2 | 0.39 / 0.25 | 0.33 / 0.16 | 0.36 / 0.20 |
| 32, weights not in the cache | 2 | 1.39 / 0.88 | 1.49 / 0.79 | 1.49 / 0.82 |
| 256 | 1 | 8.6 / 7.9 | 8.8 / 7.9 | 8.5 / 8.2 |
| 256 | 2 | 4.3 / 3.9 | 4.4 / 3.9 | 4.4 / 4.1 |

For square matrices of 256 there is nothing in it, and for gradients by narrow weights oneDNN takes twice as long: so
other layers stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

HAS_ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What F.linear says of them."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        by_output = by_output.contiguous()
        by_x, by_weight, by_bias = ctx.needs_input_grad
        return (
            product(by_output, weight.t()) if by_x else None,
            product(by_output.t(), x.t()) if by_weight else None,
            by_output.sum(0) if by_bias else None,
        )


class WideLinear(nn.Linear):
    """Rows [N, inputs] of float32 on the CPU by oneDNN, and all else as nn.Linear does it."""

    def forward(self, x: Tensor) -> Tensor:
        is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == 2 and len(x) > 0
        if not HAS_ONEDNN or not is_plain or torch.compiler.is_compiling():  # which has ways of its own
            return super().forward(x)
        found: Tensor = _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return found
