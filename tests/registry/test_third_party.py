"""Test examples/third_party.py, an algorithm in one file, by its path or a registered name, under every scheme."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from registering import forget_registered

import remuda

ROOT = Path(__file__).parents[2]
PATH = "examples.third_party:AdvantageWeighted"
WORKERS = {"envs": 8, "workers": 2, "inference": "workers"}
WAYS: dict[str, dict[str, Any]] = {
    "serial": {"scheme": "serial"},
    "parallel": {"scheme": "parallel", "sampler": {"envs": 8, "workers": 2}},
    "workers": {"scheme": "parallel", "sampler": WORKERS},
    "async": {"scheme": "async", "sampler": WORKERS, "eval": {"episodes": 2, "max_steps": 20, "cpu_fraction": 0.5}},
    "async, central": {"scheme": "async", "sampler": {**WORKERS, "inference": "central"}},
}


@pytest.fixture(scope="module", autouse=True)
def _examples_can_be_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield


def train(out: Path, way: str, name: str = PATH, **groups: Any) -> remuda.Run:
    options = {"eval": {"episodes": 0}, "log": {"tensorboard": False, "every": 1}, **WAYS[way], **groups}
    return remuda.train(name, "CartPole-v1", steps=1500, seed=5, out=out, quiet=True, **options)


def weights(run: remuda.Run) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in run.agent().parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_third_party_algorithm_trains_resumes_and_evaluates(way: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run", way, algo={"temperature": 0.7})
    assert run.result["updates"] >= 5
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["train/weight"] > 0 for line in lines if "train/loss" in line)
    assert "temperature: 0.7" in (run.path / "config.yaml").read_text()
    again = remuda.resume(run.path, steps=2200, quiet=True)
    assert again.result["steps"] >= 2200
    assert again.evaluate(episodes=1)["episodes"] == 1
    assert remuda.load(run.path).act(np.zeros(4, np.float32))[0] in (0, 1)


def test_synchronous_schemes_give_the_same_parameters(tmp_path: Path) -> None:
    runs = [train(tmp_path / way, way) for way in ("serial", "parallel", "workers")]
    for other in runs[1:]:
        assert all(map(torch.equal, weights(runs[0]), weights(other)))


def test_the_own_option_changes_the_parameters(tmp_path: Path) -> None:
    cold, warm = (
        weights(train(tmp_path / str(value), "serial", algo={"temperature": value})) for value in (0.1, 5.0)
    )
    assert not all(map(torch.equal, cold, warm))


@pytest.mark.parametrize("way", ["workers", "async"])
def test_a_name_registered_only_in_this_process_works_in_workers(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.third_party import AdvantageWeighted

    forget_registered(monkeypatch)
    remuda.register_algorithm("awr", AdvantageWeighted)
    run = train(tmp_path / "run", way, "awr")
    assert run.result["updates"] >= 5


def test_the_page_shows_the_file_and_counts_its_lines() -> None:
    code = (ROOT / "examples" / "third_party.py").read_text()
    page = (ROOT / "docs" / "extending.md").read_text()
    assert code.split('"""', 2)[2].strip() in [
        block.strip() for block in re.findall(r"```python\n(.*?)```", page, re.S)
    ]
    counted = re.search(r"`examples/third_party\.py`, (\d+) lines", page)
    assert counted is not None
    assert int(counted[1]) == len(code.splitlines())
