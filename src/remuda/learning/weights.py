"""Weights: a versioned cell between the learner and whoever acts."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remuda.data import SharedArrays


class LocalWeights:
    """For an agent that acts in the learner's own process: the parameters are the same, only the version moves."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def publish(self, version: int) -> None:
        self.version = version

    def pull(self, have: int) -> int:
        return self.version

    def close(self) -> None:
        """Nothing to give back."""


class SharedWeights:
    """Parameters and buffers of a module in shared memory: one process publishes, any number pull.

        ours = SharedWeights(agent)                                  # the learner's process
        ours.publish(version)
        theirs = SharedWeights(copy_of_agent, fd=ours.fd)            # an acting process, given the descriptor
        version = theirs.pull(have=-1)                               # copies into its own agent, only what is newer

    Two copies take turns, and each carries the number of the publication it holds, odd while it is written. Whoever
    pulls looks at that number before and after: it never keeps a torn copy, and nobody waits for a lock.
    """

    def __init__(self, module: nn.Module, version: int = 0, fd: int | None = None) -> None:
        self._tensors: list[Tensor] = [tensor.detach() for tensor in module.state_dict().values()]
        layout: dict[str, Any] = {
            f"{copy}.{index}": (tuple(tensor.shape), str(tensor.numpy().dtype))
            for copy in range(2)
            for index, tensor in enumerate(self._tensors)
        }
        layout |= {"serial": ((2,), "int64"), "version": ((2,), "int64"), "newest": ((1,), "int64")}
        self.memory = SharedArrays(layout, fd)
        self._copies = [
            [torch.from_numpy(self.memory[f"{copy}.{index}"]) for index in range(len(self._tensors))]
            for copy in range(2)
        ]
        self._serial, self._version, self._newest = (self.memory[name] for name in ("serial", "version", "newest"))
        self._fence = threading.Lock()  # taking it orders memory between processes
        if fd is None:
            self.publish(version)

    @property
    def fd(self) -> int:
        return self.memory.fd

    def publish(self, version: int) -> None:
        turn = int(self._newest[0]) + 1
        copy = turn % 2
        self._serial[copy] = 2 * turn - 1
        with self._fence, torch.no_grad():
            for theirs, ours in zip(self._copies[copy], self._tensors, strict=True):
                theirs.copy_(ours)
            self._version[copy] = version
        with self._fence:
            self._serial[copy] = 2 * turn
        with self._fence:
            self._newest[0] = turn

    def pull(self, have: int) -> int:
        while True:
            turn = int(self._newest[0])
            with self._fence:
                copy = turn % 2
                before, version = int(self._serial[copy]), int(self._version[copy])
            if version == have and before == 2 * turn:
                return have
            with torch.no_grad():
                for ours, theirs in zip(self._tensors, self._copies[copy], strict=True):
                    ours.copy_(theirs)
            with self._fence:
                # Overtaken twice while copying: what was copied is a mixture, and something newer is there.
                if before == 2 * turn and int(self._serial[copy]) == before:
                    return version

    def close(self) -> None:
        self._copies.clear()
        self._serial = self._version = self._newest = np.zeros(2, np.int64)
        self.memory.close()
