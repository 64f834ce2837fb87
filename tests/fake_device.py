"""A device other than the CPU on a machine that has none, to test where tensors are and how often the CPU waits.

Tensors of torch's FakeTensorMode have a shape and a device, but no numbers. Operations on tensors of different
devices raise, as on a GPU. The device "meta" stands for the GPU, because autograd works there without one.

    with fake_device() as waits:
        learner = make_learner(config, info)          # all networks are on DEVICE
        learner.apply(learner.gradients(fake(batch)))
    waits.counts                                      # operations for which the CPU would have waited, by name
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import remuda.devices
from remuda.build.algorithm import make_algorithm
from remuda.build.envs import agent_view
from remuda.build.nets import find_net
from remuda.data import Batch, map_tree
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.nets import RunningMoments

DEVICE = torch.device("meta")


class Waits(TorchDispatchMode):
    """Counts the operations for which the CPU has to wait for a device, and gives them results.

    The results do not exist without numbers: scalars are 1, no row is reset, and masks select `selected` rows, or
    all.
    """

    def __init__(self, selected: int | None) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.selected = selected

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(function), kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and first.device.type == "cpu" and name == "aten._local_scalar_dense.default":
            return True if first.dtype == torch.bool else 1.0
        if first is not None and first.device == DEVICE:
            if name == "aten._local_scalar_dense.default":
                self.counts["scalar"] += 1
                return True if first.dtype == torch.bool else 1.0
            if name == "aten.nonzero.default":
                self.counts["nonzero"] += 1
                return torch.empty(0, first.dim(), dtype=torch.int64, device=DEVICE)
            if name == "aten.index.Tensor" and (mask := mask_of(args[1])) is not None:
                self.counts["mask"] += 1
                rows = first.reshape(mask.numel(), *first.shape[mask.dim() :])
                return rows[: self.selected].clone()
            if name == "aten._to_copy.default" and is_cpu(kwargs) and not kwargs.get("non_blocking"):
                self.counts["copy to the CPU"] += 1
        elif name == "aten._to_copy.default" and kwargs.get("device") == DEVICE and not kwargs.get("non_blocking"):
            self.counts["copy from the CPU"] += 1
        return function(*args, **kwargs)


def mask_of(indices: Any) -> Tensor | None:
    return next((x for x in indices if x is not None and x.dtype == torch.bool), None)


def is_cpu(options: dict[str, Any]) -> bool:
    return options.get("device") is not None and torch.device(options["device"]).type == "cpu"


def copied(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
    """Replace `Tensor.__deepcopy__`, which copies storages: fake tensors have none."""
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)]._is_param = isinstance(tensor, nn.Parameter)  # type: ignore[attr-defined]
    return memo[id(tensor)]


@contextmanager
def fake_device(selected: int | None = None) -> Iterator[Waits]:
    """Within the context, torch has tensors without numbers, and DEVICE counts as a GPU."""
    waits = Waits(selected)

    def wait_for(device: torch.device) -> None:
        waits.counts["wait"] += 1

    def accumulated(delta_t: Tensor, decay_t: Tensor) -> Tensor:  # a loop in numpy, which needs numbers
        remuda.devices.to_cpu((delta_t, decay_t))
        return delta_t + decay_t

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(remuda.devices, "ASYNCHRONOUS", (DEVICE.type,))
        patch.setattr(remuda.devices, "wait_for", wait_for)
        patch.setattr(remuda.devices, "stage", lambda tensor: tensor)  # fake tensors cannot be page-locked
        patch.setattr(sys.modules["remuda.maths.vtrace"], "accumulated", accumulated)
        patch.setattr(Tensor, "__deepcopy__", copied)
        patch.setattr(nn.Module, "to", lambda self, device: self)  # networks are built on their device
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(waits)
        yield waits


def make_learner(config: Any, info: Any, device: torch.device = DEVICE, actor_device: str | None = None) -> Learner:
    """Return a learner whose networks are on `device`; statistics are on the CPU, where they would stay."""
    options = config.algo_options
    seen = agent_view(config, info)
    with torch.device(device):
        algorithm: Any = make_algorithm(config, seen, find_net(config.agent))
        for module in algorithm.modules():
            if isinstance(module, RunningMoments):
                module._buffers = {
                    name: torch.zeros(x.shape, dtype=x.dtype, device="cpu") for name, x in module.named_buffers()
                }
        return Learner(
            algorithm,
            OptimizerOptions(options.optimizer),
            parse_schedule(options.learning_rate),
            options.max_grad_norm,
            device=str(device),
            actor_device=actor_device,
        )


def fake(tree: Any) -> Any:
    """Return tensors without numbers that have the shapes of those in `tree`, on the CPU."""
    return map_tree(lambda x: torch.empty(x.shape, dtype=x.dtype), tree)


def fake_batch(batch: Batch) -> Batch:
    names = ("steps", "targets", "state", "next_obs", "weight")
    return replace(batch, **{name: fake(getattr(batch, name)) for name in names})
