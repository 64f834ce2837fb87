"""Agents: the networks, and how they act."""

from remuda.agents.heads import PolicyHead, Said
from remuda.agents.policy import Memory, NetFactory, Outputs, PolicyAgent
from remuda.agents.quick import QuickAgent

__all__ = ["Memory", "NetFactory", "Outputs", "PolicyAgent", "PolicyHead", "QuickAgent", "Said"]
