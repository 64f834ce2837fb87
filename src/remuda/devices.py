"""Copy tensors between the CPU and another device, such as a GPU, and wait as rarely as possible.

    batch = to_device(batch, device)             # starts the copies, and does not wait for them
    action, value = to_cpu((action, value))      # copies all tensors, and waits once

Rollouts, replays and everything that envs see stay in CPU memory. Networks may be on another device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from remuda.data import Tree, leaves, map_tree

# Kinds of devices that copy while the CPU continues. With all other devices, the CPU waits until a copy is complete.
ASYNCHRONOUS = ("cuda", "xpu")
CPU = torch.device("cpu")


def to_device(tree: Tree, device: torch.device) -> Tree:
    """Return a tree of tensors on `device`; tensors that are on this device already are not copied."""
    return map_tree(lambda x: send(x, device), tree)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on `device`. If the device can copy while the CPU continues, do not wait for the copy."""
    if tensor.device == device:
        return tensor
    if device.type not in ASYNCHRONOUS or tensor.device != CPU:
        return tensor.to(device)
    return stage(tensor).to(device, non_blocking=True)


def stage(tensor: Tensor) -> Tensor:
    """Copy a CPU tensor to page-locked memory, from which a device reads without help of the CPU.

    Torch caches the blocks of this memory. It reuses a block only after the copies from it have ended.
    """
    return tensor.pin_memory()


def to_cpu(tree: Tree) -> Tree:
    """Return a tree of tensors on the CPU, and wait until all copies are complete; CPU tensors are not copied."""
    copied = map_tree(lambda x: x.to(CPU, non_blocking=x.device.type in ASYNCHRONOUS), tree)
    for device in {x.device for _, x in leaves(tree) if x.device.type in ASYNCHRONOUS}:
        wait_for(device)
    return copied


def means_on_cpu(values: Mapping[str, list[Tensor | float]]) -> dict[str, list[Tensor | float]]:
    """Replace each list that contains scalar tensors by a list with only its mean, as a tensor on the CPU.

    Wait for the tensors' device only once. Lists of floats are returned as they are.
    """
    tensors = {name: [x for x in each if isinstance(x, Tensor)] for name, each in values.items()}
    means = to_cpu({name: torch.stack(each).float().mean() for name, each in tensors.items() if each})
    found = dict(values)
    for name, mean in means.items():
        floats = [x for x in values[name] if not isinstance(x, Tensor)]
        found[name] = [(mean * len(tensors[name]) + sum(floats)) / len(values[name]) if floats else mean]
    return found


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all work that this thread has given to it."""
    torch.accelerator.current_stream(device).synchronize()
