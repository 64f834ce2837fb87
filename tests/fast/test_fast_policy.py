"""Tests that the fast path of small policy agents equals modules and autograd in actions, values and gradients."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollouts import box, discrete, make_agent, make_rollout
from torch import Tensor

from remuda import fast
from remuda.agents import PolicyAgent
from remuda.algorithms import A2C, PPO
from remuda.config.resolve import resolve_config
from remuda.core import Clock, Losses, Space
from remuda.data import Batch
from remuda.envs import LocalEnvs, resolve
from remuda.fast.agreement import GradientFunction
from remuda.fast.policy_agent import FastCategorical
from remuda.fast.policy_losses import policy_gradients, ppo_losses
from remuda.learning.gradients import Gradients
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.weights import LocalWeights
from remuda.nets import MLP
from remuda.runs.train import make_recipe
from remuda.sampling.sampler import EnvSampler

MULTI = Space("multibinary", (3,), "int8", n=3)


def by_hand(algorithm: Any, batch: Batch, clock: Clock) -> Gradients:
    """Return the hand-written gradients, without comparing them with autograd."""
    checked = fast.find(algorithm)
    assert checked is not None
    assert checked.compute is not None
    found = checked.compute(batch, clock)
    assert found is not None
    return found


def learner_of(algorithm: Any) -> Learner:
    return Learner(algorithm, OptimizerOptions(), lambda p: 1e-3, None, fast_path=fast.find(algorithm))


def agent_of(action: Space, observation: Space | None = None, hidden: Any = (16, 8), **options: Any) -> Any:
    activation = options.pop("activation", "tanh")
    torch.manual_seed(1)
    agent = PolicyAgent(
        observation or box((3,)), action, lambda shape: MLP(shape, hidden, activation, False), **options
    )
    with torch.no_grad():  # far from uniform
        agent.policy_head.linear.weight.mul_(3)
    return agent


def moved_batch(algorithm: Any, seed: int = 1) -> Batch:
    """Return rows of a policy that has changed since it acted, so that some ratios and values are clipped."""
    rollout = make_rollout(algorithm.agent, T=16, B=4, seed=seed)
    flat = algorithm.prepare(rollout).flatten()
    batch = flat.rows(flat.steps.mask)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in algorithm.agent.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return batch


def assert_same(algorithm: Any, batch: Batch, clock: Clock = Clock(progress=0.5)) -> None:  # noqa: B008
    losses = algorithm.losses(batch, clock)
    parameters = algorithm.groups()["policy"]
    exact = torch.autograd.grad(losses.groups["policy"], parameters, allow_unused=True)
    flat = [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(exact, parameters, strict=True)]
    found = by_hand(algorithm, batch, clock)
    torch.testing.assert_close(found.groups["policy"], torch.cat(flat), rtol=1e-3, atol=1e-6)
    assert found.stop == losses.stop
    assert set(found.metrics) == set(losses.metrics)
    for name, value in losses.metrics.items():
        assert float(found.metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name


OBSERVATIONS = {"vector": box((3,)), "discrete": discrete(5), "table": box((2, 3)), "bytes": box((3,), "uint8")}
ACTIONS = {"discrete": discrete(4), "two": discrete(2), "box": box((2,)), "scalar": box(())}


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shared", [False, True], ids=["two nets", "shared"])
@pytest.mark.parametrize("action", ACTIONS)
def test_gradients_of_ppo(action: str, shared: bool, activation: str) -> None:
    agent = agent_of(ACTIONS[action], shared=shared, activation=activation)
    ppo = PPO(agent, 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2, ent_coef=0.05)
    assert_same(ppo, moved_batch(ppo))


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_gradients_of_every_kind_of_observation(observation: str) -> None:
    space = OBSERVATIONS[observation]
    agent = agent_of(discrete(3), space, normalize_obs=space.kind == "box")
    if agent.inputs.has_statistics:
        agent.inputs.update(torch.randn(50, *space.shape) * 3 + 1)
    ppo = PPO(agent, 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2)
    assert_same(ppo, moved_batch(ppo))


@pytest.mark.parametrize(
    "options",
    [
        {"clip_range_vf": lambda p: 0.1},
        {"clip_range_vf": lambda p: 10.0},
        {"ent_coef": lambda p: 0.1 * p, "vf_coef": 0.25},
        {"normalize_advantage": False},
        {"target_kl": 1e-4},
        {"target_kl": 1e4},
    ],
    ids=[
        "values clipped",
        "values hardly clipped",
        "entropy by progress",
        "raw advantages",
        "stops",
        "does not stop",
    ],
)
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_gradients_of_every_option_of_ppo(action: str, options: dict[str, Any]) -> None:
    ppo = PPO(agent_of(ACTIONS[action]), 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2, **options)
    for seed in range(3):
        assert_same(ppo, moved_batch(ppo, seed))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
def test_gradients_of_a2c(action: str, normalize: bool) -> None:
    a2c = A2C(agent_of(ACTIONS[action]), 4, gamma=0.9, gae_lambda=0.9, ent_coef=0.1, normalize_advantage=normalize)
    assert_same(a2c, moved_batch(a2c))


def test_gradient_of_a_single_row() -> None:
    ppo = PPO(agent_of(discrete(3)), 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2)
    assert_same(ppo, moved_batch(ppo).rows(slice(0, 1)))


@pytest.mark.parametrize("field", ["advantage", "value"])
def test_nan_in_targets_gives_non_finite_gradients(field: str) -> None:
    ppo = PPO(agent_of(discrete(3)), 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2)
    batch = moved_batch(ppo)
    getattr(batch.targets, field)[3] = math.nan
    assert not by_hand(ppo, batch, Clock()).groups["policy"].isfinite().all()


@pytest.mark.parametrize("action", ACTIONS)
def test_fast_actions_and_policy_outputs_equal_those_of_the_agent(action: str) -> None:
    agent = agent_of(ACTIONS[action])
    (_, width), obs = agent.noise[0], torch.randn(64, 3)
    noise = torch.rand(64, width) if ACTIONS[action].kind == "discrete" else torch.randn(64, width)
    with torch.no_grad():
        chosen, said, _ = agent.act(obs, None, None, noise)
        policy = fast.find_policy(agent)
        assert policy is not None
        assert policy.agrees_with(agent, obs, noise)
        torch.testing.assert_close(policy.choose(obs, noise), chosen)
        torch.testing.assert_close(tuple(policy.evaluate_actions(obs, chosen)), tuple(said), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("action", "options"),
    [
        (MULTI, {}),
        (discrete(3), {"core": "lstm"}),
        (discrete(3), {"hidden": (256,)}),
        (discrete(3), {"hidden": ()}),
        (discrete(3), {"activation": "silu"}),
    ],
    ids=["multibinary", "memory", "wide", "no layers", "silu"],
)
def test_other_agents_have_no_fast_path(action: Space, options: dict[str, Any]) -> None:
    options = dict(options)
    hidden = options.pop("hidden", (16,))
    activation = options.pop("activation", "tanh")
    agent = PolicyAgent(box((3,)), action, lambda shape: MLP(shape, hidden, activation), **options)
    assert fast.find_policy(agent) is None
    assert fast.find(PPO(agent, 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2)) is None


@pytest.mark.parametrize("is_on", [True, False])
def test_option_turns_the_fast_path_on_and_off(is_on: bool) -> None:
    recipe = make_recipe(*resolve_config({"algo": "ppo", "env": "CartPole-v1"}, {"agent": {"fast_path": is_on}}))
    learner = recipe.make_learner()
    assert (learner._fast_path is not None) == is_on
    assert (learner.algorithm.agent.fast_policy is not None) == is_on


class WithPenalty(PPO):
    """A PPO with an additional loss term and no fast path of its own."""

    def losses(self, batch: Batch, clock: Clock) -> Losses:
        found = super().losses(batch, clock)
        penalty = self.agent.policy_head.linear.weight.square().sum()
        return Losses({"policy": found.groups["policy"] + penalty}, found.metrics)


class WithMore(PPO):
    """A PPO with a parameter outside of the agent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.more = torch.nn.Parameter(torch.ones(2))

    def groups(self) -> dict[str, list[torch.nn.Parameter]]:
        return {"policy": [*self.agent.parameters(), self.more]}


def test_other_parameter_groups_use_autograd() -> None:
    ppo = WithMore(agent_of(discrete(3)), 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2)
    learner = learner_of(ppo)
    batch = moved_batch(ppo)
    assert learner.gradients(batch).groups["policy"].shape == learner.vectors["policy"].shape


def test_reparametrized_layers_have_no_fast_path() -> None:
    def make(shape: Any) -> MLP:
        net = MLP(shape, (16,), "tanh")
        torch.nn.utils.parametrizations.weight_norm(net.layers[0])
        return net

    assert fast.find_policy(PolicyAgent(box((3,)), discrete(4), make)) is None


class Mistaken(PPO):
    """A PPO registered with the gradients of another loss; with `grows`, the error is proportional to progress."""

    def __init__(self, *args: Any, grows: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.grows = grows

    def losses(self, batch: Batch, clock: Clock) -> Losses:
        found = super().losses(batch, clock)
        weight = clock.progress if self.grows else 1.0
        penalty = weight * self.agent.policy_head.linear.weight.square().sum()
        return Losses({"policy": found.groups["policy"] + penalty}, found.metrics)


@fast.register(Mistaken, PolicyAgent)
def mistaken_gradients(ppo: Mistaken) -> GradientFunction | None:
    return policy_gradients(ppo, ppo_losses)


def by_autograd(algorithm: Any, batch: Batch, clock: Clock) -> Tensor:
    parameters = algorithm.groups()["policy"]
    found = torch.autograd.grad(algorithm.losses(batch, clock).groups["policy"], parameters)
    return torch.cat([gradient.flatten() for gradient in found])


def test_subclass_that_overrides_losses_uses_autograd(caplog: pytest.LogCaptureFixture) -> None:
    ppo = WithPenalty(agent_of(discrete(3)), 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2)
    batch = moved_batch(ppo)
    assert fast.find(ppo) is None
    learner = learner_of(ppo)
    assert torch.equal(learner.gradients(batch).groups["policy"], by_autograd(ppo, batch, learner.clock))
    assert not caplog.records


def test_gradients_of_another_loss_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    ppo = Mistaken(agent_of(discrete(3)), 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2, grows=False)
    learner = learner_of(ppo)
    batch = moved_batch(ppo)
    for _ in range(3):
        assert torch.equal(learner.gradients(batch).groups["policy"], by_autograd(ppo, batch, learner.clock))
    assert [record.message for record in caplog.records] == [
        "Mistaken: fast-path gradient disagrees with autograd; falling back to autograd."
    ]


def is_fast(learner: Learner) -> bool:
    path = learner._fast_path
    assert isinstance(path, fast.CheckedGradients)
    return path.compute is not None


def constant_advantages(batch: Batch) -> Batch:
    """Return the batch with almost equal advantages, which are rounding errors after normalization."""
    noise = torch.rand(len(batch.targets.advantage), generator=torch.Generator().manual_seed(0))
    return replace(batch, targets=batch.targets.replace(advantage=3.3 + 2e-7 * noise))


def test_constant_advantages_do_not_drop_the_fast_path(caplog: pytest.LogCaptureFixture) -> None:
    """Normalized, they may differ between the paths, which compute the mean in another order of additions."""
    for seed in range(10):
        ppo = PPO(agent_of(discrete(3)), 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2, vf_coef=1e-4)
        learner = learner_of(ppo)
        learner.step(constant_advantages(moved_batch(ppo, seed=seed)))
        assert is_fast(learner)
    assert not caplog.records


@pytest.mark.parametrize("is_first_constant", [True, False])
def test_wrong_gradient_is_detected_after_constant_advantages_too(
    is_first_constant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ppo = Mistaken(agent_of(discrete(3)), 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2, grows=False)
    learner = learner_of(ppo)
    batch = moved_batch(ppo)
    learner.step(constant_advantages(batch) if is_first_constant else batch)
    for _ in range(12):
        learner.step(batch)
    assert not is_fast(learner)
    assert len(caplog.records) == 1


def test_loss_that_changes_later_is_detected_once_updates_have_doubled() -> None:
    ppo = Mistaken(agent_of(discrete(3)), 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2, grows=True)
    learner = learner_of(ppo)
    batch = moved_batch(ppo)
    learner.step(batch)
    learner.set_progress(0.5)
    for _ in range(3):
        learner.step(batch)
    assert torch.equal(learner.gradients(batch).groups["policy"], by_autograd(ppo, batch, learner.clock))


class Cold(PolicyAgent):
    """An agent that acts with half of the noise."""

    def act(self, obs: Any, state: Any, explore: Tensor | None, noise: Tensor) -> Any:
        return super().act(obs, state, explore, noise * 0.5)


def test_subclass_that_overrides_act_has_no_fast_path() -> None:
    assert fast.find_policy(Cold(box((3,)), discrete(4), lambda shape: MLP(shape, (16,), "tanh"))) is None


def test_fast_policy_that_acts_differently_is_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FastCategorical, "sample", lambda self, outputs, noise: outputs.argmax(-1))
    agent = agent_of(discrete(4))
    with caplog.at_level(logging.WARNING), torch.no_grad():
        policy = fast.find_policy(agent)
        assert policy is not None
        assert not policy.agrees_with(agent, torch.randn(32, 3), torch.rand(32, 1))
    assert "PolicyAgent: fast-path actions disagree with act(); falling back to act()." in caplog.text
    envs = LocalEnvs(resolve("CartPole-v1"), 32)
    sampler = EnvSampler(envs, agent_of(discrete(2), box((4,))), LocalWeights(), 4, seed=3)
    sampler.agent.fast_policy = fast.find_policy(sampler.agent)
    sampler.reset(3)
    sampler.collect()
    sampler.close()
    assert sampler._fast_policy is None


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_copied_agent_has_its_own_gradients(action: str) -> None:
    ppo = PPO(agent_of(ACTIONS[action]), 4, gamma=0.9, gae_lambda=0.9, clip_range=lambda p: 0.2, ent_coef=0.1)
    batch = moved_batch(ppo)
    ppo.agent.fast_policy = fast.find_policy(ppo.agent)
    copied = copy.deepcopy(ppo)
    before = by_hand(ppo, batch, Clock()).groups["policy"]
    with torch.no_grad():
        for parameter in copied.agent.parameters():
            parameter.mul_(0.5)
    assert_same(copied, batch)
    assert torch.equal(by_hand(ppo, batch, Clock()).groups["policy"], before)
    width = copied.agent.noise[0][1]
    noise = torch.rand(len(batch.steps.mask), width)
    with torch.no_grad():
        assert copied.agent.fast_policy.agrees_with(copied.agent, batch.steps.obs, noise)


def test_rollouts_with_and_without_the_fast_path_are_equal() -> None:
    rollouts = []
    for is_fast in (True, False):
        envs = LocalEnvs(resolve("CartPole-v1"), 4)
        agent = make_agent(box((4,)), discrete(2))
        agent.fast_policy = fast.find_policy(agent) if is_fast else None
        sampler = EnvSampler(envs, agent, LocalWeights(), 64, seed=3)
        sampler.reset(3)
        rollouts.append(sampler.collect())
        sampler.close()
    one, other = (rollout.steps for rollout in rollouts)
    for field in ("obs", "action", "reward", "mask"):
        assert torch.equal(getattr(one, field), getattr(other, field)), field
    torch.testing.assert_close(tuple(one.policy), tuple(other.policy), rtol=1e-4, atol=1e-5)
