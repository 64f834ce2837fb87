"""Native vector envs: the same rows as the pool, the same Atari frames, and the choice of backends."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import counting
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from remuda.core import Episode, Step
from remuda.envs import AtariOptions, LocalEnvs, NativeEnvs, PooledEnvs, make_envs, native_slot, probe, resolve
from remuda.envs.backends import ale, choose, gymnasium_vector
from remuda.errors import ConfigError, EnvError, EnvSpecError, Interrupted
from remuda.registry import env_backend_names, find_env_backend

# --- the same game through the pool and through the native env ------------------------------------------------------


def play_both(env: str, steps: int, num_envs: int = 2, slots: int = 1, **options: Any) -> tuple[int, int, float]:
    """Step Python and native envs with random actions and compare all fields and statistics.

    Return the number of ends, the number of episodes and the largest reward.
    """
    spec = resolve(env, None, AtariOptions(**options))
    with make_envs(spec, num_envs, 0, slots, backend="python") as single, make_envs(spec, num_envs, 2, slots) as many:
        assert isinstance(many, NativeEnvs)
        single.reset(seed=7)
        many.reset(seed=7)
        draw, ends, most = np.random.default_rng(7), 0, 0.0
        ours: list[Episode] = []
        theirs: list[Episode] = []
        for row in range(steps * slots):
            (slot, expected), (other, step) = single.recv(), many.recv()
            assert slot == other
            for name in Step._fields:
                left, right = getattr(expected, name), getattr(step, name)
                assert left.dtype == right.dtype
                assert np.array_equal(left, right), f"{name} differs in row {row}"
            ends += int((step.terminated | step.truncated).sum())
            most = max(most, float(step.reward.max()))
            action = draw.integers(0, single.action.n, num_envs // slots)
            single.send(slot, action)
            many.send(slot, action)
            ours += single.episodes()
            theirs += many.episodes()
    assert [episode.env for episode in ours] == [episode.env for episode in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert one.values == pytest.approx(two.values)
    return ends, len(ours), most


@pytest.mark.parametrize(
    ("env", "steps", "slots", "options"),
    [
        ("ALE/Breakout-v5", 400, 1, {"episodic_life": True}),
        ("ALE/Breakout-v5", 250, 2, {"episodic_life": True, "fire_reset": True, "frame_stack": 2}),
        ("SpaceInvadersNoFrameskip-v4", 300, 1, {"screen_size": 48, "full_action_set": True, "frame_skip": 3}),
    ],
)
def test_native_envs_give_the_same_rows_as_single_envs(
    env: str, steps: int, slots: int, options: dict[str, Any]
) -> None:
    ends, episodes, most = play_both(env, steps, 2, slots, **options)
    if "episodic_life" in options:
        assert ends > episodes >= 1
    else:
        assert most > 1.0  # rewards are not clipped


@pytest.mark.long
@pytest.mark.parametrize("options", [{"noop_max": 0, "sticky": 0.0}, {}, {"episodic_life": True, "fire_reset": True}])
@pytest.mark.parametrize("env", ["ALE/Pong-v5", "ALE/Breakout-v5", "ALE/Seaquest-v5"])
def test_ten_thousand_actions_give_the_same_rows(env: str, options: dict[str, Any]) -> None:
    ends, episodes, _ = play_both(env, 10_000, 1, **options)
    assert ends >= episodes >= 5


def test_number_of_threads_does_not_change_rows() -> None:
    seen = []
    for threads in (1, 3):
        with NativeEnvs(resolve("ALE/Pong-v5"), ale, 3, threads=threads) as envs:
            envs.reset(seed=2)
            rows = []
            for _ in range(40):
                slot, step = envs.recv()
                rows.append(step.obs.copy())
                envs.send(slot, np.array([2, 3, 4]))
            seen.append(np.stack(rows))
    assert np.array_equal(*seen)


def test_warm_up_spreads_the_games() -> None:
    with make_envs(resolve("ALE/Pong-v5", None, AtariOptions(noop_max=0)), 4) as envs:
        assert isinstance(envs, NativeEnvs)
        assert envs.reset(seed=1, warm_up=12) == 4 * 12
        _, step = envs.recv()
        assert not step.mask.any()
        games = envs._slots[0]._vector
        envs.send(0, np.zeros(4, np.int64))
        envs.recv()
        assert isinstance(games, ale.AleVectorEnv)
        _, _, _, _, info = games._vector.step(np.zeros(4, np.int64))
        steps = (info["episode_frame_number"] // 4 - 2).tolist()
        assert len(set(steps)) > 1
        assert 0 <= min(steps) <= max(steps) <= 12


class Scripted:
    """Replaces an AtariVectorEnv by given rows of reward, terminated, truncated, lives and frame, for one env."""

    def __init__(self, rows: list[tuple[int, bool, bool, int, int]]) -> None:
        self.rows, self.sent = iter(rows), []

    def send(self, actions: Any) -> None:
        self.sent.append(actions.tolist())

    def recv(self) -> Any:
        reward, terminated, truncated, lives, frame = next(self.rows)
        info = {"lives": np.array([lives]), "episode_frame_number": np.array([frame])}
        return (
            np.zeros((1, 4, 84, 84), np.uint8),
            np.array([reward]),
            np.array([terminated]),
            np.array([truncated]),
            info,
        )


def test_reward_of_the_action_after_a_lost_life_is_kept() -> None:
    spec = resolve(
        "ALE/Breakout-v5", {"max_num_frames_per_episode": 28}, AtariOptions(episodic_life=True, noop_max=0)
    )
    with NativeEnvs(spec, ale, 1) as envs:
        envs.reset(seed=1)
        games: Any = envs._slots[0]._vector
        script = Scripted(
            [
                (1, False, False, 5, 4),
                (0, True, False, 4, 8),  # a lost life, which is an end for the learner
                (2, True, False, 3, 12),  # another one, with a reward, in the row that continues the game
                (4, False, False, 3, 16),
                (0, True, False, 2, 20),
                (8, False, True, 2, 24 + 4),  # the frame limit, in the row that continues the game
                (0, False, False, 5, 0),  # a new game
                (16, False, False, 5, 4),
            ]
        )
        games._vector = script
        envs.recv()
        rows = []
        for _ in range(8):
            envs.send(0, np.array([3]))
            _, step = envs.recv()
            rows.append((float(step.reward[0]), bool(step.terminated[0] | step.truncated[0]), bool(step.mask[0])))
        assert rows == [
            (1.0, False, True),
            (0.0, True, True),
            (0.0, False, False),
            (6.0, False, True),
            (0.0, True, True),
            (0.0, False, False),
            (0.0, False, False),
            (16.0, False, True),
        ]
        assert script.sent == [[3], [3], [0], [3], [3], [0], [3], [3]]
        (episode,) = envs.episodes()
        assert (episode.values["ep_rew"], episode.values["ep_len"]) == (15.0, 5.0)


# --- a vector env that counts ---------------------------------------------------------------------------------------


class CountingVector(VectorEnv):  # type: ignore[misc]
    """Env i returns [i, episode, step]; its episodes have 3 + i steps, and terminate if i is even, else truncate."""

    def __init__(self, num_envs: int, autoreset_mode: Any = AutoresetMode.SAME_STEP, fault: str = "", start: int = 2):
        self.num_envs, self.fault = num_envs, fault
        self.metadata = {"autoreset_mode": autoreset_mode}
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.single_action_space = gymnasium.spaces.Discrete(4, start=start)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seed, self.steps, self.episode = seed, np.zeros(self.num_envs, int), np.ones(self.num_envs, int)
        self.over, self.taken = np.zeros(self.num_envs, bool), []
        return self.show(), {}

    def show(self) -> Any:
        return np.stack([np.arange(self.num_envs), self.episode, self.steps], axis=1).astype(np.float64)

    def step(self, actions: Any) -> Any:
        assert self.action_space.contains(actions)
        self.taken.append(actions.tolist())
        self.steps = np.where(self.over, 0, self.steps + 1)
        self.episode = self.episode + self.over
        last = ~self.over & (self.steps >= 3 + np.arange(self.num_envs))
        is_even = np.arange(self.num_envs) % 2 == 0
        reward = 10.0 * self.episode + self.steps  # not 0 in a reset row, as in some envs
        obs = self.show()
        match self.fault if len(self.taken) == 2 else "":
            case "raise":
                raise RuntimeError("told to fail")
            case "nan":
                obs[1, 2] = math.nan
            case "reward":
                reward[1] = math.inf
            case "shape":
                obs = obs[:, :2]
        self.over = last
        info = {"size": self.steps * 1.5, "_size": np.arange(self.num_envs) != 1, "name": np.array(["a"] * len(obs))}
        return obs, reward, last & is_even, last & ~is_even, info


@pytest.fixture
def vector_id() -> Iterator[str]:
    gymnasium.register("CountingVector-v0", entry_point=None, vector_entry_point=CountingVector)
    yield "CountingVector-v0"
    del gymnasium.registry["CountingVector-v0"]


def test_rows_and_statistics_have_known_values(vector_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_slot, "BLOCK", 4)  # so that episodes extend over several blocks of rewards
    with make_envs(resolve(vector_id), 4, slots=2, gamma=0.5) as envs:
        assert isinstance(envs, NativeEnvs)
        assert (envs.observation.dtype, envs.action.start, envs.restarts(), envs.waited()) == ("float32", 2, 0, 0.0)
        envs.reset(seed=1)
        found: list[Episode] = []
        rows: list[list[Any]] = [[], []]
        for turn in range(2 * 30):
            slot, step = envs.recv()
            assert slot == turn % 2
            rows[slot].append([np.array(field) for field in step])
            envs.send(slot, np.array([0, 3]))
            found += envs.episodes()
        taken = [slot._vector._vector.taken[0] for slot in envs._slots]  # type: ignore[attr-defined]
    assert taken == [[2, 5], [2, 5]]  # counted from the start of the space
    for slot in range(2):
        assert not rows[slot][0][4].any()  # the first observations
        for env in range(2):
            length, episode, step = 3 + env, 1, 0
            for obs, reward, terminated, truncated, mask in rows[slot][1:]:
                step += 1
                if step > length:
                    episode, step = episode + 1, 0
                assert obs[env].tolist() == [env, episode, step]
                assert mask[env] == (step > 0)
                assert reward[env] == (10 * episode + step if step else 0)
                assert (terminated[env], truncated[env]) == (step == length and env == 0, step == length and env == 1)
    for env in range(4):
        length = 3 + env % 2
        own = [episode.values for episode in found if episode.env == env]
        assert len(own) == (29 + 1) // (length + 1)  # the last of 29 rows may be an end, without its reset row
        for number, values in enumerate(own, start=1):
            rewards = [10 * number + step for step in range(1, length + 1)]
            assert values["ep_len"] == length
            assert values["ep_rew"] == sum(rewards)
            assert values["ep_discounted_rew"] == sum(0.5**step * reward for step, reward in enumerate(rewards))
            assert values.get("info/size") == (None if env % 2 else 1.5 * length)
            assert "info/name" not in values


@pytest.mark.parametrize("env", ["CountingVector-v0", "ALE/Breakout-v5"])
def test_reset_drops_a_step_in_flight(vector_id: str, env: str) -> None:
    seen = []
    with make_envs(resolve(env), 2) as envs:
        for _ in range(2):
            envs.reset(seed=1)
            for _ in range(3):
                _, step = envs.recv()
                seen.append(step.obs.copy())
                envs.send(0, np.ones(2, np.int64))
        assert np.array_equal(seen[:3], seen[3:])
        assert not np.array_equal(seen[1], seen[2])
        assert envs.episodes() == []


def test_warm_up_of_envs_that_cannot_be_restarted(vector_id: str) -> None:
    with make_envs(resolve(vector_id), 2) as envs:
        assert envs.reset(seed=1, warm_up=2) == 4
        _, step = envs.recv()
        assert step.obs[:, 2].tolist() == [2, 2]
        assert not step.mask.any()
        envs.send(0, np.zeros(2, np.int64))
        assert envs.recv()[1].terminated.tolist() == [True, False]
        assert envs.episodes()[0].values["ep_len"] == 3  # random steps are part of the episode


def test_calls_out_of_order_are_refused(vector_id: str) -> None:
    with make_envs(resolve(vector_id), 2) as envs:
        assert isinstance(envs, NativeEnvs)
        with pytest.raises(RuntimeError, match="without a send"):
            envs.recv()
        envs.reset(seed=1)
        with pytest.raises(RuntimeError, match="has not been received"):
            envs.send(0, np.zeros(2, np.int64))
        envs.recv()
        with pytest.raises(ValueError, match="one action for each env"):
            envs.send(0, np.zeros(3, np.int64))
        with pytest.raises(RuntimeError, match="cannot be held"):
            envs.send(0, np.zeros(2, np.int64), hold=True)
        envs.should_stop = lambda: True
        envs.send(0, np.zeros(2, np.int64))
        with pytest.raises(Interrupted):
            envs.recv()
        with pytest.raises(Interrupted):
            envs.reset(seed=1)


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("raise", ["in this process (backend gymnasium) raised RuntimeError: told to fail", "envs.backend=python"]),
        ("nan", ["env 1 of CountingVector-v0", "step 1 of its episode 1", "observation is nan"]),
        ("reward", ["env 1 of CountingVector-v0", "reward is inf"]),
        ("shape", ["observations have shape (2, 2)", "(2, 3)"]),
    ],
)
def test_errors_name_the_env(vector_id: str, fault: str, parts: list[str]) -> None:
    with make_envs(resolve(vector_id, {"fault": fault}), 2) as envs:
        envs.reset(seed=1)
        for _ in range(2):
            envs.recv()
            envs.send(0, np.zeros(2, np.int64))
        with pytest.raises(EnvError) as caught:
            envs.recv()
    for part in parts:
        assert part in str(caught.value)


# --- choice of backends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "kwargs", "options", "expected"),
    [
        ("ALE/Pong-v5", {}, {}, "ale"),
        ("PongNoFrameskip-v4", {"repeat_action_probability": 0.1}, {"episodic_life": True}, "ale"),
        ("ALE/Pong-v5", {}, {"interpolation": "linear"}, None),
        ("ALE/Pong-v5", {"mode": 0}, {}, None),
        ("ALE/Pong-v5", {"obs_type": "ram"}, {}, None),
        ("Pong-v4", {}, {}, None),
        ("CartPole-v1", {}, {}, None),
        ("counting:make", {}, {}, None),
    ],
)
def test_auto_chooses_a_backend_with_equal_envs(env: str, kwargs: Any, options: Any, expected: str | None) -> None:
    chosen = choose("auto", resolve(env, kwargs, AtariOptions(**options)))
    assert (None if chosen is None else chosen.NAME) == expected


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"seeds": [[1], [2]]}, "seeds of an evaluation"),
        ({"levels": [1, 2]}, "envs.seeds"),
        ({"info": ["lives"]}, "info=['lives']"),
        ({"stats": counting.Peaks}, "whose step() is called at every step"),
    ],
)
def test_features_of_single_envs_exclude_backends(asked: dict[str, Any], part: str) -> None:
    spec = resolve("ALE/Pong-v5")
    with make_envs(spec, 2, **asked) as envs:
        assert isinstance(envs, LocalEnvs)
    with pytest.raises(ConfigError, match=r"use envs\.backend=python") as caught:
        make_envs(spec, 2, backend="ale", **asked)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "env", "part"),
    [
        ("ale", "CartPole-v1", "not an Atari game"),
        ("ale", "Pong-v4", "frameskip=[2, 5]"),
        ("gymnasium", "Pendulum-v1", "without a vector_entry_point"),
        ("gymnasium", "counting:make", "not a Gymnasium id"),
        ("gymnasium", "ALE/Pong-v5", "the backend ale"),
        ("alle", "CartPole-v1", "'alle' is not known: did you mean ale"),
    ],
)
def test_unsuitable_backend_is_refused_in_one_sentence(backend: str, env: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_envs(resolve(env), 2, backend=backend)
    text = str(caught.value)
    assert part in text
    assert "\n" not in text


def test_every_backend_is_registered_and_complete() -> None:
    assert sorted(env_backend_names()) == ["ale", "envpool", "gymnasium"]
    for name in env_backend_names():
        backend = find_env_backend(name).load()
        assert name == backend.NAME
        assert (name == "ale") == backend.IS_SAME_GAME


def test_python_backend_uses_pooled_and_local_envs() -> None:
    with make_envs(resolve("ALE/Pong-v5"), 2, 1, backend="python") as envs:
        assert isinstance(envs, PooledEnvs)
    with make_envs(resolve("CartPole-v1"), 2) as envs:
        assert isinstance(envs, LocalEnvs)


def test_id_with_a_vector_env_only_has_no_single_env(vector_id: str) -> None:
    spec = resolve(vector_id)
    info = probe(spec)
    assert (info.label, info.observation.shape, info.action.n) == (vector_id, (3,), 4)
    with pytest.raises(EnvSpecError, match="registered as a vector env only"):
        spec.build()
    with pytest.raises(ConfigError, match="has no single envs"):
        make_envs(spec, 1, seeds=[[1]])


def test_reset_on_the_next_step_is_requested_and_checked(vector_id: str) -> None:
    assert gymnasium_vector.offer(resolve(vector_id)) is None  # although its default is a reset in the same step
    said = gymnasium_vector.offer(resolve(vector_id, {"autoreset_mode": AutoresetMode.SAME_STEP}))
    assert said is not None
    assert "not on the next step" in said


def test_vector_env_of_gymnasium_by_name() -> None:
    with make_envs(resolve("CartPole-v1"), 3, backend="gymnasium") as envs:
        assert isinstance(envs, NativeEnvs)
        envs.reset(seed=1)
        ended, lengths = np.zeros(3, bool), []
        envs.recv()
        for _ in range(60):
            envs.send(0, np.ones(3, np.int64))
            _, step = envs.recv()
            assert (step.mask == ~ended).all()
            assert (step.reward == step.mask).all()
            ended = step.terminated | step.truncated
            lengths += [episode.values["ep_len"] for episode in envs.episodes()]
    assert lengths
    assert all(8 <= length <= 11 for length in lengths)


def test_envpool_backend_if_installed() -> None:
    spec = resolve("CartPole-v1")
    if importlib.util.find_spec("envpool") is None:
        with pytest.raises(ConfigError, match="pip install envpool"):
            make_envs(spec, 2, backend="envpool")
        return
    with make_envs(spec, 3, 2, backend="envpool") as envs:
        envs.reset(seed=1)
        first = envs.recv()[1].obs.copy()
        ended = np.zeros(3, bool)
        for _ in range(40):
            envs.send(0, np.ones(3, np.int64))
            _, step = envs.recv()
            assert (step.mask == ~ended).all()
            ended = step.terminated | step.truncated
        assert len(envs.episodes()) >= 9
        envs.reset(seed=1)
        assert np.array_equal(envs.recv()[1].obs, first)
