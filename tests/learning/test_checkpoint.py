"""Tests of checkpoints: bit-equal after loading, complete or absent, and one sentence for each error."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollouts import make_agent, make_rollout
from safetensors.torch import load as tensors_from_bytes

from remuda.algorithms import PPO
from remuda.data.packing import pack, unpack
from remuda.errors import CheckpointError
from remuda.learning import checkpoint
from remuda.learning.checkpoint import (
    FORMAT,
    list_checkpoints,
    load,
    load_newest,
    parameters_hash,
    save,
)
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.tensor_file import DTYPES, safetensors
from remuda.replay.frames import FrameRing
from remuda.replay.ring import Row
from remuda.replay.ring_files import RingFiles

FILES = ("manifest.json", "state.json", "tensors.safetensors")
PROGRESS = {"steps": 1024, "rounds": 4, "episodes": 17}


def make_learner(seed: int = 0, shared: bool = False) -> Learner:
    agent = make_agent(seed=seed, shared=shared, normalize_obs=True)
    ppo = PPO(agent, 4, gamma=0.99, gae_lambda=0.95, clip_range=lambda progress: 0.2, normalize_reward=True)
    return Learner(ppo, OptimizerOptions(), lambda progress: 1e-2, 0.5)


def train(learner: Learner, rounds: int = 2) -> Learner:
    for seed in range(rounds):
        rollout = make_rollout(learner.algorithm.agent, seed=seed)
        learner.step(learner.prepare(rollout).flatten())
        learner.finish(rollout)
    return learner


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b) or {type(a), type(b)} == {list, tuple} or isinstance(a, dict)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("shared", [False, True], ids=["two nets", "shared"])
def test_loaded_learner_is_bit_equal_and_continues(tmp_path: Path, shared: bool) -> None:
    learner = train(make_learner(shared=shared))
    path = save(tmp_path, 1024, learner.state_dict(), PROGRESS)
    found = load(path)
    assert (found.path, found.step, found.progress, found.skipped) == (tmp_path / "step-1024", 1024, PROGRESS, [])
    assert_same(found.learner, learner.state_dict())
    other = make_learner(seed=5, shared=shared)
    other.load_state_dict(found.learner)
    train(learner)
    train(other)
    assert parameters_hash(learner.state_dict()) == parameters_hash(other.state_dict())


def test_every_kind_of_value_is_restored(tmp_path: Path) -> None:
    state = {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "integers": torch.tensor([[2**62, -1]]),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "brain": torch.randn(3).bfloat16(),
        "transposed": torch.randn(3, 4).T,
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        3: {"nested": [1, 2.5, "text", None, True, {7: torch.ones(1)}]},
        "a/b": {"c": torch.zeros(1)},
    }
    assert_same(load(save(tmp_path, 1, state, {})).learner, state)


def test_values_other_than_tensors_and_plain_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="/policy of a checkpoint is a object"):
        save(tmp_path, 1, {"policy": object()}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = save(tmp_path_factory.mktemp("pristine"), 12, train(make_learner()).state_dict(), PROGRESS, number=3)
    return {name: (path / name).read_bytes() for name in FILES}


def put(path: Path, contents: dict[str, bytes]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (path / name).write_bytes(data)
    return path


def assert_refused(path: Path, says: str = "is damaged") -> None:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"checkpoint {path} ")
    assert "is damaged" in message or "has format" in message
    assert says in message or "has format" in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_detected(tmp_path: Path, pristine: dict[str, bytes], name: str) -> None:
    """Flip the lowest bit of every manifest byte, which turns one digit into another, and a random bit in about a
    hundred bytes of each other file, including both ends."""
    data, rng = pristine[name], random.Random(0)
    every = range(len(data))
    places = every if name == "manifest.json" else [0, 1, 8, *rng.sample(every, 96), len(data) - 1]
    path = put(tmp_path / "step-12", pristine)
    load(path)
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 if name == "manifest.json" else 1 << rng.randrange(8)
        (path / name).write_bytes(flipped)
        assert_refused(path)


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_detected(tmp_path: Path, pristine: dict[str, bytes], name: str) -> None:
    path, data = put(tmp_path / "step-12", pristine), pristine[name]
    for length in sorted({0, 1, 8, len(data) // 2, len(data) - 1}):
        (path / name).write_bytes(data[:length])
        assert_refused(path)
    (path / name).write_bytes(data + b"\0")
    assert_refused(path)
    (path / name).unlink()
    assert_refused(path, name)


def test_error_names_another_format(tmp_path: Path, pristine: dict[str, bytes]) -> None:
    manifest = json.loads(pristine["manifest.json"])
    manifest["format"] = 99
    path = put(tmp_path / "step-12", {**pristine, "manifest.json": json.dumps(manifest).encode()})
    with pytest.raises(CheckpointError, match=f"has format 99 and this version of Remuda reads {FORMAT}"):
        load(path)


def test_damaged_newest_checkpoint_falls_back_to_the_previous_one(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (100, 200, 1000):
        save(checkpoints, step, {"weight": torch.tensor([float(step)])}, {"steps": step}, keep="all")
    assert load_newest(checkpoints).step == 1000  # compared as a number, not as text
    (checkpoints / "step-1000" / "tensors.safetensors").write_bytes(b"")
    found = load_newest(checkpoints)
    assert (found.step, found.progress, found.learner["weight"].tolist()) == (200, {"steps": 200}, [200.0])
    (sentence,) = found.skipped
    assert sentence.startswith(
        f"checkpoint {checkpoints / 'step-1000'} is damaged (tensors.safetensors does not match"
    )
    for step in (100, 200):
        (checkpoints / f"step-{step}" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .*run can be used; the newest: .*step-1000"):
        load_newest(checkpoints)


def test_missing_checkpoints_raise_one_sentence(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "never"):
        with pytest.raises(CheckpointError, match="holds no checkpoint yet: train it first"):
            load_newest(directory)


def steps_kept(directory: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(directory)]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("last", [60, 70]), ("all", [10, 20, 30, 40, 50, 60, 70]), ("3", [30, 60, 70]), ("5", [50, 60, 70])],
)
def test_checkpoints_that_are_kept(tmp_path: Path, keep: str, kept: list[int]) -> None:
    for number in range(1, 8):
        save(tmp_path, 10 * number, {}, {}, keep=keep, number=number)
    assert steps_kept(tmp_path) == kept


def test_old_damaged_manifest_does_not_prevent_saving(tmp_path: Path) -> None:
    save(tmp_path, 10, {}, {}, keep="2", number=1)
    (tmp_path / "step-10" / "manifest.json").write_bytes(b"\xff")
    for number in range(2, 6):
        save(tmp_path, 10 * number, {}, {}, keep="2", number=number)
    assert steps_kept(tmp_path) == [10, 20, 40, 50]


def test_latest_points_at_the_newest_and_survives_a_move(tmp_path: Path) -> None:
    checkpoints = tmp_path / "a" / "checkpoints"
    for step in (1, 2):
        save(checkpoints, step, {"x": torch.tensor(step)}, {})
        assert os.readlink(checkpoints / "latest") == f"step-{step}"
    (tmp_path / "a").rename(tmp_path / "b")
    assert load(tmp_path / "b" / "checkpoints" / "latest").learner["x"] == 2


def test_checkpoint_of_a_step_can_be_overwritten(tmp_path: Path) -> None:
    for value in (1, 2):
        save(tmp_path, 5, {"x": torch.tensor(value)}, {})
    assert load(tmp_path / "step-5").learner["x"] == 2


@pytest.mark.parametrize("dies_at", ["the old one is aside", "the old one is deleted"])
def test_process_killed_while_overwriting_a_step_leaves_one_checkpoint(tmp_path: Path, dies_at: str) -> None:
    """A complete checkpoint exists at every moment, because SIGKILL may follow another signal."""
    save(tmp_path, 5, {"x": torch.tensor(1)}, {})
    if (child := os.fork()) == 0:

        def die(*args: Any, **kwargs: Any) -> None:
            os._exit(9)

        if dies_at == "the old one is deleted":
            checkpoint.shutil.rmtree = lambda path, **_: die() if path.exists() else None  # type: ignore
        else:
            rename = Path.rename
            Path.rename = lambda path, to: rename(path, to) if path.name == "step-5" else die()  # type: ignore
        save(tmp_path, 5, {"x": torch.tensor(2)}, {})
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = 2 if dies_at == "the old one is deleted" else 1
    assert load_newest(tmp_path).learner["x"] == left, (
        "resuming reads the checkpoint before anything is written there"
    )
    checkpoint.sweep(tmp_path)
    assert load(tmp_path / "step-5").learner["x"] == left
    assert names(tmp_path) == {"step-5", "latest"}
    save(tmp_path, 5, {"x": torch.tensor(3)}, {})
    assert load(tmp_path / "latest").learner["x"] == 3


def test_only_directories_named_as_checkpoints_are_listed(tmp_path: Path) -> None:
    """Copies made by the user are neither listed nor deleted."""
    for step in (100, 200):
        save(tmp_path, step, {"x": torch.tensor(step)}, {})
    for name in ("step-200-best-1", "step-keep-200", "kept-step-200", ".replaced-step-200-1", "step-٣"):
        shutil.copytree(tmp_path / "step-100", tmp_path / name)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-100", "step-200"]
    assert load_newest(tmp_path).learner["x"] == 200
    for step in (300, 400):
        save(tmp_path, step, {"x": torch.tensor(step)}, {})
    assert {"step-200-best-1", "step-keep-200", "kept-step-200", "step-300", "step-400"} < names(tmp_path)
    assert "step-200" not in names(tmp_path)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("fails_at", range(4))
def test_full_disk_leaves_no_partial_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    save(tmp_path, 1, {"x": torch.zeros(3)}, {})
    calls, fsync = [], os.fsync

    def full(fd: int) -> None:
        calls.append(fd)
        if len(calls) == fails_at + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, 2, {"x": torch.ones(3)}, {})
    assert len(calls) == fails_at + 1
    assert names(tmp_path) == {"step-1", "latest"}
    assert load_newest(tmp_path).step == 1
    assert os.readlink(tmp_path / "latest") == "step-1"
    save(tmp_path, 2, {"x": torch.ones(3)}, {})
    assert names(tmp_path) == {"step-1", "step-2", "latest"}


def test_leftovers_of_a_killed_process_with_the_same_id_do_not_interfere(tmp_path: Path) -> None:
    """In a container, the resuming process often has the id of the killed one."""
    half = tmp_path / f".writing-{os.getpid()}-0"
    half.mkdir()
    (half / "state.json").write_text("{")
    save(tmp_path, 3, {"x": torch.zeros(1)}, {})
    assert load(tmp_path / "step-3").learner["x"] == 0
    checkpoint.sweep(tmp_path)
    assert names(tmp_path) == {"step-3", "latest"}


def _replace(path: Path, name: str, data: bytes) -> None:
    """Replace one file of a checkpoint and write a matching manifest, as an attacker would."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    del manifest["sha256"]
    manifest["sha256"] = checkpoint._manifest_sum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


class Canary:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_disguised_pickle_is_refused_and_not_executed(tmp_path: Path, pristine: dict[str, bytes], form: str) -> None:
    """The manifest has the right checksum, so only the reader of tensors can refuse the file."""
    canary, target = tmp_path / "canary", tmp_path / "step-12" / "tensors.safetensors"
    path = put(tmp_path / "step-12", pristine)
    if form == "pickle":
        target.write_bytes(pickle.dumps(Canary(canary)))
    else:
        torch.save({"weight": Canary(canary)}, target)
    data = target.read_bytes()
    _replace(path, target.name, data)
    assert_refused(path)
    assert not canary.exists()
    if form == "pickle":  # shows that unpickling would create the file
        pickle.loads(data)
        assert canary.exists()


HOSTILE = {
    "a header of 2^60 bytes": lambda path: _replace(
        path, "tensors.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"
    ),
    "a header of 50 MB": lambda path: _replace(
        path, "tensors.safetensors", (50_000_000).to_bytes(8, "little") + b" " * 50_000_000
    ),
    "a manifest of 10 GB": lambda path: os.truncate(path / "manifest.json", 10 << 30),
    "a state of 10 GB": lambda path: os.truncate(path / "state.json", 10 << 30),
    "tensors of 10 GB": lambda path: os.truncate(path / "tensors.safetensors", 10 << 30),
    "a state without end": lambda path: _replace(path, "state.json", b"[" * 1_000_000),
    "a state that names no tensor": lambda path: _replace(
        path, "state.json", b'{"learner": {"tensor": "../../etc/passwd"}, "progress": {}}'
    ),
    "a state of another kind": lambda path: _replace(path, "state.json", b"[1, 2]"),
    "a device": lambda path: _link(path / "state.json", "/dev/zero"),
    "a file elsewhere": lambda path: _link(path / "tensors.safetensors", "/etc/passwd"),
    "a directory": lambda path: ((path / "state.json").unlink(), (path / "state.json").mkdir()),
    "a pipe": lambda path: ((path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")),
}


def _link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_checkpoints_are_refused_quickly(tmp_path: Path, pristine: dict[str, bytes], how: str) -> None:
    path = put(tmp_path / "step-12", pristine)
    HOSTILE[how](path)
    tracemalloc.start()
    try:
        start = time.process_time()
        assert_refused(path)
        assert time.process_time() - start < 10.0, "seconds of CPU time"
        assert tracemalloc.get_traced_memory()[1] < 100_000_000, "peak memory in bytes"
    finally:
        tracemalloc.stop()


def share(directory: Path, *given: str) -> list[str]:
    """Create shared files that checkpoints can name."""
    (directory / "replay").mkdir(parents=True, exist_ok=True)
    for name in given:
        (directory / "replay" / name).write_bytes(b"rows")
    return list(given)


def test_shared_files_only_add_their_names_to_the_manifest(tmp_path: Path) -> None:
    for files in ([], share(tmp_path, "a", "b")):
        path = save(tmp_path, 1 + len(files), {"x": torch.zeros(1)}, {}, files=files)
        manifest = json.loads((path / "manifest.json").read_text())
        assert manifest.pop("replay", []) == files
        assert manifest.keys() == {"format", "step", "number", "files", "sha256"}
        assert manifest["format"] == FORMAT
        assert load(path).step == 1 + len(files)


def test_shared_files_are_deleted_with_the_last_checkpoint_that_names_them(tmp_path: Path) -> None:
    named = {1: "ab", 2: "bc", 3: "cd", 4: "de", 5: ""}
    left = {1: "abx", 2: "abcx", 3: "bcdx", 4: "cdex", 5: "dex"}
    share(tmp_path, "x")  # belongs to a checkpoint that is not written yet
    for number, needed in named.items():
        share(tmp_path, *set(needed) - names(tmp_path / "replay"))
        save(tmp_path, number, {}, {}, number=number, files=list(needed))
        assert names(tmp_path / "replay") == set(left[number])
    checkpoint.sweep(tmp_path)
    assert names(tmp_path / "replay") == {"d", "e"}


def test_overwritten_step_releases_the_files_it_named(tmp_path: Path) -> None:
    save(tmp_path, 1, {}, {}, keep="all", files=share(tmp_path, "a", "b", "c"))
    save(tmp_path, 2, {}, {}, keep="all", files=["b"])
    save(tmp_path, 1, {}, {}, keep="all", files=["c"])
    assert names(tmp_path / "replay") == {"b", "c"}


@pytest.mark.parametrize(("keep", "left"), [("all", "abcdefg"), ("last", "fg"), ("3", "cfg")])
def test_kept_checkpoints_keep_the_files_they_name(tmp_path: Path, keep: str, left: str) -> None:
    for number, name in enumerate("abcdefg", 1):
        save(tmp_path, 10 * number, {}, {}, keep=keep, number=number, files=share(tmp_path, name))
    assert names(tmp_path / "replay") == set(left)


@pytest.mark.parametrize("damage", ["unreadable", "gone", "another name"])
def test_checkpoint_with_an_unreadable_manifest_keeps_all_older_files(tmp_path: Path, damage: str) -> None:
    for number, name in enumerate("ab", 1):
        save(tmp_path, number, {}, {}, number=number, files=share(tmp_path, name))
    manifest = tmp_path / "step-2" / "manifest.json"
    if damage == "unreadable":
        manifest.write_bytes(b"\xff")
    elif damage == "gone":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text().replace('"b"', '"x"'))
    checkpoint.sweep(tmp_path)
    assert names(tmp_path / "replay") == {"a", "b"}
    for number, name in enumerate("cdefg", 3):
        save(tmp_path, number, {}, {}, keep="100", number=number, files=share(tmp_path, name))
        os.utime(tmp_path / "replay" / name, (time.time() + number, time.time() + number))
    told = damage == "another name"  # its number is readable, so it was deleted in its turn
    assert steps_kept(tmp_path) == ([6, 7] if told else [2, 6, 7])
    assert names(tmp_path / "replay") >= {"b", "f", "g"}
    checkpoint.sweep(tmp_path)
    assert names(tmp_path / "replay") == ({"f", "g"} if told else {"a", "b", "f", "g"})


def test_leftover_shared_files_of_a_killed_process_are_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1, {}, {}, files=share(tmp_path, "a"))
    share(tmp_path, "b", ".writing-1-2")
    checkpoint.sweep(tmp_path)
    assert names(tmp_path / "replay") == {"a"}
    (tmp_path / "step-1" / "manifest.json").unlink()
    os.utime(tmp_path / "step-1", (time.time() + 60, time.time() + 60))
    share(tmp_path, "b", ".writing-1-2")
    checkpoint.sweep(tmp_path)
    assert names(tmp_path / "replay") == {"a", "b"}, "the checkpoint without a manifest might need them"


def test_manifest_cannot_delete_files_elsewhere(tmp_path: Path) -> None:
    checkpoints, other = tmp_path / "checkpoints", tmp_path / "other"
    other.write_text("")
    for number in range(1, 5):
        save(checkpoints, number, {}, {}, number=number, files=[*share(checkpoints, str(number)), "../../other"])
    assert names(checkpoints / "replay") == {"3", "4"}
    assert other.exists()


def test_newest_checkpoint_is_kept_despite_damaged_ones_of_later_steps(tmp_path: Path) -> None:
    for number in range(1, 4):
        save(tmp_path, 100 * number, {}, {}, keep="100", number=number)
    for step in (200, 300):
        (tmp_path / f"step-{step}" / "state.json").write_bytes(b"")
    save(tmp_path, 150, {}, {}, keep="last", files=share(tmp_path, "a"))
    assert load_newest(tmp_path).step == 150
    assert names(tmp_path / "replay") == {"a"}


def example_ring() -> FrameRing:
    number = np.zeros((), np.float32)
    row = Row(np.zeros((2, 6, 6), np.uint8), np.zeros((), np.int64), number, number, np.zeros((), bool))
    return FrameRing(row, 50, 2, 2)


def train_for_ever(directory: Path, found: checkpoint.Checkpoint | None) -> None:
    """Append rows that contain their number, so that a restored ring can be verified, and save after each append."""
    os.fsync = lambda fd: None  # writes survive the death of their process, and fsync is slow
    ring, saved = example_ring(), RingFiles(directory / "replay")
    if found is not None:
        saved.read(ring, unpack(found.blobs["replay"]))
    for step in range(found.step + 1 if found else 1, 1_000_000):
        number = np.arange(7 * (step - 1), 7 * step + 1, dtype=np.float32)[:, None].repeat(2, 1)
        obs = number.astype(np.uint8)[:, :, None, None, None] + np.zeros((8, 2, 2, 6, 6), np.uint8)
        ones = np.ones((7, 2), np.float32)
        ring.append(Row(obs[:-1], ones.astype(np.int64), number[:-1], ones, ones.astype(bool)), obs[-1])
        blobs = {"replay": pack(saved.write(ring))}
        save(directory, step, {}, {}, number=step, blobs=blobs, files=saved.files)


def test_replay_is_consistent_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    draw, found, newest = random.Random(0), None, 0
    for kills in range(200):
        if kills >= 25 and newest > 10:  # a busy machine needs more attempts
            break
        child = os.fork()
        if child == 0:
            try:
                train_for_ever(tmp_path, found)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.01, 0.08) * (1 + kills // 25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not list_checkpoints(tmp_path):
            continue
        found = load_newest(tmp_path)
        assert found.skipped == []
        assert found.step >= newest
        newest = found.step
        ring = example_ring()
        RingFiles(tmp_path / "replay").read(ring, unpack(found.blobs["replay"]))
        assert ring.written[0] == 7 * newest
        row, env = ring.counters.locate(np.arange(ring.counters.count))
        taken = ring.take(row, env)
        assert taken.reward.tolist() == row.tolist()
        assert taken.obs[:, -1, 0, 0].tolist() == (row % 256).tolist()
        ring.close()
        checkpoint.sweep(tmp_path)
        named = [
            set(json.loads((path / "manifest.json").read_text())["replay"]) for path in list_checkpoints(tmp_path)
        ]
        assert names(tmp_path / "replay") == set().union(*named)
    else:
        pytest.fail("they wrote next to nothing meanwhile")


def test_parameters_hash_depends_on_every_bit_and_name() -> None:
    state = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor(3)}
    digest = parameters_hash(state)
    assert parameters_hash({"b": torch.tensor(3), "a": torch.tensor([1.0, 0.0])}) == digest
    assert parameters_hash({**state, "a": torch.tensor([1.0, -0.0])}) != digest
    assert parameters_hash({"a": state["a"], "c": state["b"]}) != digest


def test_tensors_of_every_dtype_are_readable_by_safetensors() -> None:
    tensors = {
        **{str(kind): torch.arange(7).to(kind) for kind in DTYPES},
        "a scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }
    read = tensors_from_bytes(b"".join(safetensors(tensors)))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name
