"""Networks and what stands before them: nets map observations to features, heads belong to agents."""

from remuda.nets.mlp import ACTIVATIONS, MLP, RunningMoments, Standardise, orthogonal

__all__ = ["ACTIVATIONS", "MLP", "RunningMoments", "Standardise", "orthogonal"]
