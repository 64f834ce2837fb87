"""Agents: the networks, and how they act."""

from remuda.agents.policy import NetFactory, Outputs, PolicyAgent, Said

__all__ = ["NetFactory", "Outputs", "PolicyAgent", "Said"]
