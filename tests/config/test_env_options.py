"""Test the options of envs and samplers: their parsing, their effects, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import counting
import msgspec
import numpy as np
import pytest
import torch
import yaml
from rollouts import make_agent, make_rollout

import remuda
from remuda.build.algorithm import make_algorithm
from remuda.build.blueprint import make_blueprints
from remuda.build.envs import agent_view, make_some_envs
from remuda.build.nets import find_net
from remuda.build.recipe import make_recipe
from remuda.build.workers import SamplerWorker, make_worker_sampler
from remuda.config.fields import MOST_SEEDS, parse_seeds
from remuda.config.resolve import resolve_config
from remuda.config.run_config import from_dict, to_dict
from remuda.core import Clock, derive_seed
from remuda.envs import LocalEnvs, make_envs, resolve
from remuda.errors import ConfigError, EnvSpecError
from remuda.runs.evaluation import eval_episodes, eval_seed, play_episodes

torch.set_num_threads(1)  # with small networks on a busy machine, more threads are many times slower
Groups = Mapping[str, Mapping[str, Any]]
QUIET = {"log": {"tensorboard": False}, "quiet": True}


def resolved(groups: Groups, env: Any = "counting:make", algo: str = "ppo", **settings: Any) -> Any:
    small: dict[str, Any] = {"algo": {"n_steps": 8}, "sampler": {"envs": 4}}
    if algo == "ppo":
        small["algo"]["batch_size"] = 32
    merged = {group: {**small.get(group, {}), **groups.get(group, {})} for group in {*small, *groups}}
    make = None if isinstance(env, str) else env
    named = {"env": env} if make is None else {}
    return resolve_config({"algo": algo, **named, **settings}, merged, env=make)


# --- seeds of training and of evaluation ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("7", [7]),
        ("0-3,7", [0, 1, 2, 3, 7]),
        (" 3, 5 ,8 ", [3, 5, 8]),
        ("4-4", [4]),
        ("5,5", [5, 5]),
        ("10-12,0-1", [10, 11, 12, 0, 1]),
    ],
)
def test_lists_of_seeds_are_parsed(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text, "envs.seeds") == seeds


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "3-", "-3", "5-2", "1,,2", "1.5", "1-2-3", "0x1", "1;2"),
        "²",
    ],
)
@pytest.mark.parametrize("group", ["envs", "eval"])
def test_an_invalid_list_of_seeds_is_refused_in_one_sentence(text: str, group: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved({group: {"seeds": text}})
    assert str(caught.value) == (
        f"{group}.seeds={text!r} is not a list of seeds: write numbers and ranges, as 0-199 or 3,5,8."
    )


def test_a_list_of_seeds_has_a_maximum_length() -> None:
    assert len(parse_seeds(f"0-{MOST_SEEDS - 1}", "envs.seeds")) == MOST_SEEDS
    for text in (f"0-{MOST_SEEDS}", f"5,0-{MOST_SEEDS - 1}", "0-99999999999999"):
        with pytest.raises(ConfigError, match=r"has more than 1,000,000 seeds: leave it out instead\.$"):
            parse_seeds(text, "envs.seeds")


class Recorder(counting.CountingEnv):
    """An env that records the seeds of its resets. `made` lists the envs in the order of their construction."""

    made: list[Recorder]

    def __init__(self) -> None:
        super().__init__(lengths=[3, 5, 2])
        self.seeds: list[int | None] = []
        self.made.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        return super().reset(seed=seed)


@pytest.fixture
def recorder() -> type[Recorder]:
    class RolloutBuffer(Recorder):
        made: list[Recorder] = []  # noqa: RUF012

    return RolloutBuffer


def test_training_and_evaluation_reset_only_with_their_given_seeds(tmp_path: Path, recorder: type[Recorder]) -> None:
    given, others = [3, 5, 8, 9], [100, 101, 102]
    run = remuda.train(
        "ppo",
        recorder,
        steps=400,
        out=tmp_path / "run",
        algo={"n_steps": 16, "batch_size": 32, "n_epochs": 1},
        sampler={"envs": 4, "decorrelate": 0},
        envs={"seeds": "3,5,8-9"},
        eval={"seeds": "100-102", "episodes": 50, "every": 200},
        **QUIET,
    )
    probed, training, evaluating = recorder.made[0], recorder.made[1:5], recorder.made[5:]
    assert probed.seeds == [derive_seed(0, 0, 0)]
    played = [seed for env in training for seed in env.seeds]
    assert len(played) > 80
    assert set(played) == set(given), "every reset has one of the given seeds"
    assert len({tuple(env.seeds[:6]) for env in training}) > 1, "every env draws its own sequence of seeds"
    assert len(evaluating) % 3 == 0
    assert len(evaluating) > 3, "there are evaluations after 200 steps and at the end"
    for turn in range(0, len(evaluating), 3):
        assert [seed for env in evaluating[turn : turn + 3] for seed in env.seeds] == others
    assert run.evaluate(episodes=3)["episodes"] == 3


def test_without_seeds_only_the_first_reset_of_an_env_has_a_seed(recorder: type[Recorder]) -> None:
    config, spec, _ = resolved({}, env=recorder)
    recorder.made.clear()
    with make_some_envs(config, spec, 4, 1, 0, lambda: False) as envs:
        envs.reset(seed=1)
        for _ in range(20):
            slot, _ = envs.recv()
            envs.send(slot, np.zeros(4, np.int64))
    assert [env.seeds[0] for env in recorder.made] == [derive_seed(1, index, 0) for index in range(4)]
    assert {seed for env in recorder.made for seed in env.seeds[1:]} == {None}


@pytest.mark.parametrize("where", ["here", "pool", "acting"])
def test_the_seeds_reach_every_kind_of_sampler(where: str) -> None:
    """Every observation contains a marker, which is the last seed modulo 1000."""
    config, spec, info = resolved({"envs": {"seeds": "11,22,33"}})
    if where == "acting":
        (order,) = make_blueprints(config, spec, info, 1, None)
        order |= {"first": 4, "last": 8}
        envs, _, _ = SamplerWorker().make_parts(order, lambda: False, print)
    else:
        envs = make_some_envs(config, spec, 4, 1, 1 if where == "pool" else 0, lambda: False)
    envs.reset(seed=1)
    markers = set()
    for _ in range(60):
        slot, step = envs.recv()
        markers |= set(step.obs[:, 0].tolist())
        envs.send(slot, np.zeros(4, np.int64))
    envs.recv()
    envs.close()
    assert markers == {11.0, 22.0, 33.0}


def test_seeds_of_an_evaluation() -> None:
    config, _, _ = resolved({"eval": {"seeds": "7,20-21", "episodes": 5}})
    assert eval_episodes(config) == 3
    assert [eval_seed(config, number) for number in range(5)] == [7, 20, 21, 7, 20], "more episodes repeat the list"
    config, _, _ = resolved({"eval": {"episodes": 5, "seed": 3}})
    assert eval_episodes(config) == 5
    assert [eval_seed(config, number) for number in range(5)] == [derive_seed(3, number) for number in range(5)]


def test_every_evaluation_seed_is_played_once_if_there_are_fewer_envs(recorder: type[Recorder]) -> None:
    config, spec, info = resolved({"eval": {"seeds": "40-58"}}, env=recorder)
    agent = make_algorithm(config, info, find_net(config.agent)).agent  # type: ignore[attr-defined]
    recorder.made.clear()
    found = play_episodes(config, spec, eval_episodes(config), agent)
    assert len(found.returns) == 19
    assert sorted(seed for env in recorder.made for seed in env.seeds if seed is not None) == list(range(40, 59))


def test_a_seed_given_to_evaluate_replaces_the_list_of_seeds(tmp_path: Path, recorder: type[Recorder]) -> None:
    run = remuda.train(
        "a2c",
        recorder,
        steps=30,
        out=tmp_path / "run",
        algo={"n_steps": 8},
        sampler={"envs": 4},
        eval={"seeds": "100-101", "episodes": 0},
        **QUIET,
    )
    for seed, expected in ((None, [100, 101]), (5, [derive_seed(5, 0), derive_seed(5, 1)])):
        recorder.made.clear()
        run.evaluate(episodes=2, seed=seed)
        assert [seed for env in recorder.made[-2:] for seed in env.seeds] == expected


def test_lists_of_seeds_need_single_envs() -> None:
    with pytest.raises(ConfigError, match=r"envs\.seeds"):
        make_recipe(*resolved({"envs": {"seeds": "0-5", "backend": "gymnasium"}}, env="CartPole-v1"))
    config, spec, _ = resolved({"envs": {"seeds": "0-5"}}, env="CartPole-v1")
    with make_some_envs(config, spec, 2, 1, 0, lambda: False) as envs:
        assert isinstance(envs, LocalEnvs)


# --- rewards and the entropy bonus ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_rewards_are_clipped_for_the_learner(algo: str) -> None:
    agent = make_agent()
    rollout = make_rollout(agent, T=8, B=4)
    rollout.steps.reward[...] *= 5
    small = make_rollout(agent, T=8, B=4)
    small.steps.reward[...] = rollout.steps.reward.clamp(-1, 1)
    assert not torch.equal(small.steps.reward, rollout.steps.reward)
    kept = rollout.steps.reward.clone()
    found = {}
    for clips in (True, False):
        config, _, info = resolved({"algo": {"clip_reward": clips, "normalize_reward": False}}, algo=algo)
        algorithm = make_algorithm(config, info, find_net(config.agent))
        found[clips] = algorithm.prepare(rollout).targets
        reference = algorithm.prepare(small).targets
        assert torch.equal(found[clips].advantage, reference.advantage) is clips
    assert not torch.equal(found[True].value, found[False].value)
    assert torch.equal(rollout.steps.reward, kept), "the rollout keeps the rewards of the env"


def test_logged_rewards_are_not_clipped(tmp_path: Path) -> None:
    """Rewards of the counting env are at least 100. Clipped to 1, they give a much smaller value loss."""
    lines = {}
    for clips in (True, False):
        run = remuda.train(
            "ppo",
            "counting:make",
            steps=120,
            out=tmp_path / str(clips),
            algo={"n_steps": 16, "batch_size": 32, "n_epochs": 1, "clip_reward": clips, "normalize_reward": False},
            sampler={"envs": 2},
            eval={"episodes": 2},
            **QUIET,
        )
        text = (run.path / "metrics.jsonl").read_text()
        lines[clips] = [json.loads(line) for line in text.splitlines()]
        assert run.evaluate(episodes=2)["mean_reward"] > 100
    for line in lines[True]:
        if "rollout/ep_rew_mean" in line:
            assert line["rollout/ep_rew_mean"] > 100
        if "train/value_loss" in line:
            assert line["train/value_loss"] < 1000
    assert lines[False][0]["train/value_loss"] > 10_000
    assert lines[True][0]["rollout/ep_rew_mean"] == lines[False][0]["rollout/ep_rew_mean"], (
        "both first rollouts are equal"
    )


@pytest.mark.parametrize("algo", ["ppo", "a2c", "impala", "appo"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.05", (0.05, 0.05, 0.05)),
        ("linear(0.1, 0)", (0.1, 0.05, 0.0)),
        ("piecewise(0:0.2, 0.5:0, 1:1)", (0.2, 0, 1)),
    ],
)
def test_the_entropy_bonus_follows_its_schedule(algo: str, text: str, expected: tuple[float, ...]) -> None:
    config, _, info = resolved({"algo": {"ent_coef": text, "vf_coef": 0.5}}, algo=algo)
    algorithm = make_algorithm(config, info, find_net(config.agent))
    batch = algorithm.prepare(make_rollout(algorithm.agent, T=8, B=4))
    batch = batch.flatten() if algo in ("ppo", "a2c") else batch
    for progress, coefficient in zip((0.0, 0.5, 1.0), expected, strict=True):
        metrics = algorithm.losses(batch, Clock(progress=progress)).metrics
        rest = (
            metrics["policy_gradient_loss" if algo in ("ppo", "appo") else "policy_loss"]
            + 0.5 * metrics["value_loss"]
        )
        bonus = (metrics["loss"] - rest) / metrics["entropy_loss"]
        assert float(bonus) == pytest.approx(coefficient, abs=1e-5)


@pytest.mark.parametrize("text", ["much", "linear(1)", "-0.1", "linear(0.1, -1)"])
def test_an_entropy_bonus_that_is_not_a_schedule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^algo\.ent_coef=.* is not a schedule: give a number, linear"):
        resolved({"algo": {"ent_coef": text}})


# --- minibatches of agents with memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 16, 32])
def test_minibatches_of_whole_sequences_are_accepted(size: int) -> None:
    config, _, _ = resolved({"agent": {"core": "lstm"}, "algo": {"batch_size": size}})
    assert config.algo_options.batch_size == size


@pytest.mark.parametrize("size", [2, 4, 12, 24, 64, 20])
def test_minibatches_that_would_cut_sequences_are_refused(size: int) -> None:
    """With n_steps=8 and 4 envs, 24 rows are three envs, which do not divide four, and 4 rows cut a sequence."""
    with pytest.raises(ConfigError) as caught:
        resolved({"agent": {"core": "gru"}, "algo": {"batch_size": size}})
    assert str(caught.value) == (
        f"algo.batch_size={size} is not a whole number of envs' sequences that divides envs=4 (n_steps=8): "
        "recurrent PPO splits along envs, use 8 or 16 or 32."
    )


def test_feedforward_agents_and_a2c_accept_any_minibatches() -> None:
    resolved({"algo": {"batch_size": 4}})
    resolved({"agent": {"core": "lstm"}, "algo": {"n_steps": 5}}, algo="a2c")


# --- sampler workers ------------------------------------------------------------------------------------------------


def test_sampler_workers_refuse_slots() -> None:
    with pytest.raises(
        ConfigError, match=r"^sampler\.slots=2 with sampler\.inference=workers: workers take no turns, use 1\.$"
    ):
        resolved({"sampler": {"inference": "workers", "slots": 2}})


def test_sampler_workers_are_refused_under_serial(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sampler\.inference=workers has no workers under --scheme serial: use"):
        remuda.train("ppo", "counting:make", out=tmp_path / "run", sampler={"inference": "workers"}, **QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (
            {"env": "CartPole-v1", "envs": {"backend": "gymnasium"}},
            ConfigError,
            r"they step single envs, use python\.$",
        ),
        (
            {"env": "counting:make", "net": lambda shape: torch.nn.Linear(3, 4)},
            ConfigError,
            "it is a lambda and has no import path",
        ),
        ({"env": lambda: counting.make()}, EnvSpecError, "lambda"),
    ],
    ids=["native", "net", "env"],
)
def test_envs_and_nets_unknown_to_sampler_workers_are_refused_without_a_run(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    common = {
        "scheme": "parallel",
        "sampler": {"inference": "workers", "envs": 2},
        "algo": {"n_steps": 8, "batch_size": 16},
    }
    with pytest.raises(error, match=words) as caught:
        remuda.train("ppo", out=tmp_path / "run", **{**common, **settings}, **QUIET)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_native_envs_in_sampler_workers_are_refused_without_a_process() -> None:
    config, spec, info = resolved(
        {"sampler": {"inference": "workers"}, "envs": {"backend": "gymnasium"}}, env="CartPole-v1"
    )
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"envs\.backend=gymnasium with sampler\.inference=workers"):
        make_worker_sampler(config, spec, info, 2, nothing, nothing, 0, lambda: False)


def test_more_sampler_workers_than_envs_are_refused(tmp_path: Path) -> None:
    sampler = {"inference": "workers", "envs": 2, "workers": 3}
    with pytest.raises(ConfigError, match=r"^sampler\.workers=3 is more than the 2 envs of a slot"):
        remuda.train(
            "a2c",
            "counting:make",
            out=tmp_path / "run",
            scheme="parallel",
            sampler=sampler,
            algo={"n_steps": 8},
            **QUIET,
        )


def test_waiting_for_resets_needs_single_envs() -> None:
    with pytest.raises(
        ConfigError, match=r"^envs\.backend=gymnasium with sampler\.wait_reset: native envs cannot wait"
    ):
        make_recipe(*resolved({"sampler": {"wait_reset": True}, "envs": {"backend": "gymnasium"}}, env="CartPole-v1"))


def test_a_worker_builds_the_envs_and_the_agent_of_the_run() -> None:
    """The agent that a worker builds from its blueprint has the initial weights of the run."""
    agent_options = {"core": "gru", "prev_action": True}
    config, spec, info = resolved({"agent": agent_options, "sampler": {"inference": "workers"}})
    seen = agent_view(config, info)
    order = {**make_blueprints(config, spec, seen, 1, None)[0], "first": 2, "last": 4}
    envs, agent, _ = SamplerWorker().make_parts(order, lambda: False, print)
    own = make_algorithm(config, seen, find_net(config.agent)).agent
    assert envs.num_envs == 2
    assert envs.observation.entries.keys() == own.observation.entries.keys()
    assert all(torch.equal(mine, own.state_dict()[name]) for name, mine in agent.state_dict().items())
    envs.reset(seed=1)
    _, step = envs.recv()
    assert step.obs.obs[:, 0].tolist() == [derive_seed(1, index, 0) % 1000 for index in (2, 3)]
    envs.close()


# --- configurations as workers receive them -------------------------------------------------------------------------

CONFIGS: dict[str, tuple[str, str, Groups]] = {
    "defaults": ("ppo", "counting:make", {}),
    "a2c": ("a2c", "counting:make", {"algo": {"momentum": 0.5}}),
    "preset": ("ppo", "Remuda/Recall-v0", {"agent": {"core": "lstm"}, "algo": {"n_steps": 64, "batch_size": 256}}),
    "everything": (
        "ppo",
        "counting:make",
        {
            "algo": {"learning_rate": "linear(1e-3, 0)", "target_kl": 0.02, "clip_range_vf": "0.3", "gamma": 1},
            "sampler": {"envs": 4, "workers": 2, "inference": "workers", "wait_reset": True},
            "envs": {"kwargs": {"lengths": [2, 3], "ends": "terminate"}, "seeds": "0-3"},
            "agent": {"hidden": (32, 16, 8), "core": "gru", "prev_reward": True},
            "eval": {"seeds": "5,6", "every": 10},
            "checkpoint": {"keep": "3"},
            "log": {"wandb": "a project"},
        },
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("through", ["nothing", "json", "msgpack", "yaml"])
def test_a_configuration_is_restored_from_every_format(name: str, through: str) -> None:
    algo, env, groups = CONFIGS[name]
    config, _, _ = resolved(groups, env, algo, seed=2**40, steps=10**7, scheme="parallel")
    values: Any = to_dict(config)
    if through == "json":
        values = json.loads(json.dumps(values))
    elif through == "msgpack":
        values = msgspec.msgpack.decode(msgspec.msgpack.encode(values))
    elif through == "yaml":
        values = yaml.safe_load(yaml.safe_dump(values))
    again = from_dict(values)
    assert again == config
    assert type(again.algo_options) is type(config.algo_options)
    assert isinstance(again.agent.hidden, tuple)


def test_an_invalid_stored_configuration_is_refused() -> None:
    values = to_dict(resolved({})[0])
    values["options"]["sampler"]["envs"] = 0
    with pytest.raises(ConfigError, match=r"sampler\.envs=0 is too small"):
        from_dict(values)
    values["options"]["sampler"] = {"envs": 4, "wheels": 4}
    with pytest.raises(ConfigError, match=r"sampler\.wheels is not an option"):
        from_dict(values)


def test_levels_and_seeds_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="levels and seeds were both given"):
        make_envs(resolve("counting:make"), 1, seeds=[[1]], levels=[2])
