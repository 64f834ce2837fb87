"""Tests of runs that must give bit-equal parameters."""

import hashlib
from pathlib import Path

import pytest

import remuda

SMALL = {"n_steps": 16, "batch_size": 32, "n_epochs": 2}
ROUNDS = 20


def weights(run: remuda.Run) -> str:
    """Return the sha256 of parameters, normalization statistics and optimizer state of the last checkpoint."""
    return hashlib.sha256((run.path / "checkpoints/latest/tensors.safetensors").read_bytes()).hexdigest()


def train(tmp_path: Path, name: str, algo: str = "ppo", env: str = "CartPole-v1", **settings) -> remuda.Run:
    rows = SMALL["n_steps"] * 8 * ROUNDS
    options = {"steps": rows, "seed": 3, "quiet": True, "out": tmp_path / name, "eval": {"episodes": 0}}
    # IMPALA and APPO make two updates per round, each with half of the envs.
    of_algo = {"ppo": SMALL, "a2c": {"n_steps": 16}}
    options["algo"] = of_algo.get(algo, {"n_steps": 16, "batch_size": 4})
    options["sampler"] = {"envs": 8}
    for key, value in settings.items():
        options[key] = {**options[key], **value} if isinstance(options.get(key), dict) else value
    return remuda.train(algo, env, **options)


CASES = [("ppo", "CartPole-v1"), ("a2c", "CartPole-v1"), ("ppo", "Pendulum-v1"), ("ppo", "Acrobot-v1")]
CASES += [("impala", "CartPole-v1"), ("appo", "Pendulum-v1")]


@pytest.mark.parametrize(("algo", "env"), CASES)
def test_parallel_equals_serial_after_20_rounds(tmp_path, algo, env):
    serial = train(tmp_path, "serial", algo, env)
    parallel = train(tmp_path, "parallel", algo, env, scheme="parallel", sampler={"workers": 2})
    assert serial.result["updates"] == parallel.result["updates"] >= ROUNDS
    assert weights(serial) == weights(parallel)
    assert serial.result["episodes"] == parallel.result["episodes"]


def test_uneven_workers_do_not_change_the_run(tmp_path):
    serial = train(tmp_path, "serial")
    parallel = train(tmp_path, "parallel", scheme="parallel", sampler={"workers": 3})
    assert weights(serial) == weights(parallel)


# For the algorithms marked as long, the test above implies this under `parallel`.
@pytest.mark.parametrize(
    ("algo", "scheme"),
    [
        *((algo, "serial") for algo in ("ppo", "a2c", "impala", "appo")),
        ("ppo", "parallel"),
        *(pytest.param(algo, "parallel", marks=pytest.mark.long) for algo in ("a2c", "impala", "appo")),
    ],
)
def test_same_seed_twice(tmp_path, algo, scheme):
    first, second = (train(tmp_path, name, algo, scheme=scheme) for name in ("first", "second"))
    assert weights(first) == weights(second)
    assert metrics_without_time(first) == metrics_without_time(second)


def metrics_without_time(run: remuda.Run) -> list[dict]:
    import json

    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/fps", "time/time_elapsed")
    return [{k: v for k, v in line.items() if k not in timed and not k.startswith("limits/")} for line in lines]


def test_another_seed_gives_another_run(tmp_path):
    assert weights(train(tmp_path, "a", seed=1)) != weights(train(tmp_path, "b", seed=2))


def test_evaluation_checkpoints_and_logging_do_not_disturb_training(tmp_path):
    plain = train(tmp_path, "plain", log={"tensorboard": False}, checkpoint={"every": 0})
    busy = train(
        tmp_path,
        "busy",
        eval={"every": 256, "episodes": 3},
        checkpoint={"every": 256, "keep": "all"},
        log={"every": 128},
        callbacks=[lambda round: None],
    )
    assert weights(plain) == weights(busy)


def test_decorrelated_starts_are_the_same_in_every_process(tmp_path):
    serial = train(tmp_path, "serial", sampler={"decorrelate": 30})
    parallel = train(tmp_path, "parallel", scheme="parallel", sampler={"decorrelate": 30, "workers": 2})
    without = train(tmp_path, "without")
    assert weights(serial) == weights(parallel) != weights(without)


def test_training_preserves_generator_and_threads_of_the_caller(tmp_path):
    import torch

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    threads = torch.get_num_threads()
    train(tmp_path, "run", steps=256)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
