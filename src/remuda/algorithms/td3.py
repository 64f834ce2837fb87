"""Twin delayed deep deterministic policy gradients (1802.09477).

It makes three changes to DDPG, each of them an option there: targets use the smaller of two critics; target actions
have noise; actor and targets change only in every second update.
"""

from __future__ import annotations

from typing import Any

from remuda.agents import ActorAgent, Critic
from remuda.algorithms.ddpg import DDPG


class TD3(DDPG):
    """DDPG with the three changes as defaults; pass two critics."""

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
