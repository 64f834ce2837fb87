"""Weights: the newest parameters with their version, passed from the learner to samplers and evaluators."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from remuda.data import Fence, Layout, SharedArrays
from remuda.devices import CPU, to_cpu

logger = logging.getLogger("remuda.learning")

VERSION = "version"  # key of the version in the metadata of a weights file


class LocalWeights:
    """Weights of an agent that acts in the learner's process. The agent uses the learner's parameters, not copies."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def publish(self, version: int) -> None:
        self.version = version

    def invitation(self) -> tuple[dict[str, str | None], list[int]]:
        raise RuntimeError("LocalWeights stay in the learner's process: use SharedWeights or FileWeights.")

    @classmethod
    def join(cls, module: nn.Module, message: Mapping[str, object], fds: list[int]) -> Self:
        raise RuntimeError("LocalWeights stay in the learner's process: use SharedWeights or FileWeights.")

    def pull(self, have: int) -> int:
        return self.version

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""


class SharedWeights:
    """Parameters and buffers of a module in shared memory. One process publishes them, and other processes pull them.

        ours = SharedWeights(agent)                                  # the learner's process
        ours.publish(version)
        theirs = SharedWeights(copy_of_agent, fd=ours.fd)            # a sampler, which has received the descriptor
        version = theirs.pull(have=-1)                               # copies the parameters into copy_of_agent
        version = theirs.pull(have=version)                          # copies them again only after a publication

    Shared memory holds two copies of the parameters, and `publish` writes to them in turn. Each copy has a serial
    number, which is odd while the copy is written. `pull` starts again if the serial number changed while `pull` read
    the copy. Therefore, `pull` needs no lock and never mixes two publications. `pull` does not compare versions,
    because one version may be published again with new observation statistics.
    """

    def __init__(self, module: nn.Module, version: int = 0, fd: int | None = None) -> None:
        self._module, self._pulled = module, 0
        tensors = self._tensors()
        self._is_elsewhere = any(tensor.device != CPU for tensor in tensors)
        layout: Layout = {
            f"{copy}.{index}": (tuple(tensor.shape), str(torch.empty(0, dtype=tensor.dtype).numpy().dtype))
            for copy in range(2)
            for index, tensor in enumerate(tensors)
        }
        layout |= {"serial": ((2,), "int64"), "version": ((2,), "int64"), "newest": ((1,), "int64")}
        self.memory = SharedArrays(layout, fd)
        self._copies = [
            [torch.from_numpy(self.memory[f"{copy}.{index}"]) for index in range(len(tensors))] for copy in range(2)
        ]
        self._serial, self._version, self._newest = (self.memory[name] for name in ("serial", "version", "newest"))
        self._fence = Fence()
        if fd is None:
            self.publish(version)

    def _tensors(self) -> list[Tensor]:
        """Return the module's tensors. Look them up at every call, because a network may replace a buffer."""
        return list(self._module.state_dict().values())

    @property
    def fd(self) -> int:
        return self.memory.fd

    def invitation(self) -> tuple[dict[str, str | None], list[int]]:
        """Return a message and file descriptors that another process passes to `join_weights`."""
        return {"weights": None}, [self.fd]

    def publish(self, version: int) -> None:
        newest = self._tensors()
        if self._is_elsewhere:
            newest = to_cpu(newest)  # copying all tensors at once waits for the device only once
        turn = int(self._newest[0]) + 1
        copy = turn % 2
        self._serial[copy] = 2 * turn - 1
        self._fence()
        with torch.no_grad():
            for theirs, ours in zip(self._copies[copy], newest, strict=True):
                theirs.copy_(ours)
        self._version[copy] = version
        self._fence()
        self._serial[copy] = 2 * turn
        self._fence()
        self._newest[0] = turn

    @classmethod
    def join(cls, module: nn.Module, message: Mapping[str, object], fds: list[int]) -> Self:
        """Attach `module` to the weights of an `invitation`. Remove the last descriptor from `fds`, and close it."""
        fd = fds.pop()
        joined = cls(module, fd=fd)
        os.close(fd)
        return joined

    def pull(self, have: int) -> int:
        while True:
            turn = int(self._newest[0])
            copy = turn % 2
            self._fence()
            before, version = int(self._serial[copy]), int(self._version[copy])
            self._fence()
            if have >= 0 and turn == self._pulled and before == 2 * turn:
                return have
            with torch.no_grad():
                for ours, theirs in zip(self._tensors(), self._copies[copy], strict=True):
                    ours.copy_(theirs)
            self._fence()
            if before == 2 * turn and int(self._serial[copy]) == before:
                self._pulled = turn
                return version

    def close(self) -> None:
        self._copies.clear()
        self._serial = self._version = self._newest = np.zeros(2, np.int64)
        self.memory.close()


class FileWeights:
    """Parameters and buffers of a module in a file. One process publishes them, and other processes pull them.

        ours = FileWeights(agent, run / "weights.safetensors", version=0)    # the learner's process
        theirs = FileWeights(copy_of_agent, run / "weights.safetensors")     # a sampler
        version = theirs.pull(have=-1)                                       # reads the file
        version = theirs.pull(have=version)                                  # reads it again only if it has changed

    The safetensors file is written under another name and then renamed, so readers need no lock. A file is slower
    than shared memory, but it keeps the newest weights on disk. The Spreeze framework also passes weights by file.
    """

    def __init__(self, module: nn.Module, path: Path, version: int | None = None) -> None:
        """If `version` is given, publish the parameters of `module` at once."""
        self._module = module
        self.path, self._seen, self._is_written = path, (0, 0), True
        if version is not None:
            self.publish(version)

    def invitation(self) -> tuple[dict[str, str | None], list[int]]:
        """Return a message that another process passes to `join_weights`, and an empty list of file descriptors."""
        return {"weights": str(self.path.resolve())}, []  # the other process may have another working directory

    def publish(self, version: int) -> None:
        """Write the file. If writing fails, such as on a full disk, samplers continue with the old file."""
        aside = self.path.with_name(f".writing-{self.path.name}")
        try:
            # Copy the tensors, because safetensors accepts neither tensors that share memory nor channels_last.
            held = to_cpu(dict(self._module.state_dict()))
            copies = {n: x.clone(memory_format=torch.contiguous_format) for n, x in held.items()}
            aside.write_bytes(save(copies, metadata={VERSION: str(version)}))
            os.replace(aside, self.path)
        except OSError as error:
            if not self.path.exists():  # without an old file, samplers would have no weights
                raise
            if self._is_written:
                logger.warning("weights of update %d were not written (%s): make room.", version, error)
            self._is_written = False
            return
        self._is_written = True

    @classmethod
    def join(cls, module: nn.Module, message: Mapping[str, object], fds: list[int]) -> Self:
        """Attach `module` to the file that the message of an `invitation` names. `fds` is not used."""
        return cls(module, Path(str(message["weights"])))

    def pull(self, have: int) -> int:
        found = os.stat(self.path)
        mark = (found.st_ino, found.st_mtime_ns)
        if mark == self._seen and have >= 0:
            return have
        data = self.path.read_bytes()  # read in one call, because the file may be replaced at any time
        read = load(data)
        with torch.no_grad():
            for name, tensor in self._module.state_dict().items():
                tensor.copy_(read[name])
        self._seen = mark  # if the file was replaced after `stat`, the next call reads it again
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return int(header["__metadata__"][VERSION])

    def close(self) -> None:
        """Do nothing, because the file is meant to stay on disk."""


def join_weights(module: nn.Module, message: Mapping[str, object], fds: list[int]) -> SharedWeights | FileWeights:
    """Attach `module` to the weights of an invitation. If the weights have a descriptor, it is the last in `fds`."""
    if message.get("weights"):
        return FileWeights.join(module, message, fds)
    return SharedWeights.join(module, message, fds)
