"""Networks that compute in bfloat16, which GPUs and some CPUs multiply faster than float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from remuda.core import TensorTree


class Bfloat16(nn.Module):
    """Computes a network by autocast, with matrix products in bfloat16. Parameters and outputs are float32.

    Recurrent cores, heads and losses are not wrapped and stay in float32. In bfloat16, differences of
    log-probabilities and of values would lose most of their digits.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: TensorTree) -> Tensor:
        device = next((parameter.device.type for parameter in self.net.parameters()), "cpu")
        with torch.autocast(device, torch.bfloat16):
            features: Tensor = self.net(inputs)
        return features.float()
