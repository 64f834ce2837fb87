"""Tests that buffers have the shapes of the agent's outputs and are shared between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from counting_agents import CountingRNN
from rollouts import box, discrete, make_agent

from remuda.agents import PolicyAgent
from remuda.core import Space
from remuda.data import SharedArrays, leaves
from remuda.nets import make_net
from remuda.sampling.buffers import Buffers, allocate, attach, blank_obs, share

T, B = 3, 5
NESTED = Space("dict", entries={"image": box((2, 2, 1), "uint8"), "gear": discrete(4)}, keys=("image", "gear"))
PAIR = Space("tuple", entries={"item0": discrete(3), "item1": box((2, 2))})


def nested_agent() -> PolicyAgent:
    return PolicyAgent(NESTED, PAIR, make_net, core="gru", core_size=6, shared=True)


def arrays(buffers: Buffers) -> dict[str, torch.Tensor]:
    return dict(leaves(buffers._asdict()))


def test_buffers_have_the_shapes_of_the_agents_outputs() -> None:
    found = {path: (*x.shape, x.dtype) for path, x in arrays(allocate(nested_agent(), NESTED, T, B)).items()}
    assert found == {
        "steps.obs.image": (T, B, 2, 2, 1, torch.uint8),
        "steps.obs.gear": (T, B, torch.int64),
        "steps.action.item0": (T, B, torch.int64),
        "steps.action.item1": (T, B, 4, torch.float32),  # flat, as agents return them
        "steps.reward": (T, B, torch.float32),
        "steps.discount": (T, B, torch.float32),
        "steps.mask": (T, B, torch.bool),
        "steps.policy.log_prob": (T, B, torch.float32),
        "steps.policy.value": (T, B, torch.float32),
        "steps.version": (T, B, torch.int64),
        "next_obs.image": (B, 2, 2, 1, torch.uint8),
        "next_obs.gear": (B, torch.int64),
        "last_value": (B, torch.float32),
        "state.policy.h": (B, 6, torch.float32),
        "begins": (B, torch.bool),
        "next_state.policy.h": (B, 6, torch.float32),
    }


def test_buffers_are_zero_and_do_not_overlap() -> None:
    buffers = allocate(nested_agent(), NESTED, T, B)
    assert not any(x.any() for x in arrays(buffers).values())
    assert len({x.data_ptr() for x in arrays(buffers).values()}) == len(arrays(buffers))
    for number, x in enumerate(arrays(buffers).values()):
        x.fill_(number % 2)
    assert [bool(x.all()) for x in arrays(buffers).values()] == [bool(k % 2) for k in range(len(arrays(buffers)))]
    assert not any(x.requires_grad for x in arrays(buffers).values())


def test_buffers_of_an_agent_without_memory_have_no_state() -> None:
    buffers = allocate(make_agent(), box((3,)), T, B)
    assert buffers.state is None
    assert buffers.next_state is None
    memory, shared = share(buffers)
    assert (shared.state, shared.next_state) == (None, None)
    assert shared.columns(1, 3).state is None
    memory.close()


def test_blank_observations() -> None:
    assert blank_obs(box((2,)), 4).tolist() == [[0.0, 0.0]] * 4
    assert blank_obs(NESTED, 4).image.shape == (4, 2, 2, 1)


def test_columns_are_views_of_the_given_envs() -> None:
    buffers = allocate(nested_agent(), NESTED, T, B)
    part = buffers.columns(1, 3)
    for path, x in arrays(part).items():
        x.fill_(1)
        whole = arrays(buffers)[path]
        envs = whole.transpose(0, 1) if path.startswith("steps.") else whole
        assert envs[1:3].all()
        assert not envs[[0, 3, 4]].any(), path
        assert x.shape[1 if path.startswith("steps.") else 0] == 2


@pytest.fixture
def shared() -> Iterator[tuple[Any, SharedArrays, Buffers]]:
    agent = nested_agent()
    memory, buffers = share(allocate(agent, NESTED, T, B))
    yield agent, memory, buffers
    memory.close()


def test_shared_buffers_have_the_same_shapes_and_dtypes(shared: Any) -> None:
    agent, _, buffers = shared
    own = arrays(allocate(agent, NESTED, T, B))
    assert {path: (x.shape, x.dtype) for path, x in arrays(buffers).items()} == {
        path: (x.shape, x.dtype) for path, x in own.items()
    }
    assert not any(x.any() for x in arrays(buffers).values())


def test_two_mappings_share_their_memory(shared: Any) -> None:
    agent, memory, buffers = shared
    other = SharedArrays.attach(memory.fd, memory.layout)
    theirs = attach(allocate(agent, NESTED, T, B), other)
    for path, x in arrays(theirs).items():
        assert x.data_ptr() != arrays(buffers)[path].data_ptr()
        x.fill_(1)
        assert arrays(buffers)[path].all(), path
        arrays(buffers)[path].fill_(0)
        assert not x.any(), path
    theirs.columns(0, 2).steps.action.item0.fill_(2)
    assert buffers.steps.action.item0.tolist() == [[2, 2, 0, 0, 0]] * T
    other.close()


def write_columns(fd: int, layout: Any, first: int, last: int) -> None:
    memory = SharedArrays.attach(fd, layout)
    own = attach(allocate(CountingRNN(), box((3,)), 4, 6), memory).columns(first, last)
    own.steps.obs[2] = float(first)
    own.steps.mask.fill_(True)
    own.last_value.fill_(last)
    own.next_state.rows.fill_(7)


def test_other_processes_write_their_columns() -> None:
    memory, buffers = share(allocate(CountingRNN(), box((3,)), 4, 6))
    workers = []
    for first, last in ((0, 2), (2, 5)):
        pid = os.fork()
        if pid == 0:  # pytest must not run in the child
            code = 1
            try:
                write_columns(memory.fd, memory.layout, first, last)
                code = 0
            finally:
                os._exit(code)
        workers.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in workers] == [0, 0]
    assert buffers.steps.obs[2, :, 0].tolist() == [0, 0, 2, 2, 2, 0]
    assert not buffers.steps.obs[[0, 1, 3]].any()
    assert buffers.steps.mask.tolist() == [[True] * 5 + [False]] * 4
    assert buffers.last_value.tolist() == [2, 2, 5, 5, 5, 0]
    assert buffers.next_state.rows.tolist() == [7, 7, 7, 7, 7, 0]
    assert not buffers.state.rows.any()
    memory.close()


def test_arrays_stay_readable_after_close() -> None:
    """A rollout may outlive its sampler."""
    memory, buffers = share(allocate(CountingRNN(), box((3,)), 4, 6))
    buffers.steps.reward.fill_(3.0)
    memory.close()
    memory.close()
    assert buffers.steps.reward.unique().tolist() == [3.0]
