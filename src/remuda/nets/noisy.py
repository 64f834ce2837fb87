"""Linear layers with noise of a learned scale on their weights, for exploration (NoisyNet, arXiv 1706.10295).

    layer = NoisyLinear(64, 6)
    y = layer(x, noise)                  # noise [..., layer.noise_width] is standard normal; None uses mean weights

The noise of a weight is the product of one number for its input and one for its output. Each row of a batch can
therefore have different noise without a weight matrix of its own:

    y = W x + b + e_out * (S (e_in * x) + s)

W and b are the means of weights and biases, and S and s are their standard deviations. e_in and e_out are the parts
of `noise` for inputs and outputs, in which each number z is replaced by sign(z) * sqrt(|z|).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIGMA = 0.5  # initial standard deviations are SIGMA / sqrt(width), as in the paper for factorized noise


class NoisyLinear(nn.Module):
    """A linear layer whose weights and biases each have a mean and a standard deviation."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.width, self.noise_width = width, width + outputs
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(outputs, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, width), SIGMA * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), SIGMA * bound))

    def forward(self, x: Tensor, noise: Tensor | None) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if noise is None:
            return y
        e = noise.sign() * noise.abs().sqrt()
        e_in, e_out = e[..., : self.width], e[..., self.width :]
        return y + e_out * F.linear(x * e_in, self.weight_sigma, self.bias_sigma)
