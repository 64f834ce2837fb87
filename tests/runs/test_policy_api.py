"""Test `Policy` with observations and actions of every space, one or a batch, with and without memory."""

from __future__ import annotations

import copy
from typing import Any

import counting
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import remuda
from remuda.build.algorithm import make_algorithm
from remuda.build.envs import agent_view
from remuda.build.nets import find_net
from remuda.config.resolve import resolve_config
from remuda.envs import LocalEnvs
from remuda.errors import ConfigError
from remuda.runs.evaluation import eval_seed, play_episodes
from remuda.runs.policy import Policy, PolicyState
from remuda.sampling.evaluation import evaluate

torch.set_num_threads(1)  # with small networks on a busy machine, more threads are many times slower

FLOATS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS: dict[str, Any] = {
    "discrete": spaces.Discrete(4),
    "shifted": spaces.Discrete(4, start=-1),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "float64": spaces.Box(-1.0, 1.0, (2,), np.float64),
    "matrix": spaces.Box(-0.1, 0.1, (2, 2), np.float32),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "multi": spaces.MultiDiscrete([2, 3], start=[5, -1]),
    "table": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "binary": spaces.MultiBinary(3),
    "tuple": spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(-1.0, 1.0, (2,), np.float32))),
    "nested": spaces.Dict(
        {
            "move": spaces.Tuple((spaces.Discrete(3, start=-1), spaces.Box(-1.0, 1.0, (2,), np.float64))),
            "push buttons": spaces.MultiBinary(2),
            "modes": spaces.MultiDiscrete([2, 3], start=[5, 0]),
        }
    ),
}
SMALL = {"multi": spaces.MultiDiscrete([2, 3], dtype=np.int32), "discrete": spaces.Discrete(3, dtype=np.int32)}


class Noise(gymnasium.Env[Any, Any]):
    """An env with episodes of 12 steps whose observations and rewards depend only on the seed.

    Actions are checked and recorded.
    """

    def __init__(self, action: str = "discrete", observation: Any = FLOATS) -> None:
        self.observation_space = copy.deepcopy(observation)  # so that the space has its own generator
        self.action_space = SMALL[action.removeprefix("small ")] if action.startswith("small") else ACTIONS[action]
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.taken.append(action)
        self.steps += 1
        reward = float(self.np_random.normal())
        return self.observation_space.sample(), reward, False, self.steps == 12, {}


def build(make: Any, **agent: Any) -> tuple[Any, Any, Any, Policy]:
    """Return configuration, spec, agent and policy of an untrained run, whose outputs differ from row to row."""
    groups = {"algo": {"n_steps": 8, "batch_size": 32}, "sampler": {"envs": 4}, "agent": agent}
    groups["agent"] = {"normalize_obs": False, "log_std_init": 0.0, **agent}
    config, spec, info = resolve_config({"algo": "ppo", "seed": 1}, groups, env=make)
    made = make_algorithm(config, agent_view(config, info), find_net(config.agent)).agent
    torch.manual_seed(3)
    nn.init.normal_(made.policy_head.linear.weight, std=0.5)
    return config, spec, made, Policy(made, info.observation, seed=5)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(np.array_equal(first, second))


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("deterministic", [True, False], ids=["greedy", "drawn"])
def test_actions_are_valid_for_the_env(name: str, deterministic: bool) -> None:
    """The env receives the actions as the policy returns them, and checks each one with `contains`."""
    env = Noise(name)
    _, _, _, policy = build(lambda: Noise(name))
    obs, _ = env.reset(seed=1)
    for _ in range(12):
        action, state = policy.act(obs, deterministic=deterministic)
        assert state is None
        obs, *_ = env.step(action)
    assert len(env.taken) == 12


@pytest.mark.parametrize("name", ["small discrete", "small multi"])
def test_actions_have_the_dtype_of_a_space_with_small_integers(name: str) -> None:
    env = Noise(name)
    _, _, _, policy = build(lambda: Noise(name))
    obs, _ = env.reset(seed=1)
    assert env.action_space.contains(policy.act(obs)[0])


@pytest.mark.parametrize("name", ACTIONS)
def test_acting_on_a_batch_equals_acting_on_its_rows(name: str) -> None:
    env = Noise(name)
    _, _, _, policy = build(lambda: Noise(name))
    env.reset(seed=1)
    rows = [env.observation_space.sample() for _ in range(6)]
    together, _ = policy.act(np.stack(rows))
    for row, obs in enumerate(rows):
        alone, _ = policy.act(obs)
        mine = pick(together, row)
        assert env.action_space.contains(mine)
        for a, b in zip(flat(alone), flat(mine), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    single, _ = policy.act(rows[0][None])
    assert all(len(np.shape(leaf)) >= 1 and len(leaf) == 1 for leaf in flat(single)), "a batch of one keeps its axis"


def pick(action: Any, row: int) -> Any:
    if isinstance(action, dict):
        return {key: pick(value, row) for key, value in action.items()}
    return tuple(pick(value, row) for value in action) if isinstance(action, tuple) else action[row]


def flat(action: Any) -> list[Any]:
    if isinstance(action, dict):
        return [leaf for value in action.values() for leaf in flat(value)]
    return [leaf for value in action for leaf in flat(value)] if isinstance(action, tuple) else [action]


def test_discrete_actions_start_at_the_start_of_the_space() -> None:
    _, _, agent, policy = build(lambda: Noise("shifted"))
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    found, _ = policy.act(obs)
    with torch.no_grad():
        expected = agent.unroll(torch.as_tensor(obs), None, None)[0].distribution.mode()
    assert found.tolist() == (expected - 1).tolist()
    assert -1 in found.tolist()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5, start=3),
        spaces.MultiDiscrete([3, 4], start=[2, -1]),
        spaces.MultiBinary(3),
        spaces.Box(0, 3, (2, 2), np.uint8),
        spaces.Box(-1.0, 1.0, (2,), np.float64),
        counting.NestedEnv.observation_space,
        spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(-1.0, 1.0, (2,), np.float32))),
    ],
    ids=lambda space: type(space).__name__,
)
def test_observations_are_processed_as_in_training(space: Any) -> None:
    """The policy acts as in an evaluation, which stores observations as training does."""
    made: list[Noise] = []

    def make() -> Noise:
        made.append(Noise("box", space))
        return made[-1]

    _, spec, agent, policy = build(make)
    made.clear()
    with LocalEnvs(spec, 1, seeds=[[7, 8]]) as envs:
        evaluate(envs, agent, 2)
    (played,) = made
    mine = by_hand(policy, Noise("box", space), (7, 8))
    np.testing.assert_allclose(mine, played.taken, atol=1e-6)
    assert len({action.tobytes() for action in played.taken}) > 2, "actions depend on the observation"


def by_hand(policy: Policy, env: Noise, seeds: tuple[int, ...], is_carried: bool = True) -> list[Any]:
    """Play episodes with the loop that the README shows, and return the actions taken."""
    for seed in seeds:
        obs, _ = env.reset(seed=seed)
        state, reward, over = None, 0.0, False
        while not over:
            action, following = policy.act(obs, state, reward=reward)
            state = following if is_carried else None
            obs, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
    return env.taken


MEMORY = {
    "lstm": {"core": "lstm"},
    "gru, one trunk": {"core": "gru", "shared": True},
    "previous action": {"prev_action": True},
    "previous reward": {"prev_reward": True},
    "all": {"core": "lstm", "prev_action": True, "prev_reward": True},
}


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("action", ["shifted", "box", "nested"])
def test_actions_of_recurrent_policies_equal_those_of_an_evaluation(name: str, action: str) -> None:
    made: list[Noise] = []

    def make() -> Noise:
        made.append(Noise(action))
        return made[-1]

    config, spec, agent, policy = build(make, **MEMORY[name])
    made.clear()
    played = play_episodes(config, spec, 3, agent)
    assert len(played.returns) == 3
    for number, env in enumerate(made):  # three envs, one episode each
        mine = Noise(action)
        by_hand(policy, mine, (eval_seed(config, number),))
        assert len(mine.taken) == len(env.taken) == 12
        for ours, theirs in zip(mine.taken, env.taken, strict=True):
            for a, b in zip(flat(ours), flat(theirs), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", MEMORY)
def test_actions_differ_if_the_state_is_not_passed_on(name: str) -> None:
    """This shows that the test above can fail."""
    _, _, _, policy = build(lambda: Noise("box"), **MEMORY[name])
    carried, dropped = (by_hand(policy, Noise("box"), (4,), is_carried) for is_carried in (True, False))
    assert same(carried[0], dropped[0]), "the first action of an episode depends on no earlier state"
    assert not any(same(a, b) for a, b in zip(carried[1:], dropped[1:], strict=True))


def test_states_of_a_batch_stay_with_their_rows() -> None:
    _, _, _, policy = build(lambda: Noise("box"), core="lstm", prev_action=True, prev_reward=True)
    obs = np.random.default_rng(0).normal(size=(5, 3, 3)).astype(np.float32)
    rewards = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    together: list[Any] = []
    state: PolicyState | None = None
    for t in range(5):
        action, state = policy.act(obs[t], state, reward=rewards[t])
        together.append(action)
    for row in range(3):
        own: PolicyState | None = None
        for t in range(5):
            action, own = policy.act(obs[t, row], own, reward=rewards[t, row])
            np.testing.assert_allclose(action, together[t][row], atol=1e-5)


def test_only_agents_with_prev_reward_depend_on_the_reward() -> None:
    obs = np.ones(3, np.float32)
    for options, differs in (({"prev_reward": True}, True), ({"prev_action": True}, False)):
        _, _, _, policy = build(lambda: Noise("box"), **options)
        _, state = policy.act(obs, None, reward=100.0)
        assert state is not None
        assert state.memory is None
        first, _ = policy.act(obs, state, reward=0.0)
        second, _ = policy.act(obs, state, reward=2.0)
        assert same(first, second) is not differs
    first, second = (policy.act(obs, None, reward=reward)[0] for reward in (0.0, 5.0))
    assert same(first, second), "there is no reward before the first observation of an episode"


def test_greedy_actions_repeat_and_sampled_ones_depend_on_the_policys_seed() -> None:
    _, _, agent, policy = build(lambda: Noise("box"))
    obs = np.ones(3, np.float32)
    assert all(same(policy.act(obs)[0], policy.act(obs)[0]) for _ in range(3))
    draws = [[policy.act(obs, deterministic=False)[0] for _ in range(20)] for policy in map(seeded(agent), (1, 1, 2))]
    assert same(tuple(draws[0]), tuple(draws[1]))
    assert not same(tuple(draws[0]), tuple(draws[2]))
    assert len({action.tobytes() for action in draws[0]}) > 10
    assert np.abs(draws).max() == 1.0, "clipped to the bounds, as in training"


def seeded(agent: Any) -> Any:
    return lambda seed: Policy(agent, seed=seed)


def test_acting_changes_no_parameters_and_builds_no_graph() -> None:
    _, _, agent, policy = build(lambda: Noise("box"), core="lstm", normalize_obs=True)
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    _, state = policy.act(np.ones(3, np.float32))
    assert state is not None
    assert not agent.training
    assert not state.memory.policy.h.requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in agent.state_dict().items())


# --- observations that do not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("obs", [np.ones(4), np.ones((2, 4)), np.ones((2, 2, 3)), np.float32(1.0)])
def test_a_wrong_shape_is_refused_in_one_sentence(obs: Any) -> None:
    _, _, _, policy = build(lambda: Noise("discrete"))
    with pytest.raises(ConfigError) as caught:
        policy.act(obs)
    text = str(caught.value)
    assert text == (
        f"an observation of shape {np.shape(obs)} does not fit (3,): "
        "give one observation, or a batch of them along the first axis."
    )


def make_nested() -> Noise:
    return Noise("nested", counting.NestedEnv.observation_space)


def nested_policy() -> tuple[Policy, dict[str, Any]]:
    _, _, _, policy = build(make_nested)
    return policy, counting.NestedEnv().reset(seed=1)[0]


@pytest.mark.parametrize("change", ["missing", "one too many", "short", "no dict", "no tuple", "inside"])
def test_wrong_entries_are_refused_in_one_sentence(change: str) -> None:
    policy, obs = nested_policy()
    given: Any = dict(obs)
    match change:
        case "missing":
            del given["gear"]
        case "one too many":
            given["wheel"] = 1
        case "short":
            given["pair"] = given["pair"][:1]
        case "no dict":
            given = np.zeros(3)
        case "no tuple":
            given["pair"] = 3
        case "inside":
            given["camera"] = {"left": given["camera"]["left"]}
    with pytest.raises(
        ConfigError, match=r"^an observation without exactly the entries [\w, ]+ does not fit: give all"
    ):
        policy.act(given)


def test_a_nested_observation_with_one_wrong_shape_is_refused() -> None:
    policy, obs = nested_policy()
    obs["camera"]["left"] = np.zeros((2, 3), np.uint8)
    with pytest.raises(ConfigError, match=r"^an observation of shape \(2, 3\) does not fit \(2, 2\): give one"):
        policy.act(obs)


def test_a_batch_of_nested_observations_equals_its_rows() -> None:
    policy, obs = nested_policy()
    alone, _ = policy.act(obs)
    assert ACTIONS["nested"].contains(alone)

    def repeat(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: repeat(entry) for key, entry in value.items()}
        return tuple(map(repeat, value)) if isinstance(value, tuple) else np.stack([np.asarray(value)] * 3)

    many, _ = policy.act(repeat(obs))
    for row in range(3):
        for a, b in zip(flat(alone), flat(pick(many, row)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_load_returns_this_policy_for_a_trained_run(tmp_path: Any) -> None:
    """The policy has the env's own observation space, even if the agent observes more."""
    run = remuda.train(
        "ppo",
        make_nested,
        steps=60,
        out=tmp_path / "run",
        quiet=True,
        algo={"n_steps": 8, "batch_size": 16, "n_epochs": 1},
        sampler={"envs": 4},
        agent={"core": "gru", "prev_action": True},
        eval={"episodes": 0},
        log={"tensorboard": False},
    )
    policy, env = remuda.load(run.path, env=make_nested), make_nested()
    assert "prev_action" not in policy.observation.entries
    state = None
    obs, _ = env.reset(seed=1)
    over = False
    while not over:
        action, state = policy.act(obs, state)
        obs, _, _, over, _ = env.step(action)
    assert isinstance(state, PolicyState)
    assert len(env.taken) == 12
