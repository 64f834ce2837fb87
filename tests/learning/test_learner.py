"""Tests of the learner: `gradients` changes no parameter, `apply` steps once, non-finite gradients are skipped."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollouts import box, discrete, make_agent, make_rollout
from torch import Tensor, nn

from remuda.algorithms import A2C, PPO
from remuda.core import Clock, Losses
from remuda.data import Batch
from remuda.errors import ConfigError, TrainingError
from remuda.learning.gradients import Pieces
from remuda.learning.learner import MAX_BAD_UPDATES, Learner
from remuda.learning.optimizers import LARGE, OptimizerOptions, make_optimizer, norm
from remuda.learning.schedules import parse_schedule
from remuda.learning.weights import LocalWeights
from remuda.nets.conv import NatureCNN
from remuda.replay import RolloutBuffer


class Toy(nn.Module):
    """A fake algorithm with two parameter groups whose losses share one graph."""

    agent = None

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, -2.0]))
        self.b = nn.Parameter(torch.tensor([[0.5], [4.0]]))
        self.unused = nn.Parameter(torch.ones(3))
        self.updates: list[Clock] = []

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"first": [self.a], "second": [self.b, self.unused]}

    def losses(self, batch: Any, clock: Clock) -> Losses:
        shared = (self.a * batch).sum()  # both losses share this graph
        first = shared + 0.5 * self.a.square().sum()
        second = (shared * self.b).sum()
        return Losses({"first": first, "second": second}, {"loss": first.detach(), "clip": 0.5})

    def after_update(self, clock: Clock) -> None:
        self.updates.append(clock)

    def prepare(self, rollout: Any) -> Any:
        raise NotImplementedError

    def reward_statistics(self, rollout: Any) -> Any:
        raise NotImplementedError

    def obs_statistics(self, rollout: Any) -> Any:
        raise NotImplementedError

    def absorb(self, statistics: Any) -> None:
        raise NotImplementedError


def make_toy(rate: str = "0.1", max_grad_norm: float | None = None, **options: Any) -> tuple[Toy, Learner]:
    toy = Toy()
    return toy, Learner(toy, OptimizerOptions(**options), parse_schedule(rate), max_grad_norm)  # type: ignore[arg-type]


def copies(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def equal(before: list[Tensor], module: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


BATCH: Any = torch.tensor([3.0, 5.0])
BAD: Any = torch.tensor([3.0, math.nan])


def test_gradients_leave_every_parameter_as_it_was() -> None:
    toy, learner = make_toy()
    before = copies(toy)
    found = learner.gradients(BATCH)
    assert equal(before, toy)
    assert all(parameter.grad is None for parameter in toy.parameters())
    assert (found.version, learner.version, toy.updates) == (0, 0, [])
    learner.apply(found)
    assert not equal(before, toy)
    assert (learner.version, toy.updates) == (1, [Clock(1, 0.0)])
    assert all(parameter.grad is None for parameter in toy.parameters())


def test_each_group_gets_the_gradient_of_its_own_loss() -> None:
    toy, learner = make_toy()
    groups = learner.gradients(BATCH).groups
    shared = float((toy.a.detach() * BATCH).sum())
    assert groups["first"].tolist() == [3 + 1, 5 - 2]  # the second loss, which also depends on a, does not contribute
    assert groups["second"].tolist() == [shared, shared, 0, 0, 0]  # the unused parameter has zero gradient


def test_parameters_are_views_of_one_vector_in_each_group() -> None:
    toy, learner = make_toy()
    assert learner.vectors["second"].tolist() == [0.5, 4.0, 1.0, 1.0, 1.0]
    with torch.no_grad():
        learner.vectors["second"][1] = 7.0
    assert toy.b.tolist() == [[0.5], [7.0]]
    toy.load_state_dict({name: torch.zeros_like(value) for name, value in toy.state_dict().items()})
    assert not learner.vectors["second"].any()


def test_parameters_of_different_dtypes_are_refused() -> None:
    toy = Toy()
    toy.unused.data = toy.unused.data.double()
    with pytest.raises(ConfigError, match="different dtypes"):
        Learner(toy, OptimizerOptions(), parse_schedule("0.1"), None)  # type: ignore[arg-type]


def test_all_groups_are_computed_before_any_is_stepped() -> None:
    # With an epsilon of 1e6 and a rate of 1e5, RMSprop is gradient descent with a rate of 0.1.
    toy, learner = make_toy(name="rmsprop", rate="1e5", epsilon=1e6)
    learner.step(BATCH)
    assert toy.a.tolist() == pytest.approx([1 - 0.1 * 4, -2 - 0.1 * 3], rel=1e-4)
    assert toy.b.flatten().tolist() == pytest.approx(
        [0.5 + 0.1 * 7, 4 + 0.1 * 7], rel=1e-4
    )  # 7 comes from `a` before its step


def by_torch(name: str, vector: Tensor, decay: float, momentum: float) -> torch.optim.Optimizer:
    if name == "rmsprop":
        return torch.optim.RMSprop(
            [vector], alpha=0.9, eps=1e-5, weight_decay=decay, momentum=momentum, foreach=False
        )
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind([vector], eps=1e-5, weight_decay=decay, foreach=False, fused=False)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop"])
@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 0, 1, 1]])
def test_optimizers_equal_those_of_torch(sizes: list[int], name: str, decay: float, momentum: float) -> None:
    """Gradients are given in one piece and in several."""
    expected = torch.tensor([1.0, -2.0, 0.5, 4.0])
    vector = expected.detach().clone()
    reference = by_torch(name, expected, decay, momentum)
    mine = make_optimizer(vector, OptimizerOptions(name, 1e-5, decay, rms_alpha=0.9, momentum=momentum))
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        rate = 0.05 / (1 + step)
        expected.grad = torch.randn(4, generator=generator)
        mine.step(expected.grad.clone().split(sizes), rate)
        reference.param_groups[0]["lr"] = rate
        reference.step()
    torch.testing.assert_close(vector.detach(), expected, atol=1e-6, rtol=1e-5)


class Images(Toy):
    """A net whose convolution gradients have another memory format than their weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = NatureCNN((4, 36, 36), features=8)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"net": list(self.net.parameters())}

    def losses(self, batch: Any, clock: Clock) -> Losses:
        return Losses({"net": self.net(batch).square().mean()}, {})


@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_learning_from_images_equals_torch(max_grad_norm: float | None) -> None:
    images = torch.rand(5, 4, 36, 36, generator=torch.Generator().manual_seed(4))
    mine, theirs = Images(), Images()
    learner = Learner(mine, OptimizerOptions(), parse_schedule("0.01"), max_grad_norm)  # type: ignore[arg-type]
    parameters = list(theirs.net.parameters())
    reference = torch.optim.Adam(parameters, lr=0.01, eps=1e-5)
    for _ in range(5):
        assert not all(
            p.is_contiguous() for p in torch.autograd.grad(mine.net(images).sum(), learner.parameters["net"])
        )
        metrics = learner.step(images).metrics
        reference.zero_grad()
        theirs.losses(images, Clock()).groups["net"].backward()  # type: ignore[no-untyped-call]
        found = nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
        reference.step()
        assert metrics["grad_norm"] == pytest.approx(float(found), rel=1e-4)
    for mine_now, theirs_now in zip(mine.net.parameters(), parameters, strict=True):
        torch.testing.assert_close(mine_now, theirs_now, atol=1e-5, rtol=1e-3)


def test_adam_by_worked_numbers() -> None:
    """After bias correction the first step is rate * g / (|g| + eps)."""
    toy, learner = make_toy(rate="0.01", epsilon=1.0)
    learner.step(BATCH)
    assert toy.a.tolist() == pytest.approx([1 - 0.01 * 4 / 5, -2 - 0.01 * 3 / 4])


def spy_on_steps(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Replace the optimizer steps and return the norms of the gradients that they receive."""
    seen: dict[str, float] = {}
    for name, optimizer in learner.optimizers.items():

        def step(gradient: Pieces, rate: float, name: str = name) -> None:
            seen[name] = float(torch.cat(gradient).norm())

        monkeypatch.setattr(optimizer, "step", step)
    return seen


def test_gradients_are_clipped_by_their_norm_in_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, learner = make_toy(max_grad_norm=6.0)
    shared = abs(float((toy.a.detach() * BATCH).sum()))
    seen = spy_on_steps(learner, monkeypatch)
    metrics = learner.step(BATCH).metrics
    assert seen["first"] == pytest.approx(5.0)  # below the limit, hence not clipped
    assert seen["second"] == pytest.approx(6.0, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(2) * shared)  # the norm before clipping


def test_max_grad_norm_none_never_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    _, learner = make_toy()
    seen = spy_on_steps(learner, monkeypatch)
    learner.step(BATCH * 1e3)
    assert seen["second"] > 1e3


def test_learning_rate_is_set_before_every_update() -> None:
    toy, learner = make_toy(rate="linear(0.1, 0)", epsilon=1e-12)
    for progress, rate in ((0.0, 0.1), (0.5, 0.05), (1.0, 0.0), (7.0, 0.0)):
        learner.set_progress(progress)
        before = toy.unused.detach().clone(), toy.a.detach().clone()
        metrics = learner.step(BATCH).metrics
        assert metrics["learning_rate"] == pytest.approx(rate)
        assert (toy.a.detach() - before[1]).abs().max().item() == pytest.approx(rate, rel=0.05, abs=1e-7)
        assert torch.equal(toy.unused.detach(), before[0])
    assert learner.version == 4


def test_parameter_group_can_have_its_own_learning_rate() -> None:
    toy = Toy()
    own_rates = {"second": parse_schedule("linear(0.4, 0)")}
    learner = Learner(toy, OptimizerOptions(epsilon=1e-12), parse_schedule("0.1"), None, own_rates=own_rates)  # type: ignore[arg-type]
    for progress, own_rate in ((0.0, 0.4), (0.5, 0.2), (1.0, 0.0)):
        learner.set_progress(progress)
        before = toy.a.detach().clone(), toy.b.detach().clone()
        learner.step(BATCH)
        assert (toy.a.detach() - before[0]).abs().max().item() == pytest.approx(0.1, rel=0.05)
        assert (toy.b.detach() - before[1]).abs().max().item() == pytest.approx(own_rate, rel=0.05, abs=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_gradients_are_skipped_and_counted(bad: float) -> None:
    toy, learner = make_toy(max_grad_norm=0.5)
    learner.step(BATCH)
    before, state = copies(toy), learner.state_dict()
    moments = {key: value.clone() for key, value in state["optimizers"]["first"].items()}
    metrics = learner.step(torch.tensor([3.0, bad])).metrics  # type: ignore[arg-type]
    assert equal(before, toy)
    now = learner.state_dict()["optimizers"]["first"]
    assert all(torch.equal(moments[key], now[key]) for key in moments)
    assert metrics["skipped_updates"] == 1
    assert (learner.skipped, learner.version, len(toy.updates)) == (1, 1, 1)
    learner.step(BATCH)
    assert learner.version == 2
    assert not equal(before, toy)


def test_ten_consecutive_skipped_updates_raise_an_error() -> None:
    toy, learner = make_toy()
    for _ in range(MAX_BAD_UPDATES - 1):
        learner.step(BAD)
    learner.step(BATCH)  # a finite gradient resets the count
    before = copies(toy)
    for _ in range(MAX_BAD_UPDATES - 1):
        learner.step(BAD)
    with pytest.raises(TrainingError) as caught:
        learner.step(BAD)
    message = str(caught.value)
    assert message.startswith("gradients were not finite in 10 updates in a row after update 1 ")
    assert "'loss': nan" in message
    assert message.endswith(".")
    assert "\n" not in message
    assert learner.skipped == 2 * MAX_BAD_UPDATES - 1
    assert equal(before, toy)


def test_error_of_skipped_updates_names_no_losses_if_there_are_none() -> None:
    """The metrics of several parts are not those of the combined gradients."""
    _, learner = make_toy()
    gradients = replace(learner.gradients(BAD), metrics={})
    for _ in range(MAX_BAD_UPDATES - 1):
        learner.apply(gradients)
    with pytest.raises(TrainingError, match=r"in a row after update 0: lower the learning rate"):
        learner.apply(gradients)


def make_real(kind: str, seed: int, optimizer: str = "adam") -> Learner:
    agent = make_agent(action=box((2,)) if kind == "ppo" else discrete(4), seed=seed, normalize_obs=True)
    options: dict[str, Any] = {"gamma": 0.99, "gae_lambda": 0.95, "normalize_reward": True}
    algorithm = PPO(agent, 4, clip_range=lambda p: 0.2, **options) if kind == "ppo" else A2C(agent, 4, **options)
    return Learner(algorithm, OptimizerOptions(optimizer), parse_schedule("linear(1e-2, 0)"), 0.5)


def learn_rounds(learner: Learner, rounds: range) -> None:
    replay = RolloutBuffer(2, 8, 0, first_round=rounds.start)
    for number in rounds:
        rollout = make_rollout(learner.algorithm.agent, seed=number)
        learner.set_progress(number / 10)
        replay.add(learner.prepare(rollout))
        for batch in replay.batches():
            learner.step(batch)
        learner.finish(rollout)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
@pytest.mark.parametrize("kind", ["ppo", "a2c"])
def test_loaded_state_continues_bit_equal(kind: str, optimizer: str) -> None:
    first, second = make_real(kind, 0, optimizer), make_real(kind, 1, optimizer)
    learn_rounds(first, range(3))
    first.step(bad_batch(first))
    # Without a copy both learners would share the optimizer's tensors, as with torch's load_state_dict.
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert (second.version, second.clock, second.skipped) == (first.version, first.clock, 1)
    first_moments = first.optimizers["policy"].state_dict()
    second_moments = second.optimizers["policy"].state_dict()
    for learner in (first, second):
        learn_rounds(learner, range(3, 5))
    assert first.version == second.version == 5 * 8
    for (name, a), b in zip(
        first.algorithm.state_dict().items(), second.algorithm.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    for key, moments in first_moments.items():
        assert moments is None or torch.equal(moments, second_moments[key])


def bad_batch(learner: Learner) -> Batch:
    rollout = make_rollout(learner.algorithm.agent, seed=99)
    flat = learner.prepare(rollout).flatten()
    flat.targets.advantage[0] = math.nan
    return flat


def test_prepare_needs_no_gradient() -> None:
    learner = make_real("ppo", 0)
    batch = learner.prepare(make_rollout(learner.algorithm.agent))
    assert not batch.targets.advantage.requires_grad
    assert not batch.targets.value.requires_grad


def test_local_weights_change_only_their_version() -> None:
    weights = LocalWeights(3)
    assert weights.pull(-1) == 3
    weights.publish(8)
    assert weights.pull(3) == 8


@pytest.mark.parametrize("sizes", [[3], [LARGE], [LARGE + 1], [3, LARGE, 5], [LARGE, 2 * LARGE + 8]])
def test_norm_is_that_of_all_pieces(sizes: list[int]) -> None:
    pieces = tuple(torch.randn(size) for size in sizes)
    assert norm(pieces) == pytest.approx(float(torch.cat(pieces).double().norm()), rel=1e-5)
