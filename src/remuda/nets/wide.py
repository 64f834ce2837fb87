"""A linear layer for thousands of inputs, as after convolutions, which uses oneDNN instead of MKL.

    layer = WideLinear(3136, 512)           # an nn.Linear, with the same results except for rounding

On x86, torch uses MKL for matrix products and oneDNN for convolutions. MKL divides a product badly between threads if
the weights are much larger than the inputs. The table shows the milliseconds that MKL / oneDNN take for a layer from
3136 to 512 features on two Zen 4 cores. The weights were not in the cache (torch 2.13; bench/wide.py):

| rows | threads | forward | gradient w.r.t. inputs | gradient w.r.t. weights |
|---|---|---|---|---|
| 1 | 1 | 0.46 / 0.55 | 0.35 / 0.71 | 0.40 / 0.76 |
| 1 | 2 | 0.47 / 0.45 | 0.38 / 0.52 | 0.42 / 0.71 |
| 8 | 1 | 1.01 / 1.07 | 1.10 / 0.95 | 1.10 / 0.99 |
| 8 | 2 | 1.28 / 0.75 | 1.34 / 0.63 | 1.50 / 0.84 |
| 32 | 1 | 1.75 / 1.74 | 1.96 / 1.59 | 1.69 / 1.73 |
| 32 | 2 | 1.76 / 1.06 | 2.06 / 0.91 | 1.85 / 1.12 |
| 256 | 1 | 9.52 / 8.53 | 10.31 / 8.50 | 10.44 / 8.88 |
| 256 | 2 | 6.06 / 4.65 | 7.81 / 4.79 | 7.82 / 4.98 |

All other layers use torch's own matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

HAS_ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear(x, weight, bias) with oneDNN."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
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
    """An nn.Linear that uses oneDNN for float32 rows [N, inputs] on the CPU, and otherwise what torch chooses."""

    def forward(self, x: Tensor) -> Tensor:
        is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == 2 and len(x) > 0
        # torch.compile and autocast choose a library by themselves.
        chooses = torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
        if not HAS_ONEDNN or not is_plain or chooses:
            return super().forward(x)
        if not torch.is_grad_enabled():
            return product(x, self.weight, self.bias)
        found: Tensor = _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return found
