"""Samplers of several parts: together they sample what one sampler of all envs samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from parted import counting_sampler
from ranks import Ranks

from remuda.core import Episode
from remuda.data import Rollout, leaves
from remuda.errors import ConfigError, Interrupted, NoState
from remuda.parts import LocalGroup, PartedSampler
from remuda.processes.fork_server import ForkServer

SEED = 11


def make(parts: int, envs: int, **options: Any) -> PartedSampler:
    samplers = [counting_sampler(envs, part * envs, **options) for part in range(parts)]
    return PartedSampler(samplers, envs, LocalGroup(parts))


@pytest.fixture
def server(shared_servers: Any) -> ForkServer:
    return shared_servers("ranks")


def columns(rollout: Rollout) -> list[torch.Tensor]:
    """Return all arrays of a rollout with the envs as their last axis."""
    steps = [array.movedim(1, -1) for _, array in leaves(rollout.steps)]
    return [
        *steps,
        *(array.movedim(0, -1) for _, array in leaves((rollout.next_obs, rollout.last_value, rollout.state))),
    ]


def lengths_of(episodes: list[Episode]) -> list[tuple[int, float]]:
    """Return the env and the length of all episodes, in the order of envs."""
    return sorted((episode.env, episode.values["ep_len"]) for episode in episodes)


@pytest.fixture
def both() -> Iterator[tuple[PartedSampler, Any]]:
    with closing(make(3, 2)) as divided, closing(counting_sampler(6, 0)) as undivided:
        yield divided, undivided


def test_parts_sample_the_same_rows_and_episodes_as_one_sampler(both: tuple[PartedSampler, Any]) -> None:
    divided, undivided = both
    assert divided.reset(SEED, warm_up=5) == undivided.reset(SEED, warm_up=5) > 0
    episodes = 0
    for _ in range(5):
        found: Any = divided.collect()
        expected = undivided.collect()
        assert found.num_real == expected.num_real
        assert found.versions() == expected.versions() == (7.0, 7)
        assert [part.envs.tolist() for part in found.parts] == [[0, 1], [2, 3], [4, 5]]
        for arrays, array in zip(zip(*map(columns, found.parts), strict=True), columns(expected), strict=True):
            assert torch.equal(torch.cat(arrays, -1), array)
        mine, theirs = (lengths_of(sampler.episodes()) for sampler in both)
        assert mine == theirs
        episodes += len(theirs)
        assert divided.running() == undivided.running()
        assert divided.restarts() == undivided.restarts() == 0
        assert set(divided.take_seconds()) == set(undivided.take_seconds())
    assert episodes > 6


def test_loaded_state_continues_with_the_same_rollouts() -> None:
    with closing(make(2, 2)) as first, closing(make(2, 2)) as second:
        first.reset(SEED)
        for _ in range(2):
            first.collect()
        second.set_state(first.get_state())
        for sampler in second._samplers:
            sampler.row = 12  # type: ignore[attr-defined]
        for _ in range(2):
            mine, theirs = first.collect(), second.collect()
            for part, other in zip(mine.parts, theirs.parts, strict=True):  # type: ignore[attr-defined]
                assert all(map(torch.equal, columns(part), columns(other)))


def test_state_of_another_number_of_parts_is_refused() -> None:
    with closing(make(2, 2)) as first, closing(make(4, 1)) as second:
        first.reset(SEED)
        first.collect()
        with pytest.raises(ConfigError, match="made by 2 parts or ranks, not by 4: use as many"):
            second.set_state(first.get_state())


def test_state_of_one_part_that_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(make(2, 1)) as sampler:
        sampler.reset(SEED)

        def get_state() -> bytes:
            raise NoState("this env has no state")

        monkeypatch.setattr(sampler._samplers[1], "get_state", get_state)
        with pytest.raises(NoState, match="this env has no state"):
            sampler.get_state()


def test_interruption_of_one_part_interrupts_all() -> None:
    asked: list[bool] = []
    samplers = [counting_sampler(1, 0), counting_sampler(1, 1, lambda: bool(asked))]
    group = LocalGroup(2)
    with closing(PartedSampler(samplers, 1, group)) as sampler:
        sampler.reset(SEED)
        sampler.collect()
        asked.append(True)
        with pytest.raises(Interrupted):
            sampler.collect()
        assert group.is_asked_to_stop()


@pytest.mark.parametrize("rank", [0, 2])
def test_interruption_of_one_rank_interrupts_all_in_the_same_rollout(
    rank: int, server: ForkServer, tmp_path: Path
) -> None:
    """The ranks then still exchange messages in the same order."""
    with Ranks(server, "shared", 3, tmp_path, "interrupt_sampling", {"rank": rank}) as ranks:
        found = ranks.results()
    assert len({tuple(steps) for steps, *_ in found}) == 1
    assert [together for *_, together in found] == [[0, 1, 2]] * 3
    other = "another part of the run was asked to stop while sampling"
    assert [text == other for _, text, _, _ in found] == [each != rank for each in range(3)]
    assert found[rank][2]


@pytest.mark.parametrize("rank", [0, 1])
def test_interruption_of_one_rank_while_states_are_restored_interrupts_all(
    rank: int, server: ForkServer, tmp_path: Path
) -> None:
    """A signal that arrives while workers load their envs is noticed by one rank first."""
    with Ranks(server, "shared", 2, tmp_path, "interrupt_loading", {"rank": rank}) as ranks:
        found = ranks.results()
    assert [together for _, together in found] == [[0, 1]] * 2
    assert found[rank][0] == "asked to stop while waiting for env workers"
    assert found[1 - rank][0] == "another part of the run was asked to stop while sampling"


@pytest.mark.parametrize("rank", [0, 2])
def test_error_in_a_call_reaches_the_leader_and_the_ranks_continue(
    rank: int, server: ForkServer, tmp_path: Path
) -> None:
    with Ranks(server, "shared", 3, tmp_path, "fail_in_calls", {"rank": rank}) as ranks:
        leader, *followers = ranks.results()
        name = "" if rank == 0 else f"rank 2 (pid {ranks.pids[2]} on host-shared): "
    key = ["KeyError", "'nothing'"] if rank == 0 else ["WorkerError", f"{name}KeyError: 'nothing'"]
    full = "[Errno 28] No space left on device"
    assert leader[::2] == [["OSError", name + full], ["DamagedReplay", f"{name}a file is missing."], key]
    assert leader[1::2] == [[0, 1, 2]] * 3
    assert followers == [[[0, 1, 2]] * 3] * 2


@pytest.mark.parametrize("failing", [[0], [2], [1, 2]])
def test_error_in_work_of_all_ranks_is_raised_in_all(failing: list[int], server: ForkServer, tmp_path: Path) -> None:
    with Ranks(server, "shared", 3, tmp_path, "fail_together", {"ranks": failing}) as ranks:
        found = ranks.results()
        name = f"rank {failing[0]} (pid {ranks.pids[failing[0]]} on host-shared)"
    for rank, text in enumerate(found):
        own = f"file {rank} is missing." if rank in failing else f"{name}: file {failing[0]} is missing."
        assert text == own


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_leader_calls_functions_of_all_ranks_between_rounds(kind: str, server: ForkServer, tmp_path: Path) -> None:
    with Ranks(server, kind, 3, tmp_path, "lead_and_follow") as ranks:
        leader, *followers = ranks.results()
    calls = [[f"{name} {rank}" for rank in range(3)] for name in ("round 0", "again", "round 1")]
    assert leader == [calls[0], calls[1], [0, -1, -2], calls[2], calls[1], [1, -1, -2], [3, [0], 1]]
    for rank, found in enumerate(followers, start=1):
        assert found == [[0, -1, -2], [1, -1, -2], [3, [rank], 1]]


def test_warnings_of_other_ranks_are_logged_once(server: ForkServer, tmp_path: Path) -> None:
    """Followers send their warnings to rank 0, and must not log those that they receive, or they send them again."""
    with Ranks(server, "shared", 3, tmp_path, "log_warnings", {"rounds": 8}) as ranks:
        leader, *followers = ranks.results()
    own = [f"warning: round {round} of rank 0" for round in range(8)]
    sent = [f"warning: rank {rank}: round {round} of rank {rank}" for round in range(8) for rank in (1, 2)]
    assert sorted(leader) == sorted(own + sent)
    assert followers == [[], []]


def test_group_in_one_process() -> None:
    group = LocalGroup(3)
    assert (group.count, group.local, group.gather("abc")) == (3, range(3), ["a", "b", "c"])
    for length in (4, 2, 4):
        for part, vector in enumerate(group.vectors(length)):
            vector[:] = float(part + 1)
        assert group.sum().tolist() == [6.0] * length
    for vector, value in zip(group.vectors(1), [2.0**24, 1.0, -(2.0**24)], strict=True):
        vector[:] = value
    assert group.sum().tolist() == [0.0], "2 ** 24 + 1 is not a float32 number, and is added first"
    group.serve("name", lambda argument: [f"{argument}{part}" for part in group.local])
    assert group.call("name", "part ") == ["part 0", "part 1", "part 2"]
    group.begin_round()
    assert (group.take_lines(), group.is_asked_to_stop()) == ([], False)
    group.ask_to_stop()
    assert group.is_asked_to_stop()
