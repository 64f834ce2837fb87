"""Sequence replay compared with a model that stores everything: every row and every state contains its number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from references import slow_n_steps

from remuda.data import ArrayTuple, Batch, Steps
from remuda.errors import ConfigError
from remuda.replay.frames import FrameRing
from remuda.replay.ring import Ring, Row
from remuda.replay.sequences import SequenceReplay

FRAMES, GAMMA = 3, 0.9

EXAMPLE = Row(
    obs=np.zeros((FRAMES, 1, 1), np.int64),
    action=np.zeros((), np.int64),
    reward=np.zeros((), np.float32),
    discount=np.zeros((), np.float32),
    mask=np.zeros((), bool),
)


class Part(ArrayTuple):
    h: Any
    c: Any


class Memory(ArrayTuple):
    policy: Any
    value: Any


def state_of(row: int, B: int) -> Memory:
    """Return the state before this row, which contains the row and the env."""
    return Memory(Part(torch.tensor([[row, env] for env in range(B)]).float(), torch.full((B,), float(row))), None)


class Model:
    """B envs and all rows that they have produced. The newest frame of an observation is the number of its row."""

    def __init__(self, B: int, seed: int = 0, ends: float = 0.0, terminates: float = 0.5) -> None:
        self.B, self.rng, self.ends, self.terminates = B, np.random.default_rng(seed), ends, terminates
        self.rows: list[list[tuple[Any, ...]]] = [[] for _ in range(B)]  # obs, action, reward, discount, mask
        self.has_ended = [False] * B
        self.now = [self.first(0) for _ in range(B)]
        self.next_obs = np.stack(self.now)
        self.begins: list[int] = []  # rows at which a rollout began

    @property
    def written(self) -> int:
        return len(self.rows[0])

    def first(self, row: int) -> np.ndarray:
        """Return the first stack of an episode that begins at this row; its older frames are unique, too."""
        return np.array([-10 * row - 2, -10 * row - 1, row]).reshape(FRAMES, 1, 1)

    def step(self, env: int, end: str | None) -> None:
        """Append one row. `end` is how the episode ends with it: terminated, truncated, or None if it continues."""
        row, obs = len(self.rows[env]), self.now[env]
        action = 10 * row + env + 1
        if self.has_ended[env]:
            self.rows[env].append((obs, action, 0.0, 1.0, False))
            self.now[env], self.has_ended[env] = self.first(row + 1), False
            return
        reward = float(self.rng.integers(1, 5))
        self.rows[env].append((obs, action, reward, 0.0 if end == "terminated" else 1.0, True))
        self.now[env] = np.concatenate([obs[1:], np.full((1, 1, 1), row + 1)])
        self.has_ended[env] = end is not None

    def rollout(self, T: int, ends: dict[tuple[int, int], str] | None = None) -> Batch:
        """Return a rollout of T rows. Episodes end as given in `ends` by (row, env), or else randomly."""
        start = self.written
        self.begins.append(start)
        state = state_of(start, self.B)
        for env in range(self.B):
            for row in range(start, start + T):
                how = "terminated" if self.rng.random() < self.terminates else "truncated"
                anywhere = how if self.rng.random() < self.ends else None
                self.step(env, anywhere if ends is None else ends.get((row, env)))
        self.next_obs = np.stack(self.now)
        columns = [zip(*self.rows[env][start:], strict=True) for env in range(self.B)]
        parts = [np.stack([np.stack(list(part)) for part in same], 1) for same in zip(*columns, strict=True)]
        obs, action, reward, discount, mask = (torch.from_numpy(part) for part in parts)
        steps = Steps(obs, action, reward.float(), discount.float(), mask, None, torch.zeros(T, self.B))
        return Batch(steps, state=state, next_obs=torch.from_numpy(self.next_obs))

    def cut(self, ring: Ring) -> None:
        """End all episodes with a reset row, as when envs are rebuilt."""
        for env in range(self.B):
            self.rows[env].append((self.now[env], 0, 0.0, 1.0, False))
        self.next_obs = np.stack(self.now)
        ring.cut(self.next_obs)
        self.now, self.has_ended = [self.first(self.written) for _ in range(self.B)], [False] * self.B

    def sequence_index(self, interval: int) -> list[int]:
        found: list[int] = []
        for row in self.begins:
            if not found or row - found[-1] >= interval:
                found.append(row)
        return found

    def n_steps(self, row: int, env: int, n: int) -> tuple[float, float, int]:
        return slow_n_steps(self.rows[env], self.written, row, n, GAMMA)


def make(ring: Ring, **options: Any) -> SequenceReplay:
    defaults: dict[str, Any] = {
        "batch_size": 8,
        "ratio": 1.0,
        "warm_up": 0,
        "n_step": 2,
        "gamma": GAMMA,
        "seed": 1,
        "burn_in": 2,
        "length": 4,
    }
    return SequenceReplay(ring, state_of(0, 1), **{**defaults, **options})


def filled(adds: int, T: int = 4, B: int = 2, capacity: int = 60, **options: Any) -> tuple[SequenceReplay, Model]:
    model = Model(B)
    replay = make(Ring(EXAMPLE, capacity, B), **options)
    for _ in range(adds):
        replay.add(model.rollout(T))
    return replay, model


def drawable(replay: SequenceReplay) -> set[tuple[int, int]]:
    """Return (number, env) of all sequences that have a priority in the replay."""
    replay.can_draw()
    sequence_index = replay.sequence_index
    assert sequence_index is not None
    place, env = np.divmod(np.flatnonzero(sequence_index.tree[:]), replay.ring.envs)
    newest = int(sequence_index.states.counters.written.sum()) - 1
    number = newest - (newest - place) % sequence_index.room
    return set(zip(number.tolist(), env.tolist(), strict=True))


def drawable_by_hand(replay: SequenceReplay, model: Model, interval: int) -> set[tuple[int, int]]:
    """Return the expected result of `drawable`, from all rows of all sequences of the model."""
    found = set()
    for number, start in enumerate(model.sequence_index(interval)):
        row = np.arange(start, start + replay.burn_in + replay.length)
        for env in range(model.B):
            if row[-1] < model.written and replay.ring.is_stored(row, np.full_like(row, env)).all():
                learned = model.rows[env][start + replay.burn_in : start + replay.burn_in + replay.length]
                if any(mask for *_, mask in learned):
                    found.add((number, env))
    return found


def check(replay: SequenceReplay, model: Model, batch: Batch, interval: int) -> None:
    """Check that every drawn row is as appended or blank, and that every target is that of the slow reference."""
    steps, targets = batch.steps, batch.targets
    R = replay.burn_in + replay.length + replay.n_step
    assert steps.mask.shape == (R, replay.batch_size)
    assert steps.policy is None
    assert steps.version is None
    assert batch.next_obs is None
    assert targets.row.dtype == torch.int64
    for s, (number, env) in enumerate(batch.key.tolist()):
        start = model.sequence_index(interval)[number]
        assert batch.state.policy.h[s].tolist() == [start, env]
        assert batch.state.policy.c[s].item() == start
        assert batch.state.value is None
        known = model.rows[env][start : start + R]
        blank = (model.next_obs[env], 0, 0.0, 0.0, False)
        expected = zip(*known, *[blank] * (R - len(known)), strict=True)
        for part, values in zip(steps[:, s], expected, strict=False):
            np.testing.assert_array_equal(part, np.stack(values))
        rows = range(start + replay.burn_in, start + replay.burn_in + replay.length)
        reward, discount, bootstrap = zip(*[model.n_steps(row, env, replay.n_step) for row in rows], strict=True)
        np.testing.assert_allclose(targets.reward[:, s], reward, atol=1e-5)
        np.testing.assert_allclose(targets.discount[:, s], discount, atol=1e-6)
        assert targets.row[:, s].tolist() == [row - start for row in bootstrap]
        for row, end in zip(rows, (targets.row[:, s] + start).tolist(), strict=True):
            assert all(mask for *_, mask in model.rows[env][row:end]), "a target was bootstrapped across a reset"


def check_draw(replay: SequenceReplay, model: Model, interval: int) -> None:
    """Check that exactly the expected sequences can be drawn, and check one batch of them."""
    expected = drawable_by_hand(replay, model, interval)
    assert drawable(replay) == expected
    assert replay.can_draw() == bool(expected)
    if expected:
        batch = replay.draw()
        assert {tuple(key) for key in batch.key.tolist()} <= expected
        check(replay, model, batch, interval)
        replay.feedback(batch.key, torch.linspace(0, 2, replay.batch_size))


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["rows", "frames"]),
    T=st.integers(1, 9),
    adds=st.lists(st.booleans(), min_size=1, max_size=14),  # whether episodes are cut afterwards
    burn_in=st.integers(0, 4),
    length=st.integers(1, 5),
    n_step=st.integers(1, 5),
    room=st.integers(1, 25),
    interval=st.sampled_from([None, 1, 3, 8]),
    ends=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    alpha=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 2**31),
)
@example("frames", 2, [False] * 14, 2, 2, 1, 20, None, 1.0, 0.7, 0)
@example("rows", 1, [False] * 14, 0, 1, 1, 1, 1, 0.0, None, 0)
@example("rows", 9, [True] * 6, 4, 5, 5, 5, 8, 0.4, 0.7, 0)
def test_replay_matches_the_model_for_any_rollouts(
    kind: str,
    T: int,
    adds: list[bool],
    burn_in: int,
    length: int,
    n_step: int,
    room: int,
    interval: int | None,
    ends: float,
    alpha: float | None,
    seed: int,
) -> None:
    n_step = min(n_step, length)
    capacity = burn_in + length + n_step + room
    model = Model(2, seed, ends)
    ring = FrameRing(EXAMPLE, capacity, 2, FRAMES) if kind == "frames" else Ring(EXAMPLE, capacity, 2)
    replay = make(
        ring,
        batch_size=3,
        n_step=n_step,
        burn_in=burn_in,
        length=length,
        interval=interval,
        priorities=alpha,
        seed=seed,
    )
    try:
        if not any(burn_in + length <= back < capacity for back in range(T, capacity, T)):
            with pytest.raises(ConfigError, match="never leave a whole sequence"):
                replay.add(model.rollout(T))
            return
        for is_cut in adds:
            replay.add(model.rollout(T))
            check_draw(replay, model, interval or T)
            if is_cut:
                model.cut(ring)
                check_draw(replay, model, interval or T)
    finally:
        ring.close()


def test_targets_of_a_worked_example() -> None:
    """Rewards are 1, 2, 4, ...; row 4 is truncated, row 7 terminated, and row 9 is the newest."""
    replay, model = make(Ring(EXAMPLE, 30, 1), batch_size=1, burn_in=2, length=8, n_step=3, gamma=0.5), Model(1)
    batch = model.rollout(10, ends={(4, 0): "truncated", (7, 0): "terminated"})
    mask = batch.steps.mask[:, 0]
    assert mask.tolist() == [True, True, True, True, True, False, True, True, False, True]
    reward = torch.where(mask, 2.0 ** torch.arange(10), 0.0)[:, None]
    replay.add(Batch(batch.steps.replace(reward=reward), state=batch.state, next_obs=batch.next_obs))
    drawn = replay.draw()
    targets = drawn.targets
    is_real = mask[2:]
    assert targets.reward[is_real, 0].tolist() == [4 + 4 + 4, 8 + 8, 16, 64 + 64, 128, 512]
    assert targets.discount[is_real, 0].tolist() == [0.125, 0.25, 0.5, 0, 0, 0.5]
    assert targets.row[is_real, 0].tolist()[:3] == [5, 5, 5]  # the reset row, which has the final observation
    assert targets.row[-1, 0].item() == 10  # the observation after the newest row
    assert drawn.steps.obs[:, 0, -1, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10]
    assert drawn.steps.mask[:, 0].tolist() == [*mask.tolist(), False, False, False]


def test_rows_after_the_newest_are_blank() -> None:
    replay, model = filled(30, T=3, B=1, capacity=20, burn_in=1, length=5, n_step=4, batch_size=64)
    batch = replay.draw()
    check(replay, model, batch, 3)
    is_last = batch.key[:, 0] == 28  # it begins at row 84, and rows 84 to 89 are the last ones written
    assert is_last.any()
    for part in (batch.steps.action, batch.steps.reward, batch.steps.discount, batch.steps.mask):
        assert (part[6:, is_last] == 0).all()
    assert (batch.steps.obs[6:, is_last, -1] == 90).all()


def test_sequence_can_be_drawn_while_all_of_its_rows_are_stored() -> None:
    model = Model(1)
    replay = make(Ring(EXAMPLE, 13, 1), burn_in=2, length=4, n_step=2)
    found = []
    for _ in range(7):
        replay.add(model.rollout(2))
        found.append(sorted(number for number, _ in drawable(replay)))
    assert found == [[], [], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]


def test_cut_removes_overwritten_sequences_before_the_next_rollout() -> None:
    model = Model(1)
    ring = Ring(EXAMPLE, 13, 1)
    replay = make(ring, batch_size=32, burn_in=2, length=4, n_step=2)
    for _ in range(6):
        replay.add(model.rollout(2))
    late = replay.draw()
    assert set(late.key[:, 0].tolist()) == {0, 1, 2, 3}
    model.cut(ring)
    batch = replay.draw()
    assert set(batch.key[:, 0].tolist()) == {1, 2, 3}
    check(replay, model, batch, 2)
    replay.add(model.rollout(2))
    assert model.begins[-2:] == [10, 13]
    replay.add(model.rollout(2))
    batch = replay.draw()
    check(replay, model, batch, 2)
    assert set(batch.state.policy.c.tolist()) == {6.0, 8.0, 10.0}


def test_states_are_stored_at_least_an_interval_apart() -> None:
    replay, _ = filled(12, T=2, B=1, interval=5, batch_size=64)
    assert set(replay.draw().state.policy.c.tolist()) == {0.0, 6.0, 12.0, 18.0}
    assert replay.sequence_index is not None
    assert replay.sequence_index.room == 13


def test_states_are_copied() -> None:
    """Samplers reuse the arrays of their states."""
    model, replay = Model(2), make(Ring(EXAMPLE, 40, 2))
    for _ in range(3):
        batch = model.rollout(4)
        replay.add(batch)
        batch.state.policy.h.fill_(-1)
    drawn = replay.draw()
    check(replay, model, drawn, 4)
    drawn.state.policy.h.fill_(-1)
    check(replay, model, replay.draw(), 4)


def test_sequences_that_learn_only_reset_rows_are_not_drawn() -> None:
    """The episode of env 1 ends with row 2, so that its only learned row, 3, is a reset row."""
    model, replay = Model(2), make(Ring(EXAMPLE, 10, 2), burn_in=3, length=1, n_step=1)
    replay.add(model.rollout(4, ends={(2, 1): "truncated"}))
    assert drawable(replay) == {(0, 0)}
    assert set(replay.draw().key[:, 1].tolist()) == {0}


def test_sequences_with_overwritten_frames_are_not_drawn() -> None:
    """In env 0 every second row begins an episode, and its frames are overwritten before its rows are."""
    model = Model(2)
    ring = FrameRing(EXAMPLE, 64, 2, FRAMES)
    replay = make(ring, batch_size=16, priorities=0.5)
    for first in range(0, 120, 4):
        replay.add(model.rollout(4, ends={(row, 0): "truncated" for row in range(first, first + 4)}))
        if first % 12 == 0 and replay.can_draw():
            check(replay, model, replay.draw(), 4)
    found = drawable(replay)
    assert found == drawable_by_hand(replay, model, 4)
    of_env = [sum(env == which for _, env in found) for which in range(2)]
    assert 0 < of_env[0] < of_env[1] == (63 - 6) // 4


def test_nothing_is_due_when_all_frames_are_overwritten() -> None:
    """Every second row takes the room of three frames: too few of 13 rows can be restored for a sequence of 10."""
    model = Model(1)
    ring = FrameRing(EXAMPLE, 14, 1, FRAMES)
    replay = make(ring, batch_size=1, ratio=100.0, burn_in=5, length=5, n_step=2)
    for _ in range(6):
        replay.add(model.rollout(2))
    assert replay.can_draw()
    model.ends = 1.0
    for _ in range(10):
        replay.add(model.rollout(2))
    assert not replay.can_draw()
    assert list(replay.batches()) == []


def test_due_batches_follow_the_ratio_of_learned_rows() -> None:
    """A batch has 2 * 4 learned rows; every add earns 8 * 1.5 of them once the first sequence is complete."""
    model, replay = Model(2), make(Ring(EXAMPLE, 60, 2), batch_size=2, ratio=1.5)
    due = []
    for _ in range(7):
        replay.add(model.rollout(4))
        due.append(len(list(replay.batches())))
        assert list(replay.batches()) == []
    assert due == [0, 1, 2, 1, 2, 1, 2]


def test_reset_rows_earn_nothing() -> None:
    model, replay = Model(1), make(Ring(EXAMPLE, 60, 1), batch_size=1)
    replay.add(model.rollout(12, ends={(1, 0): "truncated", (5, 0): "terminated"}))
    assert replay.counters.credit == 10


def test_no_updates_are_due_for_the_warm_up() -> None:
    model, replay = Model(2), make(Ring(EXAMPLE, 60, 2), batch_size=1, warm_up=27)
    credit = []
    for _ in range(5):
        replay.add(model.rollout(4))
        credit.append(replay.counters.credit)
    assert credit == [0, 0, 0, 5, 13]


def test_credit_does_not_accumulate_while_nothing_can_be_drawn() -> None:
    model, replay = Model(1), make(Ring(EXAMPLE, 200, 1), batch_size=1, ratio=4.0, burn_in=50, length=4)
    for _ in range(13):
        replay.add(model.rollout(4))
        assert list(replay.batches()) == []
    replay.add(model.rollout(4))
    assert len(list(replay.batches())) == 4  # for its own four rows


def test_draws_are_a_function_of_seed_and_number() -> None:
    one, other, third = (filled(10, seed=seed)[0] for seed in (1, 1, 2))
    one.draw()
    other.counters.draws = 1
    first, second, different = one.draw(), other.draw(), third.draw()
    np.testing.assert_array_equal(first.key, second.key)
    assert not np.array_equal(first.key, different.key)


def chi_square(found: dict[tuple[int, int], int], expected: dict[tuple[int, int], float]) -> float:
    assert found.keys() <= expected.keys()
    return sum((found.get(key, 0) - count) ** 2 / count for key, count in expected.items())


def counted(replay: SequenceReplay, draws: int) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for _ in range(draws):
        for number, env in replay.draw().key.tolist():
            found[number, env] = found.get((number, env), 0) + 1
    return found


def test_uniform_draws_have_equal_frequencies() -> None:
    """Chi-square with 17 degrees of freedom: 40.8 has probability 0.001."""
    replay, _ = filled(10, batch_size=7)
    units = [(number, env) for number in range(9) for env in range(2)]
    batch = replay.draw()
    assert batch.weight is None
    replay.feedback(batch.key, torch.full((7,), 100.0))  # must change nothing
    found = counted(replay, 400)
    assert chi_square(found, dict.fromkeys(units, 2800 / 18)) < 40.8


def test_prioritized_draws_are_proportional_and_weights_correct_for_it() -> None:
    """Chi-square with 17 degrees of freedom: 40.8 has probability 0.001."""
    replay, _ = filled(10, batch_size=7, priorities=0.5)
    units = np.array([(number, env) for number in range(9) for env in range(2)])
    error = torch.linspace(0.1, 4, 18)
    replay.feedback(units, -error)  # only the absolute value matters
    shares = (error.sqrt() / error.sqrt().sum()).tolist()
    share = {(number, env): part for (number, env), part in zip(units.tolist(), shares, strict=True)}
    batch = replay.draw()
    drawn = torch.tensor([share[tuple(key)] for key in batch.key.tolist()])
    assert batch.weight is not None
    assert batch.weight.dtype == torch.float32
    torch.testing.assert_close(batch.weight, drawn.min() / drawn, rtol=1e-4, atol=1e-5)
    found = counted(replay, 400)
    assert chi_square(found, {unit: part * 2800 for unit, part in share.items()}) < 40.8


def test_feedback_for_overwritten_sequences_is_ignored() -> None:
    replay, model = filled(4, T=4, B=1, capacity=13, priorities=1.0)
    old = replay.draw()
    assert set(old.key[:, 0].tolist()) == {1, 2}
    for _ in range(4):  # now newer sequences occupy their places
        replay.add(model.rollout(4))
    assert replay.sequence_index is not None
    before = replay.sequence_index.tree[:].copy()
    replay.feedback(old.key, torch.full((8,), 100.0))
    np.testing.assert_array_equal(replay.sequence_index.tree[:], before)
    assert replay.sequence_index.largest == 1.0
    assert drawable(replay) == {(5, 0), (6, 0)}
    model.cut(replay.ring)  # the cut overwrites the first row of sequence 5
    replay.feedback(np.array([[5, 0]]), torch.full((1,), 100.0))
    assert drawable(replay) == {(6, 0)}
    assert replay.sequence_index.largest == 1.0


def test_new_sequence_gets_the_largest_priority() -> None:
    replay, model = filled(5, B=1, priorities=0.5)
    replay.feedback(np.array([[0, 0], [1, 0]]), torch.tensor([9.0, 4.0]))
    replay.add(model.rollout(4))
    assert replay.sequence_index is not None
    np.testing.assert_allclose(replay.sequence_index.tree[:6], [3, 2, 1, 1, 3, 0], rtol=1e-6)


def test_bad_priorities_are_refused() -> None:
    replay, _ = filled(5, B=1, priorities=0.5)
    with pytest.raises(ValueError, match="negative or not a number"):
        replay.feedback(np.array([[0, 0], [1, 0]]), torch.tensor([9.0, torch.nan]))
    assert replay.sequence_index is not None
    assert replay.sequence_index.largest == 1.0
    assert set(replay.sequence_index.tree[:].tolist()) == {0.0, 1.0}


def test_nothing_can_be_drawn_before_a_sequence_is_complete() -> None:
    replay = make(Ring(EXAMPLE, 60, 2))
    assert list(replay.batches()) == []
    with pytest.raises(ValueError, match="none of 6 rows is stored whole"):
        replay.draw()
    replay.feedback(np.zeros((0, 2), int), torch.zeros(0))
    replay, _ = filled(1)
    with pytest.raises(ValueError, match="none of 6 rows is stored whole"):
        replay.draw()


def test_columns_of_a_batch_select_sequences() -> None:
    replay, _ = filled(6, priorities=0.5)
    batch = replay.draw()
    part = batch.columns(torch.tensor([5, 2]))
    assert torch.equal(part.steps.obs, batch.steps.obs[:, [5, 2]])
    assert torch.equal(part.targets.row, batch.targets.row[:, [5, 2]])
    assert torch.equal(part.state.policy.h, batch.state.policy.h[[5, 2]])
    np.testing.assert_array_equal(part.key, batch.key[[5, 2]])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"burn_in": 10, "length": 7, "n_step": 3}, "burn_in \\+ length \\+ n_step = 20 rows do not fit .* keeps 19"),
        ({"length": 4, "n_step": 5}, "n_step=5 is more than length=4"),
        ({"burn_in": -1}, "burn_in=-1"),
        ({"length": 0}, "length=0"),
        ({"n_step": 0}, "n_step=0"),
        ({"interval": 0}, "interval=0"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(Ring(EXAMPLE, 20, 2), **options)
    make(Ring(EXAMPLE, 20, 2), burn_in=10, length=6, n_step=3)


def test_rollouts_that_never_leave_a_whole_sequence_are_refused() -> None:
    """A sequence begins 10 rows back, which is too short, or 20 rows back, which is more than the ring keeps."""
    with pytest.raises(ConfigError, match="rollouts of 10 rows never leave a whole sequence"):
        filled(1, T=10, capacity=20, burn_in=5, length=6)
    replay, _ = filled(5, T=10, capacity=20, burn_in=4, length=6)
    assert drawable(replay) == {(4, 0), (4, 1)}


def test_states_that_are_missing_or_of_another_shape_are_refused() -> None:
    model, replay = Model(2), make(Ring(EXAMPLE, 40, 2))
    batch = model.rollout(4)
    with pytest.raises(ValueError, match="no recurrent state"):
        replay.add(Batch(batch.steps, next_obs=batch.next_obs))
    with pytest.raises(ValueError, match="its example said"):
        replay.add(Batch(batch.steps, state=state_of(0, 1), next_obs=batch.next_obs))
