"""Test bench/fingerprints.py: fingerprints are reproducible, differ between runs, and are compared correctly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import fingerprint_job
import fingerprints
import row_accounting
from row_accounting_names import COUNTS


def run(name: str, directory: Path, seed: int) -> dict[str, Any]:
    return fingerprint_job.run_case(fingerprint_job.CASES[name], 4, directory, seed)


def test_fingerprint_is_reproducible_and_unchanged_by_a_resume(tmp_path: Path) -> None:
    name = "ppo/cartpole/serial/feedforward"
    first, second, other = (run(name, tmp_path / str(number), seed) for number, seed in enumerate((3, 3, 4)))
    assert first == second
    assert first["whole"] == first["resumed"]
    assert first["whole"]["rounds"] == 4
    assert first["whole"]["updates"] == 16
    for part in ("parameters", "optimizers"):
        assert first["whole"][part] != other["whole"][part]


def test_the_fast_path_can_be_turned_off(tmp_path: Path) -> None:
    """The fast path rounds differently, so different fingerprints show that the option has an effect."""
    names = ("sac/pendulum/serial/feedforward", "sac/pendulum/serial/feedforward/fast-path-off")
    on, off = (run(name, tmp_path / str(number), 3) for number, name in enumerate(names))
    assert on["whole"]["updates"] == off["whole"]["updates"] > 0
    assert on["whole"]["parameters"] != off["whole"]["parameters"]


def test_fingerprint_depends_on_dtype_shape_and_order_but_not_on_names() -> None:
    class Learner:
        optimizers: dict[str, Any] = {}  # noqa: RUF012

        def __init__(self, **parameters: torch.Tensor) -> None:
            self.parameters, self.version = {"agent": list(parameters.values())}, 0

        def state_dict(self) -> dict[str, Any]:
            return {"algorithm": self.parameters, "version": 0}

    def found(**parameters: torch.Tensor) -> str:
        return fingerprint_job.fingerprint(Learner(**parameters))["parameters"]

    a, b = torch.zeros(2, 3), torch.ones(3)
    assert found(a=a, b=b) == found(x=a.clone(), y=b.clone())
    different = [found(a=a, b=b), found(b=b, a=a), found(a=a.T, b=b), found(a=a.double(), b=b), found(a=a, b=-b)]
    assert len(set(different)) == len(different)


def test_cases_cover_every_algorithm_in_every_form() -> None:
    parts = [name.split("/") for name in fingerprint_job.CASES]
    algorithms = {"ppo", "a2c", "impala", "appo", "dqn", "rainbow", "r2d1", "ddpg", "td3", "sac"}
    assert {part[0] for part in parts} == algorithms
    for algo in algorithms:
        assert {part[2] for part in parts if part[0] == algo} == {"serial", "parallel", "workers"}
        memory = {part[3] for part in parts if part[0] == algo}
        assert memory == ({"recurrent"} if algo == "r2d1" else {"feedforward", "recurrent"})


@pytest.mark.parametrize("kind", ["prioritized-td-error", "sequences-frames", "buffer-prioritized"])
def test_row_accounting_is_reproducible(kind: str, tmp_path: Path) -> None:
    first, second, other = (
        row_accounting.play(f"{kind}-{seed}", tmp_path / str(number), 120) for number, seed in enumerate((0, 0, 1))
    )
    assert first == second
    assert first["sha256"] != other["sha256"]
    if not kind.startswith("buffer"):
        last = first["lines"][-1]
        assert [count for count in COUNTS if last[count] is None] == [], "names are missing"
        assert {"write", "die", "lose", "sync", "commit", "batches", "save", "resume"} <= {
            line["event"] for line in first["lines"]
        }
        assert last["draws"] > 0


def test_a_dead_writer_has_begun_more_rows_than_it_wrote(tmp_path: Path) -> None:
    lines = row_accounting.play("uniform-1", tmp_path, 120)["lines"]
    died = [line for line in lines if line["event"] == "die" and line["result"] == "died"]
    assert died
    assert all(line["begun"][line["group"]] == line["written"][line["group"]] + line["rows"] for line in died)


def test_differences_are_listed() -> None:
    base: dict[str, Any] = {"whole": {"parameters": "a", "steps": 3}, "lines": [{"draws": 1}, {"draws": 2}, {}]}
    new: dict[str, Any] = {"whole": {"parameters": "b", "steps": 3}, "lines": [{"draws": 1}, {"draws": 4}]}
    assert fingerprints.status(base, {**base, "seconds": 2.0}) == fingerprints.EQUAL
    assert fingerprints.status(base, new) == fingerprints.DIFFERENT
    assert fingerprints.status(base, {"error": "E"}) == fingerprints.ONLY_BASE
    assert fingerprints.status({"error": "E"}, new) == fingerprints.ONLY_NEW
    assert fingerprints.status({"error": "E"}, {"error": "E"}) == fingerprints.FAILED
    assert list(fingerprints.differences(base, new)) == [
        "whole.parameters: a in base, b in new",
        "lines[1].draws: 2 in base, 4 in new",
    ]


def test_arrays_are_found_in_any_tree() -> None:
    tree = {"a": [torch.zeros(1), None], "b": (np.ones(2), {"c": torch.ones(3)}), "d": 3}
    assert [array.shape for array in fingerprint_job.arrays_in(tree)] == [(1,), (2,), (3,)]
