"""Weights for an agent that acts in the learner's process, but not on the device of the learner's networks."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Self

import torch
from torch import nn


class CopiedWeights:
    """Keeps a copy of the learner's agent on another device; `pull` copies the newest parameters to this copy."""

    def __init__(self, module: nn.Module, device: torch.device, version: int = 0) -> None:
        self.version, self._is_new = version, False
        self._module = module
        self.copy: Any = deepcopy(module).to(device)  # the agent that samplers use

    def publish(self, version: int) -> None:
        self.version, self._is_new = version, True

    def invitation(self) -> tuple[dict[str, str | None], list[int]]:
        raise RuntimeError("CopiedWeights stay in the learner's process: use SharedWeights or FileWeights.")

    @classmethod
    def join(cls, module: nn.Module, message: Mapping[str, object], fds: list[int]) -> Self:
        raise RuntimeError("CopiedWeights stay in the learner's process: use SharedWeights or FileWeights.")

    @torch.no_grad()
    def pull(self, have: int) -> int:
        """Copy the parameters if they were published since the last call; return their version.

        `have` is not used, because `publish` records that parameters are new.
        """
        if self._is_new:
            pairs = zip(self.copy.state_dict().values(), self._module.state_dict().values(), strict=True)
            for theirs, ours in pairs:
                theirs.copy_(ours)
            self._is_new = False
        return self.version

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""
