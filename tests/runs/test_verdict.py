"""Test the verdict about what limits a run, with runs that have one known bottleneck each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import remuda
from remuda.config.resolve import resolve_config
from remuda.core import derive_seed
from remuda.runs.verdict import remedies_for, verdict

COMMON = {"quiet": True, "log": {"tensorboard": False}, "eval": {"episodes": 0}, "checkpoint": {"every": 0}}
RUNS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "env": ("a2c", "Remuda/Mock-v0", 800, {"envs": {"kwargs": {"seconds": 0.003}}}),
    "inference": (
        "a2c",
        "Remuda/Mock-v0",
        512,
        {"sampler": {"envs": 1}, "algo": {"n_steps": 256}, "agent": {"hidden": (1024, 1024)}},
    ),
    "update": ("ppo", "Remuda/Mock-v0", 2048, {"algo": {"n_epochs": 20}}),
    "wait": (
        "a2c",
        "own_things:slow",
        800,
        {
            "scheme": "parallel",
            "sampler": {"envs": 8, "workers": 2},
            "envs": {"kwargs": {"seconds": 0.02, "only_seed": derive_seed(0, 0, 0)}},
        },
    ),
    "evaluation": ("a2c", "CartPole-v1", 800, {"eval": {"every": 1, "episodes": 20, "max_steps": 100}}),
}


@pytest.mark.parametrize("limit", RUNS)
def test_verdict_names_the_bottleneck_of_a_run(limit: str, tmp_path: Path) -> None:
    algo, env, steps, options = RUNS[limit]
    run = remuda.train(algo, env, steps=steps, out=tmp_path / "run", **{**COMMON, **options})
    assert run.result["limit"] == limit, run.result["time"]
    lines = (tmp_path / "run/log.txt").read_text()
    assert "limited by" in lines
    assert "would lift it" in lines


def sentence(limit: str, cores: int = 4, algo: str = "ppo", options: Any = None, **groups: Any) -> str:
    settings = {"algo": algo, "env": "CartPole-v1", "steps": 1000}
    groups |= {} if options is None else {"algo": options}
    scheme = groups.pop("scheme", "serial")
    groups["scheme"] = groups.pop("scheme_options", {})
    config = resolve_config({**settings, "scheme": scheme}, groups)[0]
    return verdict({limit: 3.0, "other": 1.0}, remedies_for(config, cores))[1]


def test_remedies_take_the_current_options_into_account() -> None:
    assert sentence("env") == (
        "limited by the envs, 75 % of the time: worker processes on all 4 cores (--scheme parallel) would lift it."
    )
    assert "a faster env" in sentence("env", cores=1)
    assert "--sampler.workers 4" in sentence("env", scheme="parallel", sampler={"workers": 2})
    assert "a faster env" in sentence("env", scheme="parallel", sampler={"workers": 4})
    assert "--sampler.inference workers" not in sentence("inference")
    assert "--sampler.inference workers" in sentence("inference", scheme="parallel")
    assert "--algo.n_epochs" in sentence("update")
    assert "--algo.n_epochs" not in sentence("update", algo="a2c")
    assert "--algo.n_epochs" not in sentence("update", algo="appo", options={"n_epochs": 1}), "one is the minimum"
    assert "--algo.n_epochs" in sentence("update", algo="appo", options={"n_epochs": 10})
    assert "--scheme.threads 4" in sentence("update")
    assert "--scheme.threads" not in sentence("update", cores=1)
    assert "--sampler.slots 2" in sentence("wait", scheme="parallel")
    assert "--sampler.slots" not in sentence("wait", scheme="parallel", sampler={"slots": 2})
    assert "--eval.every" in sentence("evaluation")
    for words in ("--sampler.slots", "--scheme serial"):
        assert words not in sentence("wait", scheme="parallel", sampler={"inference": "workers"}), (
            "the run would refuse these options"
        )
    apart = sentence("wait", algo="impala", scheme="async", sampler={"inference": "central"})
    assert "--sampler.slots" not in apart, "env groups take no turns under async"
    one = {"envs": 1}
    assert "more envs, and as many workers" in sentence("env", algo="dqn", scheme="async", sampler=one)
    six = {"envs": 6, "workers": 1}
    assert "--sampler.workers 3" in sentence("env", algo="dqn", scheme="async", sampler=six), "4 does not divide 6"
    assert "--checkpoint.every" in sentence("checkpoint")


def test_remedies_for_ranks_are_options_that_they_accept() -> None:
    def of_ranks(limit: str, cores: int = 4, ranks: int = 2, **sampler: int) -> str:
        return sentence(limit, cores, scheme="replicas", scheme_options={"ranks": ranks}, sampler=sampler)

    assert "more ranks (--scheme.ranks) or env workers in each (--sampler.workers)" in of_ranks("env")
    assert "a faster env" in of_ranks("env", ranks=4)
    assert "a faster env" in of_ranks("env", workers=2)
    for limit in ("env", "inference", "wait"):
        found = of_ranks(limit, workers=2)
        assert "--sampler.inference" not in found, "ranks refuse it"
        assert "--scheme serial" not in found
        assert "--scheme parallel" not in found
    assert "no workers for cheap envs (without --sampler.workers)" in of_ranks("wait", workers=2)
    parts = {"scheme_options": {"parts": 2}}
    assert "(--scheme replicas --scheme.ranks 2)" in sentence("env", **parts), "--scheme parallel has no parts"


def test_inference_in_workers_is_recommended_only_where_it_is_accepted() -> None:
    for limit in ("inference", "wait"):
        assert "--sampler.inference workers" in sentence(limit, scheme="parallel")
        assert "--sampler.inference" not in sentence(limit, scheme="parallel", sampler={"slots": 2})


def test_verdict_without_measured_times() -> None:
    assert verdict({}, {}) == ("nothing", "nothing was measured that could limit this run.")
    assert verdict({"other": 1.0}, {})[0] == "nothing"
