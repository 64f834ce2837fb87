"""Tests of weights in shared memory and files: versions, consistent copies, and cleanup."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remuda.learning.weights import FileWeights, LocalWeights, SharedWeights
from remuda.nets import RunningMoments

torch.set_num_threads(1)  # more threads are many times slower on arrays this small when the machine is busy


class Net(nn.Module):
    """A module with parameters of several shapes, a scalar, and buffers of other dtypes."""

    def __init__(self, size: int = 7) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 3)
        self.scale = nn.Parameter(torch.zeros(()))
        self.moments = RunningMoments((2,))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(4), persistent=False)

    def fill(self, number: float) -> None:
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(number)


def numbers(net: nn.Module) -> set[float]:
    """Return the extreme values of all tensors: a single number if the copy is consistent."""
    return {value for tensor in net.state_dict().values() for value in (tensor.min().item(), tensor.max().item())}


@pytest.fixture
def pair() -> Iterator[tuple[Net, SharedWeights, Net, SharedWeights]]:
    mine, other = Net(), Net()
    mine.fill(1.0)
    ours = SharedWeights(mine, version=5)
    theirs = SharedWeights(other, fd=ours.fd)
    yield mine, ours, other, theirs
    theirs.close()
    ours.close()


def test_local_weights_hold_only_a_version() -> None:
    weights = LocalWeights(3)
    assert weights.pull(have=-1) == 3
    weights.publish(4)
    assert weights.pull(have=3) == 4
    weights.close()


def test_initial_weights_can_be_pulled_at_once(pair: Any) -> None:
    _, _, other, theirs = pair
    assert theirs.pull(have=-1) == 5
    assert numbers(other) == {1.0}


def test_pull_copies_only_newer_weights(pair: Any) -> None:
    mine, ours, other, theirs = pair
    assert theirs.pull(have=-1) == 5
    other.fill(9.0)
    assert theirs.pull(have=5) == 5
    assert numbers(other) == {9.0}, "pulling the same version copies nothing"
    mine.fill(2.0)
    assert theirs.pull(have=-1) == 5
    assert numbers(other) == {1.0}, "changed weights are not published yet"
    ours.publish(6)
    assert theirs.pull(have=5) == 6
    assert numbers(other) == {2.0}
    mine.fill(3.0)
    other.fill(9.0)
    assert theirs.pull(have=6) == 6
    assert numbers(other) == {9.0}


def test_versions_may_skip_numbers_and_decrease(pair: Any) -> None:
    mine, ours, other, theirs = pair
    have = -1
    for version in (6, 7, 100, 40, 41, 42):
        mine.fill(float(version))
        ours.publish(version)
        have = theirs.pull(have)
        assert (have, numbers(other)) == (version, {float(version)})


def test_several_publications_between_two_pulls(pair: Any) -> None:
    mine, ours, other, theirs = pair
    for version in range(6, 11):
        mine.fill(float(version))
        ours.publish(version)
    assert theirs.pull(have=5) == 10
    assert numbers(other) == {10.0}


def test_buffers_keep_their_dtype(pair: Any) -> None:
    """Running statistics are float64: rounded to float32, inputs of samplers would differ from the learner's."""
    mine, ours, other, theirs = pair
    exact = 1.0 + 2.0**-40
    mine.moments.mean.fill_(exact)
    mine.count.fill_(2**53 + 1)
    ours.publish(6)
    theirs.pull(have=5)
    assert other.moments.mean.dtype == torch.float64
    assert other.moments.mean.tolist() == [exact, exact]
    assert other.count.tolist() == [2**53 + 1] * 2
    assert not other.passing.any()


def test_pull_writes_into_the_module_and_leaves_gradients_alone(pair: Any) -> None:
    _, _, other, theirs = pair
    before = {name: parameter.data_ptr() for name, parameter in other.named_parameters()}
    theirs.pull(have=-1)
    assert {name: parameter.data_ptr() for name, parameter in other.named_parameters()} == before
    assert all(parameter.requires_grad and parameter.grad is None for parameter in other.parameters())
    other.layer(torch.ones(1, 7)).sum().backward()
    assert other.layer.weight.grad is not None


def read_until(fd: int, size: int, last: int) -> int:
    """Pull as fast as possible, assert that every copy is consistent, and return the number of versions seen."""
    net = Net(size)
    weights = SharedWeights(net, fd=fd)
    have, pulls = -1, 0
    deadline = time.monotonic() + 60
    while have < last:
        assert time.monotonic() < deadline
        before, have = have, weights.pull(have)
        assert have >= before
        if have > before:
            pulls += 1
            assert numbers(net) == {float(have)}
    weights.close()
    return pulls


def test_reader_in_another_process_never_keeps_an_inconsistent_copy() -> None:
    size, last = 5000, 4000
    mine = Net(size)
    mine.fill(0.0)
    ours = SharedWeights(mine, version=0)
    from_reader, to_parent = os.pipe()
    pid = os.fork()
    if pid == 0:  # pytest must not run in the child
        said = b"failed"
        try:
            said = str(read_until(ours.fd, size, last)).encode()
        finally:
            os.write(to_parent, said)
            os._exit(0)
    os.close(to_parent)
    for version in range(1, last + 1):
        mine.fill(float(version))
        ours.publish(version)
        if version % 50 == 0:
            time.sleep(0.001)  # gives the reader a turn on a machine with one core
    said = os.read(from_reader, 100).decode()
    os.close(from_reader)
    os.waitpid(pid, 0)
    ours.close()
    assert said != "failed"
    assert int(said) > 20, "the reader pulled while weights were published"


def test_copy_that_is_overwritten_meanwhile_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test publishes in the middle of a copy, which otherwise happens only if the reader is descheduled."""
    mine, other = Net(), Net()
    mine.fill(1.0)
    ours = SharedWeights(mine, version=1)
    theirs = SharedWeights(other, fd=ours.fd)
    copied = torch.Tensor.copy_
    passed = []

    def copy_slowly(target: Any, source: Any) -> Any:
        out = copied(target, source)
        if target.data_ptr() == other.scale.data_ptr() and len(passed) < 3:
            passed.append(target.item())
            monkeypatch.setattr(torch.Tensor, "copy_", copied)
            for _ in range(2):  # overwrites both copies in shared memory
                mine.fill(mine.scale.item() + 1)
                ours.publish(int(mine.scale.item()))
            monkeypatch.setattr(torch.Tensor, "copy_", copy_slowly)
        return out

    monkeypatch.setattr(torch.Tensor, "copy_", copy_slowly)
    assert theirs.pull(have=-1) == 7
    monkeypatch.undo()
    assert passed == [1.0, 3.0, 5.0]
    assert numbers(other) == {7.0}
    theirs.close()
    ours.close()


def test_module_of_another_size_is_refused() -> None:
    ours = SharedWeights(Net(2))
    with pytest.raises(ValueError, match="it belongs to other arrays"):
        SharedWeights(Net(2000), fd=ours.fd)
    ours.close()


def test_close_leaves_no_descriptor_or_mapping() -> None:
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    mine = Net()
    ours = SharedWeights(mine)
    theirs = SharedWeights(Net(), fd=ours.fd)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    mappings = Path("/proc/self/maps")
    assert "memfd:remuda" in mappings.read_text()
    theirs.close()
    ours.close()
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert "memfd:remuda" not in mappings.read_text()
    ours.close()  # a second close has no effect
    mine.fill(4.0)  # the module stays usable
    assert numbers(mine) == {4.0}


def test_file_holds_the_newest_weights_and_is_read_once_per_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = Net(), Net()
    mine.fill(1.0)
    ours, theirs = FileWeights(mine, tmp_path / "weights", version=5), FileWeights(other, tmp_path / "weights")
    assert theirs.pull(have=-1) == 5
    assert numbers(other) == {1.0}
    monkeypatch.setattr("remuda.learning.weights.load", None)  # a version that was read is not read again
    assert theirs.pull(have=5) == 5
    monkeypatch.undo()
    mine.fill(2.0)
    assert theirs.pull(have=5) == 5
    assert numbers(other) == {1.0}, "changing the module publishes nothing"
    ours.publish(9)
    assert theirs.pull(have=5) == 9
    assert numbers(other) == {2.0}
    assert os.listdir(tmp_path) == ["weights"]
    ours.close()
    theirs.close()


def test_weights_files_are_never_inconsistent(tmp_path: Path) -> None:
    """One process publishes and another one reads, both as fast as possible."""
    path = tmp_path / "weights"
    mine, other = Net(300), Net(300)
    mine.fill(0.0)
    ours, theirs = FileWeights(mine, path, version=0), FileWeights(other, path)
    if (child := os.fork()) == 0:
        end, number = time.monotonic() + 60, 0
        while time.monotonic() < end:
            number += 1
            mine.fill(float(number))
            ours.publish(number)
        os._exit(1)
    seen, have, end = set(), -1, time.monotonic() + 1
    while time.monotonic() < end or len(seen) <= 3:
        have = theirs.pull(have)
        (number,) = numbers(other)
        assert number == have
        seen.add(have)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child was still publishing"


def test_file_with_channels_last_weights_and_shared_layers(tmp_path: Path) -> None:
    """Convolution weights are not contiguous in memory, and one tensor has two names."""

    def make() -> nn.Module:
        shared = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        return nn.ModuleDict({"policy": shared, "value": shared})

    mine, other = make(), make()
    FileWeights(mine, tmp_path / "weights", version=5)
    assert FileWeights(other, tmp_path / "weights").pull(-1) == 5
    for name, tensor in mine.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    assert not other["policy"].weight.is_contiguous(), "the target keeps its memory format"


def test_file_is_unchanged_if_writing_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(2, 2)
    ours = FileWeights(net, tmp_path / "weights.safetensors", version=1)
    theirs = FileWeights(nn.Linear(2, 2), tmp_path / "weights.safetensors")
    (tmp_path / ".writing-weights.safetensors").mkdir()  # nothing can be written there
    for version in (2, 3):
        ours.publish(version)
    assert theirs.pull(-1) == 1
    assert len(caplog.messages) == 1, "the failure is logged once"
    assert "weights of update 2 were not written" in caplog.messages[0]
    (tmp_path / ".writing-weights.safetensors").rmdir()
    ours.publish(4)
    assert theirs.pull(1) == 4
    with pytest.raises(OSError, match="No such file"):
        FileWeights(net, tmp_path / "nowhere" / "weights.safetensors", version=1)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_buffer_replaced_by_another_tensor_is_published_too(tmp_path: Path, kind: str) -> None:
    ours, theirs = Net(), Net()
    path = tmp_path / "weights.safetensors"
    mine: Any = SharedWeights(ours) if kind == "memory" else FileWeights(ours, path, 0)
    other: Any = SharedWeights(theirs, fd=mine.fd) if kind == "memory" else FileWeights(theirs, path)
    assert other.pull(-1) == 0
    name, buffer = next(iter(ours.named_buffers()))
    where, _, last = name.rpartition(".")
    setattr(ours.get_submodule(where), last, buffer + 5)
    setattr(theirs.get_submodule(where), last, buffer.clone())
    mine.publish(1)
    assert other.pull(0) == 1
    assert torch.equal(dict(theirs.named_buffers())[name], buffer + 5)
    for weights in (mine, other):
        weights.close()


def test_invitation_holds_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message, _ = FileWeights(Net(), Path("weights.safetensors"), 0).invitation()
    assert Path(message["weights"]) == tmp_path / "weights.safetensors"


def test_version_that_is_published_again_is_pulled_again(pair: Any) -> None:
    """Statistics change in rounds without an update too."""
    mine, ours, other, theirs = pair
    ours.publish(3)
    assert theirs.pull(-1) == 3
    mine.fill(7.0)
    ours.publish(3)
    assert theirs.pull(3) == 3
    assert numbers(other) == {7.0}
    other.fill(1.0)
    assert theirs.pull(3) == 3
    assert numbers(other) == {1.0}, "unchanged weights are not copied again"
