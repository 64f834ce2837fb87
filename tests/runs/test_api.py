"""Test remuda.train, load, resume and Run. tests/docs runs the examples of the README."""

import json
import math
from pathlib import Path

import counting
import gymnasium
import numpy as np
import own_nets
import pytest
import yaml
from gymnasium.envs.classic_control import CartPoleEnv
from torch import nn

import remuda
from remuda.errors import CheckpointError, ConfigError
from remuda.learning.checkpoint import list_checkpoints, load_newest
from remuda.schemes.learning_round import torch_threads

ROWS = 32  # rows of a round: 8 steps of 4 envs
SMALL = {
    "algo": {"n_steps": 8, "batch_size": 16, "n_epochs": 2},
    "sampler": {"envs": 4},
    "eval": {"episodes": 0},
    "log": {"tensorboard": False},
    "quiet": True,
}


def train(out, env="CartPole-v1", rounds=3, algo="ppo", **settings):
    options = {**SMALL, "steps": rounds * ROWS * 9 // 10, "out": out}
    if algo == "a2c":
        options["algo"] = {"n_steps": 8}
    return remuda.train(algo, env, **{**options, **settings})


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread for `policy.act`: with small networks on a busy machine, more threads are many times slower."""
    with torch_threads(1):
        yield


def weights(run):
    return (run.path / "checkpoints/latest/tensors.safetensors").read_bytes()


def config_of(run):
    return yaml.safe_load((run.path / "config.yaml").read_text())


def cart_pole():
    return gymnasium.make("CartPole-v1")


class OwnCartPole(CartPoleEnv):
    """An env class, which is a callable that makes envs."""


class TestEnvs:
    @pytest.mark.parametrize(
        ("env", "scheme"),
        [
            ("counting:make", "serial"),
            (counting.make, "parallel"),
            (counting.CountingEnv, "parallel"),
            (counting.make, "serial"),
        ],
    )
    def test_an_env_with_an_import_path_is_stored_and_found_again(self, tmp_path, env, scheme):
        run = train(tmp_path / "run", env, scheme=scheme)
        assert run.result["status"] == "complete"
        assert config_of(run)["env"].startswith("counting:")
        again = remuda.Run(run.path).evaluate(episodes=2)
        assert again == run.evaluate(episodes=2)

    @pytest.mark.parametrize(
        "ways",
        [
            ("CartPole-v1", "gymnasium:CartPole-v1"),
            (cart_pole, lambda: gymnasium.make("CartPole-v1")),
        ],
        ids=["by name", "by callable"],
    )
    def test_two_ways_to_name_an_env_give_the_same_run(self, tmp_path, ways):
        assert len({weights(train(tmp_path / str(index), way)) for index, way in enumerate(ways)}) == 1

    def test_keyword_arguments_reach_the_env(self, tmp_path):
        run = train(tmp_path / "run", "counting:make", envs={"kwargs": {"lengths": [7]}})
        assert run.evaluate(episodes=2)["mean_length"] == 7
        run = train(tmp_path / "other", counting.make, envs={"kwargs": {"lengths": [6]}})
        assert remuda.Run(run.path).evaluate(episodes=2)["mean_length"] == 6

    def test_a_user_defined_env_class_is_stored_by_its_import_path(self, tmp_path):
        run = train(tmp_path / "run", OwnCartPole)
        assert config_of(run)["env"].endswith(":OwnCartPole")
        remuda.load(run.path).act(np.zeros(4))

    def test_an_env_made_by_a_lambda_must_be_passed_again(self, tmp_path):
        make = lambda: gymnasium.make("CartPole-v1")  # noqa: E731
        run = train(tmp_path / "run", make)
        assert run.evaluate(episodes=1)["episodes"] == 1, "the object that trained still has the lambda"
        for attempt in (
            remuda.Run(run.path).evaluate,
            lambda: remuda.resume(run.path),
        ):
            with pytest.raises(CheckpointError, match=r"has no import path: from Python, use remuda.*, env=\.\.\.\)"):
                attempt()
        steps = run.result["steps"]
        more = remuda.resume(run.path, steps=steps + 100, env=make, quiet=True)
        assert more.result["steps"] >= steps + 100
        assert remuda.load(run.path, env=make).act(np.zeros(4))[0] in (0, 1)

    def test_a_static_method_as_env_factory_must_be_passed_again(self, tmp_path):
        run = train(tmp_path / "run", counting.Outer.make)
        with pytest.raises(CheckpointError, match=r"use remuda.Run\(.*, env=Outer.make\)\.evaluate\(\)\.$"):
            remuda.Run(run.path).evaluate()
        remuda.Run(run.path, env=counting.Outer.make).evaluate(episodes=1)

    def test_an_env_other_than_that_of_the_run_is_refused(self, tmp_path):
        run = train(tmp_path / "run")
        with pytest.raises(CheckpointError, match=r"env=CartPole-v1, not counting:make"):
            remuda.resume(run.path, env=counting.make)
        assert config_of(run)["env"] == "CartPole-v1"
        nameless = train(tmp_path / "nameless", lambda: gymnasium.make("CartPole-v1"))
        with pytest.raises(CheckpointError, match="does not fit the env and net given") as caught:
            remuda.resume(nameless.path, steps=1000, env=lambda: gymnasium.make("Acrobot-v1"), quiet=True)
        assert "\n" not in str(caught.value)


class OwnNet(nn.Module):
    """A user-defined network."""

    def __init__(self, shape):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 16), nn.ReLU())

    def forward(self, obs):
        return self.body(obs)


class TestNets:
    @pytest.mark.parametrize("scheme", ["serial", "parallel"])
    def test_a_net_as_an_argument_or_by_its_path_gives_the_same_run(self, tmp_path, scheme):
        given = train(tmp_path / "given", net=own_nets.Net, scheme=scheme)
        named = train(tmp_path / "named", agent={"net": "own_nets:Net"}, scheme=scheme)
        assert weights(given) == weights(named)
        assert config_of(given)["options"]["agent"]["net"] == "own_nets:Net"
        assert remuda.Run(given.path).agent().policy_trunk.net.body[1].out_features == 32

    def test_a_net_of_this_module_is_found_again(self, tmp_path):
        run = train(tmp_path / "run", net=OwnNet)
        assert isinstance(remuda.load(run.path).agent.value_trunk.net, OwnNet)
        before = run.result
        more = remuda.resume(run.path, steps=before["steps"] + 10, quiet=True)
        assert more.result["updates"] > before["updates"]
        assert isinstance(more.agent().policy_trunk.net, OwnNet)

    def test_a_net_without_an_import_path_must_be_passed_again(self, tmp_path):
        make = lambda shape: own_nets.Net(shape)  # noqa: E731
        run = train(tmp_path / "run", net=make)
        with pytest.raises(
            CheckpointError, match=r"no import path: from Python, use remuda.load\(.*, net=\.\.\.\)\.$"
        ):
            remuda.load(run.path)
        assert remuda.load(run.path, net=make).act(np.zeros(4))[0] in (0, 1)
        with pytest.raises(CheckpointError, match="does not fit the env and net given"):
            remuda.load(run.path, net=OwnNet)

    def test_a_net_that_does_not_fit_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match=r"agent\.net=own_nets:BadNet does not fit .*\(4,\)"):
            train(tmp_path / "run", net=own_nets.BadNet)
        assert not (tmp_path / "run").exists()


class TestCallbacks:
    def test_callbacks_receive_every_round(self, tmp_path):
        seen, also = [], []
        run = train(tmp_path / "run", rounds=5, callbacks=[lambda round: seen.append(round), also.append])
        assert [len(seen), len(also)] == [seen[-1].progress.rounds] * 2
        assert len(seen) == run.result["updates"] / 4  # two epochs of two minibatches
        assert all(isinstance(round, remuda.Round) for round in seen)
        assert sum(len(round.episodes) for round in seen) == run.result["episodes"]
        assert all("train/loss" in round.metrics for round in seen)

    def test_a_run_stopped_by_a_callback_can_be_resumed(self, tmp_path):
        steps = []
        count = lambda round: steps.append(round.progress.steps)  # noqa: E731

        def stop(round):
            return round.progress.rounds == 2

        run = train(tmp_path / "run", rounds=50, callbacks=[stop, count])
        assert len(steps) == 2, "callbacks after the one that stops the run receive the round too"
        result = run.result
        assert result["status"] == "stopped by callback"
        assert result["steps"] == steps[-1] < 50 * ROWS
        assert load_newest(run.path / "checkpoints").step == steps[-1]
        more = remuda.resume(run.path, steps=steps[-1] + 2 * ROWS, quiet=True, callbacks=[count])
        assert more.result["status"] == "complete"
        assert steps[2] > steps[1]

    def test_the_run_continues_after_false_or_none(self, tmp_path):
        run = train(tmp_path / "run", callbacks=[lambda round: None, lambda round: False, lambda round: 0])
        assert run.result["status"] == "complete"

    def test_an_error_in_a_callback_propagates_and_releases_the_lock(self, tmp_path):
        def broken(round):
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            train(tmp_path / "run", callbacks=[broken], scheme="parallel", checkpoint={"every": 1})
        assert remuda.resume(tmp_path / "run", quiet=True).result["status"] == "complete", "the lock was released"


class TestResume:
    def test_resuming_with_more_steps_continues_counts_and_metrics(self, tmp_path):
        run = train(tmp_path / "run")
        before = run.result
        assert remuda.resume(run.path, steps=before["steps"] + 3 * ROWS, quiet=True).path == run.path
        after = run.result
        assert after["status"] == "complete"
        assert before["steps"] + 3 * ROWS <= after["steps"] <= before["steps"] + 5 * ROWS
        assert after["updates"] >= before["updates"] + 3 * 4
        assert after["episodes"] > before["episodes"]
        assert config_of(run)["steps"] == before["steps"] + 3 * ROWS
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        for tag in ("time/total_timesteps", "time/iterations", "train/n_updates"):
            values = [line[tag] for line in lines]
            assert values == sorted(set(values)), tag
        assert lines[-1]["rollout/episodes"] == after["episodes"]

    def test_resuming_a_complete_run_changes_nothing(self, tmp_path):
        run = train(tmp_path / "run")
        before, tensors = run.result, weights(run)
        again = remuda.resume(run.path, quiet=True)
        assert {k: again.result[k] for k in ("status", "steps", "updates")} == {
            k: before[k] for k in ("status", "steps", "updates")
        }
        assert weights(again) == tensors

    def test_two_resumes_of_the_same_checkpoint_are_equal(self, tmp_path):
        """Both copies of a stopped run continue from the same state, including that of the optimizer."""
        stopped = train(tmp_path / "stopped", rounds=6, callbacks=[lambda round: round.progress.rounds == 3])
        left = stopped.result["updates"]
        states = []
        for _ in range(2):
            import shutil

            copy = tmp_path / f"copy-{len(states)}"
            shutil.copytree(stopped.path, copy, symlinks=True)
            run = remuda.resume(copy, quiet=True)
            states.append(weights(run))
            assert run.result["updates"] > left
        assert states[0] == states[1], "two resumes of the same checkpoint are the same run"

    def test_a_resumed_run_accepts_only_options_that_may_change(self, tmp_path):
        run = train(tmp_path / "run")
        remuda.resume(
            run.path, steps=run.result["steps"] + 1, quiet=True, log={"every": 1}, checkpoint={"keep": "all"}
        )
        stored = config_of(run)["options"]
        assert stored["log"]["every"] == 1
        assert stored["checkpoint"]["keep"] == "all"
        with pytest.raises(CheckpointError, match=r"algo\.n_epochs=2, not 3"):
            remuda.resume(run.path, algo={"n_epochs": 3})
        with pytest.raises(ConfigError, match="nonsense is not a group"):
            remuda.resume(run.path, nonsense={"a": 1})
        with pytest.raises(ConfigError, match="did you mean hidden"):
            remuda.resume(run.path, agent={"hiden": 1})

    @pytest.mark.parametrize(
        "same",
        [
            {"agent": {"hidden": (64, 64)}},
            {"agent": {"hidden": "64,64", "shared": "no"}},
            {"algo": {"n_steps": "8"}},
        ],
    )
    def test_a_resumed_run_accepts_the_same_value_in_another_notation(self, tmp_path, same):
        run = train(tmp_path / "run", rounds=1)
        assert remuda.resume(run.path, quiet=True, **same).result["status"] == "complete"


class TestSettings:
    def test_scheme_as_a_mapping(self, tmp_path):
        run = train(tmp_path / "run", rounds=1, scheme={"name": "serial", "threads": 2})
        stored = config_of(run)
        assert stored["scheme"] == "serial"
        assert stored["options"]["scheme"]["threads"] == 2

    def test_groups_that_are_not_mappings_are_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="eval=5 is not a mapping"):
            train(tmp_path / "run", eval=5)
        with pytest.raises(ConfigError, match="did you mean algo"):
            train(tmp_path / "run", algos={})

    def test_a2c_takes_one_gradient_of_each_rollout(self, tmp_path):
        rounds = []
        run = train(tmp_path / "run", algo="a2c", rounds=4, callbacks=[rounds.append])
        assert run.result["updates"] == len(rounds)

    def test_the_last_checkpoint_has_the_number_of_steps_of_the_result(self, tmp_path):
        run = train(tmp_path / "run")
        assert [path.name for path in list_checkpoints(run.path / "checkpoints")] == [f"step-{run.result['steps']}"]
        assert isinstance(run.path, Path)
