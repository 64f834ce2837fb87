"""User-defined networks."""

import math

from torch import nn


class Net(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 32), nn.ReLU())

    def forward(self, obs):
        return self.body(obs)


class BadNet(Net):
    def __init__(self, shape):
        super().__init__((99,))
