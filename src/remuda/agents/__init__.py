"""Agents: networks, and how they choose actions."""

from remuda.agents.actor import ActorAgent, Critic
from remuda.agents.heads import PolicyHead, PolicyOutput
from remuda.agents.policy import Memory, Outputs, PolicyAgent
from remuda.agents.q import QAgent
from remuda.agents.trunk import NetFactory

__all__ = [
    "ActorAgent",
    "Critic",
    "Memory",
    "NetFactory",
    "Outputs",
    "PolicyAgent",
    "PolicyHead",
    "QAgent",
    "PolicyOutput",
]
