"""Networks that map observations to features. The heads that follow them are in agents/."""

from remuda.nets.conv import A3CNet, NatureCNN, SmallCNN, is_channels_first
from remuda.nets.encoder import NETS, EntriesNet, make_net
from remuda.nets.inputs import Inputs, Shapes
from remuda.nets.mlp import ACTIVATIONS, MLP, orthogonal
from remuda.nets.noisy import NoisyLinear
from remuda.nets.normalize import Moments, RunningMoments, Standardize
from remuda.nets.precision import Bfloat16
from remuda.nets.recurrent import Core, GRUState, LSTMState
from remuda.nets.residual import ImpalaNet

__all__ = [
    "ACTIVATIONS",
    "A3CNet",
    "MLP",
    "NETS",
    "Bfloat16",
    "Core",
    "EntriesNet",
    "GRUState",
    "ImpalaNet",
    "Inputs",
    "LSTMState",
    "Moments",
    "NatureCNN",
    "NoisyLinear",
    "RunningMoments",
    "Shapes",
    "SmallCNN",
    "Standardize",
    "is_channels_first",
    "make_net",
    "orthogonal",
]
