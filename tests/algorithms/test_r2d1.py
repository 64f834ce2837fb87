"""Tests of R2D1 against an LSTM and a GRU written in numpy, one sequence at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rollouts import box, discrete
from test_off_policy import copies, drawn_sequences, is_same, make_learner, numbers, shaken
from torch import nn

from remuda.agents import QAgent
from remuda.algorithms import DQN, R2D1
from remuda.algorithms.off_policy import Rows
from remuda.config.algo_options import R2D1Options
from remuda.core import Clock
from remuda.data import Batch, map_tree
from remuda.nets import MLP

Floats = NDArray[np.float64]
ACTIONS, SIZE, BURN_IN, LENGTH, EPSILON = 4, 4, 3, 6, 1e-3
CORES = pytest.mark.parametrize("core", ["lstm", "gru"])


# --- rescaled values ---


def h(x: float) -> float:
    """Rescale a value as in proposition A.2 of arXiv:1805.11593."""
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + EPSILON * x


def h_inverse(x: float) -> float:
    root = (math.sqrt(1 + 4 * EPSILON * (abs(x) + 1 + EPSILON)) - 1) / (2 * EPSILON)
    return math.copysign(root * root - 1, x)


def rows_of(reward: list[float], discount: list[float]) -> Rows:
    return Rows(None, torch.tensor(reward), torch.tensor(discount), 1.0)


def make_agent(core: Any = "lstm", seed: int = 0, **options: Any) -> QAgent:
    torch.manual_seed(seed)
    agent = QAgent(box((3,)), discrete(ACTIONS), lambda shape: MLP(shape, (5,)), core=core, core_size=SIZE, **options)
    for parameter in agent.head.parameters():
        nn.init.normal_(parameter)
    return agent


def make_r2d1(agent: QAgent | None = None, **options: Any) -> R2D1:
    options = {"delta": None, "burn_in": BURN_IN, **options}
    r2d1 = R2D1(agent or make_agent(), 0, **options)
    shaken(r2d1.target)
    return r2d1


def test_reference_rescaling_and_its_inverse_agree() -> None:
    for x in (-250.0, -3.0, -0.1, 0.0, 0.5, 21.0, 1e4):
        assert h_inverse(h(x)) == pytest.approx(x, abs=1e-7)


def test_targets_apply_the_inverse_rescaling_then_the_rescaling() -> None:
    """Targets are h(r + discount * h^-1(q)), computed here in float64."""
    rng = np.random.default_rng(0)
    reward, discount = rng.normal(size=200) * 10, rng.choice([0.0, 0.9, 0.997**5], 200)
    q = rng.normal(size=200) * 8
    rows = rows_of(reward.tolist(), discount.tolist())
    found = make_r2d1().target_value(rows, torch.tensor(q, dtype=torch.float32))
    expected = [h(r + g * h_inverse(value)) for r, g, value in zip(reward, discount, q, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_targets_by_worked_numbers() -> None:
    """With h(3) = 1.003 and h(8) = 2.008, reward 5 and next value 1.003 give the target h(5 + 3) = 2.008."""
    found = make_r2d1().target_value(rows_of([5.0, 0.0, 3.0, -9.0], [1.0, 0.0, 0.0, 2.0]), torch.tensor([1.003] * 4))
    assert found.tolist() == pytest.approx([2.008, 0.0, 1.003, -1.003], abs=1e-4)


def test_targets_without_rescaling() -> None:
    found = make_r2d1(rescaled=False).target_value(rows_of([5.0, 1.0], [0.5, 0.0]), torch.tensor([4.0, 4.0]))
    assert found.tolist() == [7.0, 1.0]


# --- sequences ---


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def cell(layer: Any, x: Floats, state: dict[str, Floats]) -> dict[str, Floats]:
    """Compute one row of one sequence with the equations that torch documents for LSTM and GRU."""
    inner = numbers(layer.weight_ih_l0) @ x + numbers(layer.bias_ih_l0)
    past = numbers(layer.weight_hh_l0) @ state["h"] + numbers(layer.bias_hh_l0)
    if isinstance(layer, nn.LSTM):
        i, f, g, o = np.split(inner + past, 4)
        c = sigmoid(f) * state["c"] + sigmoid(i) * np.tanh(g)
        return {"h": sigmoid(o) * np.tanh(c), "c": c}
    (r, z, n), (past_r, past_z, past_n) = np.split(inner, 3), np.split(past, 3)
    r, z = sigmoid(r + past_r), sigmoid(z + past_z)
    n = np.tanh(n + r * past_n)
    return {"h": (1 - z) * n + z * state["h"]}


def slow_values(agent: QAgent, batch: Batch) -> Floats:
    """Return values [R, S, A], each sequence starting at its stored state, with resets after reset rows."""
    obs, mask = numbers(batch.steps.obs), batch.steps.mask.tolist()
    net, head = agent.trunk.net.layers[0], agent.head.advantage.layers[0]
    core = agent.trunk.core
    assert core is not None
    R, S = len(mask), len(mask[0])
    out = np.zeros((R, S, ACTIONS))
    for s in range(S):
        state = {name: numbers(part)[s] for name, part in batch.state.items()}
        for r in range(R):
            if r > 0 and not mask[r - 1][s]:
                state = {name: np.zeros(SIZE) for name in state}
            x = np.tanh(numbers(net.weight) @ obs[r, s] + numbers(net.bias))
            state = cell(core.layer, x, state)
            advantage = numbers(head.weight) @ state["h"] + numbers(head.bias)
            if agent.head.state is not None:
                value = agent.head.state.layers[0]
                advantage = advantage - advantage.mean() + numbers(value.weight) @ state["h"] + numbers(value.bias)
            out[r, s] = advantage
    return out


def make_batch(agent: QAgent, seed: int = 0, **options: Any) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    state = map_tree(lambda x: torch.randn(x.shape, generator=generator) * 0.5, agent.initial_state(4))
    return drawn_sequences(discrete(ACTIONS), state, burn_in=BURN_IN, length=LENGTH, seed=seed, **options)


def slow_errors(r2d1: R2D1, batch: Batch) -> dict[tuple[int, int], float]:
    """Return the errors of real rows by (row after the burn-in, sequence)."""
    now, later = slow_values(r2d1.agent, batch), slow_values(r2d1.target, batch)
    out = {}
    for t in range(LENGTH):
        for s in range(4):
            if not batch.steps.mask[BURN_IN + t, s]:
                continue
            row = int(batch.targets.row[t, s])
            best = int((now if r2d1.is_double else later)[row, s].argmax())
            r, discount, q = (
                float(batch.targets.reward[t, s]),
                float(batch.targets.discount[t, s]),
                later[row, s, best],
            )
            goal = h(r + discount * h_inverse(q)) if r2d1.rescaled else r + discount * q
            out[t, s] = goal - now[BURN_IN + t, s, int(batch.steps.action[BURN_IN + t, s])]
    return out


@CORES
@pytest.mark.parametrize("options", [{}, {"double": False}, {"rescaled": False, "eta": 0.3}, {"delta": 0.5}], ids=str)
@pytest.mark.parametrize(("seed", "n"), [(0, 2), (1, 1), (2, 4)])
def test_loss_and_priorities_against_loops_over_sequences(
    core: Any, options: dict[str, Any], seed: int, n: int
) -> None:
    r2d1 = make_r2d1(make_agent(core), **options)
    batch = make_batch(r2d1.agent, seed, n=n, has_weight=True)
    losses, errors = r2d1.losses(batch, Clock()), slow_errors(r2d1, batch)
    total = 0.0
    for (_, s), error in errors.items():
        size, delta = abs(error), options.get("delta")
        each = 0.5 * size**2 if delta is None or size <= delta else delta * (size - 0.5 * delta)
        total += float(batch.weight[s]) ** 0.4 * each
    assert losses.groups["q"].item() == pytest.approx(total / len(errors), rel=1e-4)
    eta = options.get("eta", 0.9)
    expected = []
    for s in range(4):
        own = [abs(error) for (_, column), error in errors.items() if column == s]
        expected.append(eta * max(own) + (1 - eta) * sum(own) / len(own))
    assert losses.priority is not None
    np.testing.assert_allclose(losses.priority, expected, rtol=1e-3, atol=1e-4)


def test_dueling_values_from_memory() -> None:
    r2d1 = make_r2d1(make_agent(dueling=True, head_hidden=0))
    batch = make_batch(r2d1.agent)
    losses, errors = r2d1.losses(batch, Clock()), slow_errors(r2d1, batch)
    expected = sum(0.5 * error**2 for error in errors.values()) / len(errors)
    assert losses.groups["q"].item() == pytest.approx(expected, rel=1e-4)


def test_reset_rows_and_burn_in_rows_enter_no_loss() -> None:
    """Actions and targets stored in these rows change neither loss nor priority."""
    r2d1 = make_r2d1()
    batch = make_batch(r2d1.agent)
    steps, targets = batch.steps, batch.targets
    before = r2d1.losses(batch, Clock())
    action, reward, discount = steps.action.clone(), targets.reward.clone(), targets.discount.clone()
    action[:BURN_IN] = 0
    action[~steps.mask] = 1
    action[BURN_IN + LENGTH :] = 2
    masked = ~steps.mask[BURN_IN : BURN_IN + LENGTH]
    assert masked.sum() >= 2
    reward[masked], discount[masked] = 1e6, 1e6
    other = replace(
        batch, steps=steps.replace(action=action), targets=targets.replace(reward=reward, discount=discount)
    )
    after = r2d1.losses(other, Clock())
    assert before.groups["q"].item() == after.groups["q"].item()
    assert before.priority is not None
    assert after.priority is not None
    assert torch.equal(before.priority, after.priority)


def test_stored_state_and_burn_in_matter_until_the_first_reset() -> None:
    r2d1 = make_r2d1(eta=0.0)
    batch = make_batch(r2d1.agent)
    mask = torch.ones_like(batch.steps.mask)
    mask[1, 0] = False  # the stored state of sequence 0 is reset within its burn-in
    batch = replace(batch, steps=batch.steps.replace(mask=mask))
    zero = replace(batch, state=map_tree(torch.zeros_like, batch.state))
    a, b = (r2d1.losses(each, Clock()).priority for each in (batch, zero))
    assert a is not None
    assert b is not None
    assert a[0] == b[0]
    assert (a[1:] != b[1:]).all()


def test_gradients_reach_all_parameters_but_not_the_burn_in() -> None:
    """Without the burn-in rows, but with the state after them, the gradient is the same."""
    r2d1 = make_r2d1()
    batch = make_batch(r2d1.agent)
    mask = torch.ones_like(batch.steps.mask)
    mask[1, 0] = mask[5, 2] = False
    batch = replace(batch, steps=batch.steps.replace(mask=mask))
    loss = r2d1.losses(batch, Clock()).groups["q"]
    found = torch.autograd.grad(loss, list(r2d1.agent.parameters()))
    assert all((gradient != 0).any() for gradient in found)
    reset = torch.zeros(BURN_IN, 4, dtype=torch.bool)
    reset[2, 0] = True
    shorter = make_r2d1(r2d1.agent, burn_in=0)
    # Both nets are the online one here, so that there is one state after the burn-in.
    shorter.target, r2d1.target = r2d1.agent, r2d1.agent
    loss = r2d1.losses(batch, Clock()).groups["q"]
    found = torch.autograd.grad(loss, list(r2d1.agent.parameters()))
    with torch.no_grad():
        _, state = r2d1.agent.unroll(batch.steps.obs[:BURN_IN], batch.state, reset)
    targets = batch.targets.replace(row=batch.targets.row - BURN_IN)
    cut = replace(batch, steps=batch.steps[BURN_IN:], targets=targets, state=state)
    again = torch.autograd.grad(shorter.losses(cut, Clock()).groups["q"], list(r2d1.agent.parameters()))
    for a, b in zip(found, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_r2d1_without_rescaling_equals_dqn_on_sequences() -> None:
    r2d1 = make_r2d1(rescaled=False)
    dqn = DQN(r2d1.agent, 0, delta=None, burn_in=BURN_IN)
    dqn.target.load_state_dict(r2d1.target.state_dict())
    batch = make_batch(r2d1.agent, has_weight=True)
    a, b = (algorithm.losses(batch, Clock()) for algorithm in (r2d1, dqn))
    assert a.groups["q"].item() == b.groups["q"].item()
    assert a.priority is not None
    assert b.priority is not None
    assert torch.equal(a.priority, b.priority)


def test_learner_reduces_the_loss_and_saves_the_target_network() -> None:
    """The loss of a fixed batch decreases, and a learner with loaded state continues identically."""
    r2d1 = make_r2d1(target_interval=50)
    batch, learner = make_batch(r2d1.agent), make_learner(r2d1, "3e-3")
    first = learner.step(batch).metrics["loss"]
    for _ in range(30):
        last = learner.step(batch).metrics["loss"]
    assert last < 0.7 * first
    other = make_r2d1(make_agent(seed=9), target_interval=50)
    twin = make_learner(other, "3e-3")
    twin.load_state_dict(learner.state_dict())
    for _ in range(2):
        learner.step(batch)
        twin.step(batch)
    assert is_same(copies(r2d1), other)


def test_defaults_are_those_of_the_paper() -> None:
    options = R2D1Options()
    assert (options.rescale, options.eta, options.double, options.dueling) == (True, 0.9, True, True)
    assert options.huber is None, "the loss is half the squared error"
    r2d1 = R2D1(make_agent(), 0)
    assert (r2d1.rescaled, r2d1.eta, r2d1.is_double) == (True, 0.9, True)
