"""TD errors computed by samplers equal those that the algorithm computes for the same rows with the same networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rollouts import box, discrete

from remuda.agents import QAgent
from remuda.algorithms import DQN, R2D1
from remuda.core import Clock
from remuda.nets import MLP
from remuda.replay import (
    Priorities,
    RecurrentStates,
    ReplayCounters,
    Ring,
    Row,
    SequencePriority,
    SequenceReplay,
    TransitionPriority,
    TransitionReplay,
)

T, GROUPS, WIDTH, GAMMA, ALPHA = 6, 2, 2, 0.9, 0.7
ENVS = GROUPS * WIDTH
EXAMPLE = Row(np.zeros(3, np.float32), np.zeros((), np.int64), np.float32(0), np.float32(0), np.zeros((), bool))


def make_dqn(kind: Any = DQN, core: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    agent = QAgent(box((3,)), discrete(4), lambda shape: MLP(shape, (8,)), core=core, core_size=5)
    algorithm = kind(agent, 0, **options)
    with torch.no_grad():
        for parameter in algorithm.target.parameters():
            parameter.add_(1.0)  # a target network that samplers never receive
    return algorithm


class Source:
    """Generates rollouts of one group; each begins with the observations that followed the one before.

    Each rollout has a terminated step in row 2 and a reset row in row 3 of its first env.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.last = self.seen(1)[0]

    def seen(self, count: int) -> np.ndarray:
        return self.rng.standard_normal((count, WIDTH, 3)).astype(np.float32)

    def rows(self) -> tuple[Row, np.ndarray]:
        mask = np.ones((T, WIDTH), bool)
        mask[3, 0] = False
        discount = np.ones((T, WIDTH), np.float32)
        discount[2, 0] = 0.0
        reward = self.rng.standard_normal((T, WIDTH)).astype(np.float32) * mask
        obs = np.concatenate([self.last[None], self.seen(T)])
        self.last = obs[T]
        return Row(obs[:T], self.rng.integers(0, 4, (T, WIDTH)), reward, discount, mask), obs[T]


@pytest.mark.parametrize("n_step", [1, 3])
def test_rows_get_the_td_error_of_the_samplers_network(n_step: int) -> None:
    dqn, sources = make_dqn(), [Source(group) for group in range(GROUPS)]
    ring = Ring(EXAMPLE, 40, ENVS, GROUPS, has_td_error=True)
    updates = [TransitionPriority(ring, group, n_step, GAMMA, dqn.td_error) for group in range(GROUPS)]
    priorities = Priorities(ring, ALPHA, is_shared=True)
    settings: dict[str, Any] = {"batch_size": 16, "ratio": None, "warm_up": 0, "gamma": GAMMA, "seed": 0}
    replay = TransitionReplay(ring, n_step=n_step, priorities=priorities, is_shared=True, **settings)
    for _ in range(3):
        for group, priority in enumerate(updates):
            before = priorities.tree.total
            ring.append(*sources[group].rows(), group)
            replay.sync()
            assert priorities.tree.total == before, "rows have no priority before their TD error is known"
            priority.update()
            replay.sync()
            assert priorities.tree.total > before
    batch = replay.draw()
    error = dqn.losses(batch, Clock()).priority.numpy()  # td_error has set the target network to the network
    is_whole = batch.key[:, 0] % T + n_step <= T  # all its rewards were stored when its TD error was computed
    found = priorities.tree[priorities.index.place(batch.key)]
    np.testing.assert_allclose(found[is_whole], ((error + 1e-6) ** ALPHA)[is_whole], rtol=1e-4)
    assert is_whole.sum() > 3


def test_rows_of_a_lost_writer_get_the_largest_priority() -> None:
    dqn, source = make_dqn(), Source(2)
    ring = Ring(EXAMPLE, 40, ENVS, GROUPS, has_td_error=True)
    priorities = Priorities(ring, ALPHA, is_shared=True)
    settings: dict[str, Any] = {"batch_size": 8, "ratio": None, "warm_up": 0, "gamma": GAMMA, "seed": 0, "n_step": 1}
    replay = TransitionReplay(ring, priorities=priorities, is_shared=True, **settings)
    ring.append(*source.rows(), 0)
    TransitionPriority(ring, 0, 1, GAMMA, dqn.td_error).update()
    ring.append(*source.rows(), 1)  # without TD errors
    replay.sync()
    assert not priorities.tree[priorities.index.place(np.array([[0, 2], [5, 3]]))].any()
    replay.on_writer_lost(1)
    replay.sync()
    np.testing.assert_array_equal(
        priorities.tree[priorities.index.place(np.array([[0, 2], [3, 2], [5, 3], [6, 3]]))],
        [priorities.largest, 0.0, priorities.largest, 0.0],  # row 3 of env 2 and row 6 are reset rows
    )


@pytest.mark.parametrize("burn_in", [0, 2])
def test_sequences_get_the_td_error_of_the_samplers_network(burn_in: int) -> None:
    r2d1 = make_dqn(R2D1, "lstm", burn_in=burn_in, delta=None)
    sources = [Source(group) for group in range(GROUPS)]
    state, length, n_step = r2d1.agent.initial_state(1), 8, 2
    ring = Ring(EXAMPLE, 80, ENVS, GROUPS)
    settings: dict[str, Any] = {"batch_size": 12, "ratio": None, "warm_up": 0, "gamma": GAMMA, "seed": 0}
    lengths: dict[str, Any] = {"burn_in": burn_in, "length": length, "n_step": n_step, "interval": T}
    replay = SequenceReplay(ring, state, **settings, **lengths, priorities=ALPHA, is_shared=True, has_td_error=True)
    theirs = RecurrentStates(ring, state, T, replay.fds[-1], has_td_error=True)
    updates = [
        SequencePriority(theirs, group, (burn_in, length, n_step), GAMMA, r2d1.td_error) for group in range(GROUPS)
    ]
    for _ in range(6):
        for group, priority in enumerate(updates):
            own = r2d1.agent.initial_state(WIDTH)
            for part in own:
                part.normal_()
            theirs.store(own, group)
            ring.append(*sources[group].rows(), group)
            replay.sync()
            priority.update()
    replay.sync()
    assert replay.sequence_index is not None
    batch = replay.draw()
    number, env = batch.key.T
    error = r2d1.losses(batch, Clock()).priority.numpy()
    # The TD errors of the newest sequences were computed before the rows that they bootstrap from.
    is_old = (
        replay.sequence_index.row_of(number, env) + burn_in + length + n_step
        <= (replay.sequence_index.row_of(number, env) + burn_in + length + T - 1) // T * T
    )
    found = replay.sequence_index.tree[number % replay.sequence_index.room * ENVS + env]
    np.testing.assert_allclose(found[is_old], (error[is_old] + 1e-6) ** ALPHA, rtol=1e-4)
    assert is_old.sum() > 3


@pytest.mark.parametrize("pause", [1, 5, 6, 7, 20])
def test_learner_can_draw_again_after_a_pause_longer_than_the_ring(pause: int) -> None:
    """TD errors of sequences are computed when they are complete; newer states may have overwritten some by then."""
    ring = Ring(EXAMPLE, 61, 1, 1)
    state: Any = torch.zeros(1, 4)
    settings: dict[str, Any] = {"ratio": None, "warm_up": 0, "n_step": 1, "gamma": GAMMA, "seed": 0, "interval": 10}
    lengths: dict[str, Any] = {"burn_in": 10, "length": 20, "priorities": ALPHA}
    lengths |= {"is_shared": True, "has_td_error": True}
    replay = SequenceReplay(ring, state, batch_size=2, **settings, **lengths)
    assert replay.sequence_index is not None
    states = replay.sequence_index.states
    priority = SequencePriority(states, 0, (10, 20, 1), GAMMA, lambda batch: torch.ones(1))
    ones = np.ones((10, 1), np.float32)
    rows = Row(np.zeros((10, 1, 3), np.float32), ones.astype(np.int64), ones, ones, ones.astype(bool))

    def write() -> None:
        states.store(state, 0)
        ring.append(rows, rows.obs[0], 0)
        priority.update()

    for _ in range(10):
        write()
        replay.sync()
    assert replay.can_draw()
    for _ in range(pause):
        write()
    found = []
    for _ in range(20):
        write()
        replay.sync()
        found.append(replay.can_draw())
    assert all(found[4:])
    replay.close()


def sync(priorities: Priorities, counters: ReplayCounters) -> int:
    """Give the new rows of group 0 their priorities; return the number of its rows that have one."""
    rows = counters.without_priority(0)
    priorities.sync(0, rows)
    counters.mark_prioritized(0, rows.stop)
    return rows.stop


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_non_finite_td_errors_get_the_largest_priority(bad: float) -> None:
    ring, source = Ring(EXAMPLE, 40, ENVS, GROUPS, has_td_error=True), Source(0)
    priorities, counters = Priorities(ring, ALPHA, is_shared=True), ReplayCounters(ring.counters, None, 0, 1, 0)
    priority = TransitionPriority(ring, 0, 1, GAMMA, lambda batch: torch.full((len(batch.key),), bad))
    ring.append(*source.rows(), 0)
    priority.update()
    assert sync(priorities, counters) == T
    assert set(priorities.tree[:].tolist()) == {0.0, 1.0}, "rows must have the largest priority"
    ring.close()


def test_rows_without_td_error_cannot_be_drawn_yet() -> None:
    """Rows that they have overwritten cannot be drawn either, because their priority is stored in the same place."""
    ring, source = Ring(EXAMPLE, 2 * T, ENVS, GROUPS, has_td_error=True), Source(0)
    priorities, counters = Priorities(ring, ALPHA, is_shared=True), ReplayCounters(ring.counters, None, 0, 1, 0)
    priority = TransitionPriority(ring, 0, 1, GAMMA, lambda batch: torch.ones(len(batch.key)))
    for _ in range(2):
        ring.append(*source.rows(), 0)
        priority.update()
    assert sync(priorities, counters) == 2 * T
    ring.append(*source.rows(), 0)
    assert sync(priorities, counters) == 2 * T
    drawable = np.flatnonzero(priorities.tree[:].reshape(2 * T, ENVS)[:, :WIDTH].any(1))
    assert drawable.tolist() == list(range(T, 2 * T)), "the newest rows occupy the places of the first ones"
    ring.close()
