"""Twin delayed deep deterministic policy gradients, 1802.09477: DDPG that distrusts its critics.

Three changes, each an argument of DDPG: the smaller of two critics is believed; the value of a target action is that
of a neighbour at random; actor and targets move in every second update only.
"""

from __future__ import annotations

from typing import Any

from remuda.agents import ActorAgent, Critic
from remuda.algorithms.ddpg import DDPG


class TD3(DDPG):
    """DDPG with the three changes as its defaults; `critics` are two."""

    def __init__(
        self,
        agent: ActorAgent,
        critics: list[Critic],
        seed: int,
        *,
        policy_delay: int = 2,
        target_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        **options: Any,
    ) -> None:
        changes: dict[str, Any] = {
            "policy_delay": policy_delay,
            "target_noise": target_noise,
            "target_noise_clip": target_noise_clip,
        }
        super().__init__(agent, critics, seed, **changes, **options)
