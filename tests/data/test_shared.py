"""Shared memory: all processes see the same bytes, it has no name, and it is freed with the last view."""

from __future__ import annotations

import array
import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remuda.data import SharedArrays
from remuda.data.shared import ALIGNMENT

LAYOUT = {"reward": ((3, 2), "float32"), "mask": ((3,), "bool"), "step": ((), "int64")}

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors through /proc")


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_arrays_have_the_shapes_of_the_layout_and_start_at_zero() -> None:
    with SharedArrays(LAYOUT) as shared:
        assert shared.layout == LAYOUT
        for name, (shape, dtype) in LAYOUT.items():
            assert (shared[name].shape, shared[name].dtype) == (shape, np.dtype(dtype))
            assert not shared[name].any()


@linux
def test_shared_memory_has_no_name() -> None:
    before = set(os.listdir("/dev/shm"))
    with SharedArrays({"big": ((1 << 16,), "float64")}) as shared:
        shared["big"][:] = 1.0
        assert set(os.listdir("/dev/shm")) <= before
        assert os.fstat(shared.fd).st_nlink == 0


def test_numpy_and_torch_see_the_same_bytes() -> None:
    with SharedArrays(LAYOUT) as shared:
        tensor = torch.from_numpy(shared["reward"])
        tensor[1, 1] = 4.5
        assert shared["reward"][1, 1] == 4.5
        shared["reward"][0, 0] = -1
        assert tensor[0, 0] == -1
        del tensor


def test_attached_view_is_closed_independently() -> None:
    ours = SharedArrays(LAYOUT)
    theirs = SharedArrays.attach(ours.fd, ours.layout)
    assert theirs.fd != ours.fd
    theirs["step"][...] = 7
    assert ours["step"] == 7
    theirs.close()
    ours["step"][...] = 8
    ours.close()


CHILD = """
import array, json, socket, sys
from remuda.data import SharedArrays

channel = socket.socket(fileno=int(sys.argv[1]))
channel.settimeout(30)
header, ancillary, _, _ = channel.recvmsg(4096, socket.CMSG_SPACE(4))
(_, _, raw), = ancillary
fd = array.array("i", raw)[0]
with SharedArrays.attach(fd, json.loads(header)) as theirs:
    theirs["reward"][:] += theirs["step"]
    theirs["mask"][1] = True
channel.sendall(str("torch" in sys.modules).encode())
"""


def test_another_process_sees_the_same_bytes_through_a_passed_descriptor() -> None:
    ours_end, theirs_end = socket.socketpair()
    ours_end.settimeout(60)
    with ours_end, theirs_end, SharedArrays(LAYOUT) as shared:
        shared["reward"][:] = np.arange(6).reshape(3, 2)
        shared["step"][...] = 10
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(theirs_end.fileno())], pass_fds=[theirs_end.fileno()]
        )
        theirs_end.close()  # so that recv returns if the child fails
        try:
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [shared.fd]))]
            ours_end.sendmsg([json.dumps(shared.layout).encode()], passed)
            imported_torch = ours_end.recv(16)
            assert child.wait(timeout=60) == 0
        finally:
            child.kill()
            child.wait(timeout=60)
        assert imported_torch == b"False"
        assert shared["reward"].tolist() == [[10, 11], [12, 13], [14, 15]]
        assert shared["mask"].tolist() == [False, True, False]


def test_memory_outlives_its_creator_while_another_view_maps_it() -> None:
    ours = SharedArrays(LAYOUT)
    ours["step"][...] = 3
    theirs = SharedArrays.attach(ours.fd, ours.layout)
    ours.close()
    assert theirs["step"] == 3
    theirs.close()


sizes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
layouts = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(sizes, st.sampled_from(["bool", "float32", "int64", "uint8"])), max_size=5
)


@given(layouts)
def test_arrays_are_aligned_to_cache_lines_and_do_not_overlap(layout: dict[str, tuple[tuple[int, ...], str]]) -> None:
    with SharedArrays(layout) as shared:
        for number, name in enumerate(layout, start=1):
            if shared[name].size:
                assert shared[name].ctypes.data % ALIGNMENT == 0
            shared[name][...] = number % 2
        for number, name in enumerate(layout, start=1):
            assert (shared[name] == number % 2).all()


def test_arrays_stay_usable_after_close() -> None:
    shared = SharedArrays(LAYOUT)
    held, tensor = shared["reward"], torch.from_numpy(shared["mask"])
    held[:] = 2
    shared.close()
    shared.close()
    assert held.sum() == 12
    tensor[0] = True
    with pytest.raises(KeyError):
        shared["reward"]


@linux
def test_mapping_is_freed_with_the_last_view() -> None:
    before = num_descriptors()
    shared = SharedArrays(LAYOUT)
    held = shared["reward"]
    shared.close()
    assert num_descriptors() > before
    del held
    assert num_descriptors() == before


@linux
def test_thousand_blocks_leak_no_descriptor() -> None:
    before = num_descriptors()
    for _ in range(1000):
        with SharedArrays(LAYOUT) as shared, SharedArrays.attach(shared.fd, LAYOUT):
            pass
    assert num_descriptors() == before


@linux
def test_refused_block_leaks_no_descriptor() -> None:
    with SharedArrays({"few": ((4,), "uint8")}) as small:
        before = num_descriptors()
        with pytest.raises(ValueError, match="has 64 bytes, and its layout needs 128"):
            SharedArrays.attach(small.fd, {"many": ((65,), "uint8")})
        with pytest.raises(ValueError, match="objects cannot be shared"):
            SharedArrays({"any": ((2,), "object")})
        with pytest.raises(OSError, match=r".+"):
            SharedArrays({"huge": ((1 << 62,), "uint8")})
        assert num_descriptors() == before


@linux
def test_descriptors_are_not_inheritable() -> None:
    with SharedArrays(LAYOUT) as shared, SharedArrays.attach(shared.fd, LAYOUT) as theirs:
        assert not os.get_inheritable(shared.fd)
        assert not os.get_inheritable(theirs.fd)


def test_systems_without_memfd_share_an_unlinked_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with SharedArrays(LAYOUT) as ours, SharedArrays.attach(ours.fd, LAYOUT) as theirs:
        assert list(tmp_path.iterdir()) == []
        theirs["reward"][2, 1] = 6
        assert ours["reward"][2, 1] == 6
