"""Test what is read from the environment variables of torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from remuda.errors import ConfigError
from remuda.torchrun import NAMES, Torchrun, launch_id, read_torchrun, refuse_many_processes

COMPLETE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "job 7", "TORCHELASTIC_RESTART_COUNT": "2"}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *ELASTIC):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def text_of_error() -> str:
    with pytest.raises(ConfigError) as caught:
        read_torchrun()
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("names", [[], ["WORLD_SIZE"], ["MASTER_ADDR", "MASTER_PORT"], list(ELASTIC)])
def test_process_that_torchrun_has_not_started(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other launchers set some of the variables, but neither RANK nor LOCAL_RANK."""
    set_all(monkeypatch, {name: {**COMPLETE, **ELASTIC}[name] for name in names})
    assert read_torchrun() is None


def test_complete_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, COMPLETE)
    assert read_torchrun() == Torchrun(rank=5, size=8, local_rank=1, address="node-0", port=29500, launch=launch_id())
    set_all(monkeypatch, ELASTIC)
    assert read_torchrun() == Torchrun(rank=5, size=8, local_rank=1, address="node-0", port=29500, launch=launch_id())


# --- launches -------------------------------------------------------------------------------------------------------

PRINT = [sys.executable, "-c", "from remuda.torchrun import launch_id; print(launch_id())"]


def printed(*command: str, **options: Any) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout.strip()


def test_launch_is_that_of_the_process_that_starts_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts every rank in a new session; a shell script may lie between torchrun and the rank."""
    set_all(monkeypatch, ELASTIC)
    first = printed(*PRINT, start_new_session=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert printed(*PRINT, start_new_session=True) == first
    assert printed("sh", "-c", '"$@"; true', "sh", *PRINT, start_new_session=True) == first
    other = "import subprocess, sys; subprocess.run(sys.argv[1:], start_new_session=True)"
    assert printed(sys.executable, "-c", other, *PRINT) != first, "another process has started it"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 8")
    assert printed(*PRINT, start_new_session=True) != first


def test_launch_of_another_program_than_torchrun_is_the_process() -> None:
    """Two runs from one shell must not count as one launch."""
    assert launch_id() == launch_id()
    assert printed(*PRINT) != printed(*PRINT)


@pytest.mark.parametrize("missing", NAMES)
def test_one_missing_variable_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {name: value for name, value in COMPLETE.items() if name != missing})
    present = ", ".join(name for name in NAMES if name != missing)
    assert text_of_error().startswith(f"{present} are set, as torchrun does, but not {missing}: ")


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_single_variable_of_torchrun(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    others = ", ".join(other for other in NAMES if other != name)
    assert text_of_error().startswith(f"{name} is set, as torchrun does, but not {others}: ")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "MASTER_ADDR"])
@pytest.mark.parametrize("value", ["", "one", "-1", "1.0", "0x1"])
def test_variables_that_are_not_numbers(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**COMPLETE, name: value})
    assert text_of_error().startswith(f"{name}={value}: torchrun sets numbers")


@pytest.mark.parametrize(("address", "port"), [("", "29500"), ("node-0", "0"), ("node-0", "65536"), ("n", "99999")])
def test_variables_that_name_no_host_and_port(address: str, port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**COMPLETE, "MASTER_ADDR": address, "MASTER_PORT": port})
    assert text_of_error().startswith(f"MASTER_ADDR={address} MASTER_PORT={port} is not a host name and a port")


@pytest.mark.parametrize(("rank", "local_rank", "size"), [(2, 0, 2), (3, 0, 2), (0, 1, 2), (0, 0, 0), (1, 2, 4)])
def test_variables_that_contradict_each_other(
    rank: int, local_rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, {**COMPLETE, "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(size)})
    expected = f"RANK={rank}, LOCAL_RANK={local_rank} and WORLD_SIZE={size} contradict each other"
    assert re.match(re.escape(expected), text_of_error())


def test_largest_ranks_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**COMPLETE, "RANK": "7", "LOCAL_RANK": "7"})
    found = read_torchrun()
    assert found is not None
    assert (found.rank, found.local_rank, found.size) == (7, 7, 8)


def test_schemes_of_one_process_are_refused_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_many_processes("serial")
    monkeypatch.setenv("RANK", "0")  # another program's variable
    refuse_many_processes("serial")
    set_all(monkeypatch, {**COMPLETE, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"})
    refuse_many_processes("serial")
    set_all(monkeypatch, COMPLETE)
    with pytest.raises(
        ConfigError, match=r"started 8 processes, and --scheme serial uses one: add --scheme replicas"
    ):
        refuse_many_processes("serial")
