"""Twin delayed deep deterministic policy gradients (arXiv 1802.09477).

TD3 makes three changes to DDPG, all of which the class `DDPG` supports: targets use the smaller value of two critics;
noise is added to target actions; actor and target networks change only in every second update.
"""

from __future__ import annotations

from typing import Any

from remuda.agents import ActorAgent, Critic
from remuda.algorithms.ddpg import DDPG


class TD3(DDPG):
    """DDPG with the default options of TD3. `critics` should hold two critics."""

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
