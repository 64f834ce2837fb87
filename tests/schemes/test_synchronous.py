"""Tests of the synchronous scheme with a fake recipe whose parts only record their calls."""

from types import SimpleNamespace

import pytest
import torch

from remuda.core import Episode, derive_seed
from remuda.data import Batch, Rollout, Steps
from remuda.errors import Interrupted
from remuda.learning.weights import LocalWeights
from remuda.recipe import Progress, Recipe
from remuda.schemes.learning_round import learn, mean, torch_threads
from remuda.schemes.synchronous import Synchronous

REAL = 5  # real rows among the 6 rows of every rollout in this file


class CountedWeights(LocalWeights):
    closed = 0

    def close(self):
        self.closed += 1


class Pieces:
    """A fake of every part of a recipe and of the run log that appends each call to `calls`."""

    def __init__(self, start=None, minibatches=2, stop_at=None, warm_up=0, steps=REAL * 3, state=None, cut_every=0):
        self.calls, self.closed, self.rounds, self.saveable = [], 0, [], []
        self.state = state
        self.start = start or Progress()
        self.minibatches, self.stop_at = minibatches, stop_at
        self.version = 10 * self.start.rounds
        self.fail_in, self.error = None, None
        self.stop_after, self.signal_after, self.must_stop_after = None, None, None
        self.threads = []
        self.recipe = Recipe(
            seed=3,
            steps=steps,
            make_learner=lambda: self.did("learner"),
            make_replay=lambda agent, rounds: self.did(f"replay {rounds}"),
            make_weights=self.make_weights,
            make_sampler=self.make_sampler,
            make_source=self.make_source,
            make_writers=self.make_writers,
            num_threads=1,
            warm_up=warm_up,
            cut_every=cut_every,
        )
        self.algorithm = SimpleNamespace(agent="the agent")
        self.seconds = {"env": 2.0, "inference": 1.0}

    def did(self, call):
        self.calls.append(call)
        if self.fail_in is not None and call.startswith(self.fail_in):
            raise self.error
        return self

    def agent_on_cpu(self):
        return self.algorithm.agent

    def make_weights(self, agent, version):
        assert agent == "the agent"
        self.did("weights")
        self.weights = CountedWeights(version)
        return self.weights

    def make_sampler(self, agent, weights, workers, rounds, should_stop):
        assert agent == "the agent"
        assert weights is self.weights
        assert should_stop == self.must_stop
        return self.did(f"sampler {workers} {rounds}")

    def make_source(self, agent, weights, workers, rounds, max_lag, should_stop):
        raise AssertionError("nothing here is asynchronous")

    def make_writers(self, weights, replay, workers, rounds, should_stop):
        raise AssertionError("nothing here is asynchronous")

    # sampler

    def close(self):
        self.closed += 1

    def get_state(self):
        return b"state"

    def set_state(self, state):
        self.did(f"set {state}")

    def reset(self, seed, warm_up=0):
        self.did(f"reset {seed} {warm_up}")
        return warm_up

    def collect(self):
        self.did(f"collect with {self.weights.pull(-1)}")
        self.threads.append(torch.get_num_threads())
        self.seconds["env"] += 1.0
        column = torch.zeros(3, 2)
        mask = torch.ones(3, 2, dtype=torch.bool)
        mask[1, 0] = False
        version = torch.full((3, 2), self.weights.pull(-1))
        return Rollout(Steps(column, column, column, column, mask, None, version), column[0])

    def take_seconds(self):
        seconds, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return seconds

    def episodes(self):
        return [Episode(0, {"ep_rew": 1.0})]

    def restarts(self):
        return 4

    def running(self):
        return 2

    # learner

    device = torch.device("cpu")

    def set_progress(self, progress):
        self.did(f"progress {progress:.2f}")

    def prepare(self, rollout):
        self.did("prepare")
        return Batch(rollout.steps, metrics={"explained_variance": torch.tensor(0.5)})

    def gradients(self, batch):
        self.did("step")
        stop = self.stop_at is not None and self.calls.count("step") == self.stop_at
        metrics = {"loss": torch.tensor(float(self.version + (not stop)))}
        return SimpleNamespace(metrics=metrics, priority="a priority", stop=stop, version=self.version)

    def apply(self, gradients):
        self.version += 1
        return {"learning_rate": 0.1}

    def finish(self, rollout):
        self.did("finish")
        return {}

    # replay

    def add(self, batch):
        self.did("add")

    def batches(self):
        for number in range(self.minibatches):
            yield Batch(None, key=f"key {number}")

    def feedback(self, key, priority):
        assert priority == "a priority"
        self.did(f"feedback {key}")

    def cut(self):
        self.did("cut")

    # log

    def resume(self, learner):
        self.did("resume")
        return self.start, self.state

    def restore(self, replay):
        self.did("restore")

    def save_if_failed(self, kind, error, trace):
        if error is not None:
            self.did("save what was learned")

    def save_if_stopped(self, error):
        self.did("save what was learned")

    def begin(self):
        self.did(f"begin at {self.start.steps}")

    def save(self, round):
        self.did("save the last round")

    def should_stop(self):
        return self.signal_after is not None and len(self.rounds) >= self.signal_after

    def must_stop(self):
        return self.must_stop_after is not None and self.calls.count("step") >= self.must_stop_after

    def round(self, round):
        self.did("round")
        self.rounds.append((round.progress.steps, round.progress.rounds, dict(round.seconds), dict(round.metrics)))
        self.saveable.append(
            (round.get_state and round.get_state(), round.is_whole, round.was_cut, round.cut_follows)
        )
        return (self.stop_after is not None and len(self.rounds) >= self.stop_after) or self.should_stop()


def run(scheme, pieces):
    """Run all rounds of the scheme.

    The iterator yields once before training begins, and then once per round after the round was logged.
    """
    yielded = list(scheme.rounds(pieces.recipe, pieces))
    logged = [number for _, number, *_ in pieces.rounds]
    assert len(yielded) in (len(logged) + 1, len(logged)), "an interrupted start yields nothing"
    return yielded


BEFORE_THE_SAMPLER = ("learner", "resume", "weights", "replay", "sampler")
ROUND = ["prepare", "add", "step", "feedback key 0", "step", "feedback key 1", "finish", "round"]


def test_order_of_calls():
    pieces = Pieces(steps=REAL * 2)
    run(Synchronous(workers=2), pieces)
    assert pieces.calls == [
        *("learner", "resume", "weights", "replay 0", "sampler 2 0", "restore", "reset 3 0", "begin at 0"),
        *("collect with 0", "progress 0.00", *ROUND),
        *("collect with 2", "progress 0.50", *ROUND),
    ]
    assert pieces.closed == 3


def test_run_ends_with_the_first_round_that_reaches_the_steps():
    for steps, rounds in ((1, 1), (REAL, 1), (REAL + 1, 2), (REAL * 4, 4)):
        pieces = Pieces(steps=steps)
        run(Synchronous(), pieces)
        assert [count for count, *_ in pieces.rounds] == [REAL * (n + 1) for n in range(rounds)], (
            "only real steps count"
        )
        assert [number for _, number, *_ in pieces.rounds] == list(range(1, rounds + 1))
        assert pieces.start.episodes == rounds


def test_warm_up_counts_as_steps_before_the_log_begins():
    pieces = Pieces(warm_up=REAL, steps=REAL * 2)
    run(Synchronous(), pieces)
    assert f"reset 3 {REAL}" in pieces.calls
    assert f"begin at {REAL}" in pieces.calls
    assert [count for count, *_ in pieces.rounds] == [REAL * 2]


def test_resumed_run_resets_with_a_new_seed_and_no_warm_up():
    pieces = Pieces(Progress(steps=100, rounds=7, episodes=9), warm_up=50, steps=100 + REAL)
    run(Synchronous(), pieces)
    assert pieces.calls[3:10] == [
        "replay 7",
        "sampler 0 7",
        "restore",
        "cut",
        f"reset {derive_seed(3, 7)} 0",
        "begin at 100",
        "collect with 70",
    ]
    assert pieces.rounds[0][:2] == (100 + REAL, 8)
    assert pieces.start.episodes == 10


def test_complete_run_collects_nothing():
    pieces = Pieces(Progress(steps=100, rounds=7), steps=100)
    run(Synchronous(), pieces)
    assert pieces.calls == ["learner", "resume", "weights", "replay 7", "sampler 0 7", "restore", "begin at 100"]
    assert pieces.closed == 3


def test_run_stops_when_the_log_returns_true():
    pieces = Pieces(steps=1000)
    pieces.stop_after = 2
    run(Synchronous(), pieces)
    assert len(pieces.rounds) == 2
    assert pieces.calls[-1] == "round"
    assert pieces.closed == 3


def test_signal_stops_the_run_between_rounds():
    pieces = Pieces(steps=1000)
    pieces.signal_after = 2
    run(Synchronous(), pieces)
    assert len(pieces.rounds) == 2
    pieces = Pieces(steps=1000)
    pieces.signal_after = 0
    run(Synchronous(), pieces)
    assert pieces.rounds == []
    assert not [call for call in pieces.calls if call.startswith("collect")]


def test_signal_during_a_rollout_drops_the_rollout():
    pieces = Pieces(steps=1000)
    pieces.fail_in, pieces.error = "collect with 4", Interrupted("now")
    run(Synchronous(), pieces)
    learner = pieces
    assert learner is pieces, "the learner is returned, to be saved"
    assert pieces.start == Progress(2 * REAL, rounds=2, episodes=2, restarts=4), (
        "counters are those of the last complete round"
    )
    assert pieces.calls[-2:] == ["collect with 4", "save what was learned"]
    assert pieces.closed == 3


@pytest.mark.parametrize(
    "place",
    ["learner", "resume", "weights", "replay", "sampler", "reset", "begin", "collect", "prepare", "finish", "round"],
)
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_failure_anywhere_closes_what_was_created(place, kind):
    pieces, threads = Pieces(), torch.get_num_threads()
    pieces.fail_in, pieces.error = place, kind("here")
    with pytest.raises(kind, match="here"):
        run(Synchronous(), pieces)
    before_the_replay = ("learner", "resume", "weights", "replay")
    made = (place != "learner") + (place not in before_the_replay) + (place not in BEFORE_THE_SAMPLER)
    assert pieces.closed == made, "learner, replay and sampler are closed if they were created"
    assert place in ("learner", "resume", "weights") or pieces.weights.closed == 1
    assert torch.get_num_threads() == threads


def test_seconds_are_counted_per_round():
    pieces = Pieces(steps=REAL * 2)
    run(Synchronous(), pieces)
    first, second = (seconds for _, _, seconds, _ in pieces.rounds)
    assert [first["env"], first["inference"]] == [3.0, 1.0]
    assert [second["env"], second["inference"]] == [1.0, 0.0], "counting starts anew in each round"
    assert all(seconds["update"] > 0 for seconds in (first, second))


def test_training_uses_num_threads_of_the_recipe():
    pieces = Pieces(steps=REAL)
    before = torch.get_num_threads()
    with torch_threads(2):
        run(Synchronous(), pieces)
        assert pieces.threads == [1]
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


class TestLearn:
    def learn(self, **settings):
        pieces = Pieces(**settings)
        pieces.weights = SimpleNamespace(pull=lambda have: 0)
        metrics, is_whole = learn(pieces, pieces, pieces.collect())
        assert is_whole
        return pieces, metrics

    def test_means(self):
        _, metrics = self.learn(minibatches=3)
        assert metrics == {
            "train/explained_variance": 0.5,
            "train/loss": 2.0,  # mean of 1, 2, 3
            "train/learning_rate": pytest.approx(0.1),
            "lag/collect_to_gradient": 1.0,  # mean of 0, 1, 2
            "lag/collect_to_gradient_max": 2.0,
            "lag/gradient_to_update": 0.0,
        }
        assert all(type(value) is float for value in metrics.values())

    def test_one_gradient_of_fresh_data_has_no_lag(self):
        _, metrics = self.learn(minibatches=1)
        assert metrics["lag/collect_to_gradient"] == 0.0

    def test_stop_skips_the_remaining_batches_but_not_finish(self):
        """A batch that sets `stop`, as target_kl does, counts in the metrics, but its gradients are not applied."""
        pieces, metrics = self.learn(minibatches=8, stop_at=3)
        assert pieces.calls.count("step") == 3
        assert pieces.version == 2
        assert pieces.calls[-1] == "finish"
        assert metrics["train/loss"] == pytest.approx((1 + 2 + 2) / 3)
        assert metrics["lag/collect_to_gradient"] == 1.0

    def test_round_without_due_updates_still_finishes(self):
        pieces, metrics = self.learn(minibatches=0)
        assert pieces.calls[-2:] == ["add", "finish"]
        assert metrics == {"train/explained_variance": 0.5}

    def test_mean_is_exact(self):
        assert mean([torch.tensor(1.0), 2, 3.5, torch.tensor(4, dtype=torch.int64)]) == 2.625
        assert mean([2**24 + 1, 2**24 + 1]) == 2**24 + 1, "float32 would round this to an even number"


def test_target_kl_ends_the_updates_of_a_real_round(tmp_path):
    """A target of 1e-9 is exceeded by the second minibatch at the latest."""
    import remuda

    updates, counts = [], {}
    for target in ("none", 1e-9):
        updates.clear()
        remuda.train(
            "ppo",
            "CartPole-v1",
            steps=200,
            out=tmp_path / str(target),
            quiet=True,
            algo={"n_steps": 16, "batch_size": 32, "n_epochs": 5, "target_kl": target},
            eval={"episodes": 0},
            log={"tensorboard": False},
            callbacks=[lambda round: updates.append(round.learner.version)],
        )
        counts[target] = updates[0]
    assert counts["none"] == 5 * 4
    assert 1 <= counts[1e-9] < 4


def test_signal_past_its_grace_period_ends_the_updates_of_a_round():
    """Finished updates are kept and counted; only the remaining ones are missing, and `is_whole` is False."""
    pieces = Pieces(steps=REAL * 4, minibatches=5)
    pieces.must_stop_after, pieces.stop_after = 7, 2
    run(Synchronous(), pieces)
    assert pieces.calls.count("step") == 7
    assert pieces.calls[-2:] == ["finish", "round"]
    assert pieces.start == Progress(2 * REAL, rounds=2, episodes=2, restarts=4)
    assert [is_whole for _, is_whole, _, _ in pieces.saveable] == [True, False]


def test_saved_state_is_restored_instead_of_a_reset():
    pieces = Pieces(Progress(steps=100, rounds=7, restarts=9), warm_up=50, steps=100 + REAL, state=b"there")
    run(Synchronous(), pieces)
    assert pieces.calls[4:8] == ["sampler 0 7", "restore", "set b'there'", "begin at 100"]
    assert not [call for call in pieces.calls if call.startswith("reset")]
    assert pieces.start.restarts == 9, "the sampler already counts 4 of them, and none is counted twice"


def test_restarts_before_a_resume_are_added_when_envs_are_reset():
    pieces = Pieces(Progress(steps=100, rounds=7, restarts=9), steps=100 + REAL)
    run(Synchronous(), pieces)
    assert pieces.start.restarts == 9 + 4


def test_every_round_can_be_saved():
    pieces = Pieces(steps=REAL * 3)
    run(Synchronous(), pieces)
    assert pieces.saveable == [(b"state", True, False, False)] * 3


def test_envs_that_cannot_be_saved_are_reset_every_cut_every_rounds():
    """An uninterrupted run and a resumed run cut their episodes in the same rounds, so that both are equal."""
    pieces = Pieces(steps=REAL * 6, cut_every=2)
    run(Synchronous(), pieces)
    assert [(was_cut, follows) for _, _, was_cut, follows in pieces.saveable] == [(False, True), (True, False)] * 3
    assert pieces.start.cut == 2 * 2, "two envs were in the middle of an episode at each of two cuts"
    resets = [call for call in pieces.calls if call.startswith("reset")]
    assert resets == ["reset 3 0", f"reset {derive_seed(3, 2)} 0", f"reset {derive_seed(3, 4)} 0"], (
        "no reset follows the last round"
    )
    resumed = Pieces(Progress(steps=REAL * 4, rounds=4), steps=REAL * 6, cut_every=2)
    run(Synchronous(), resumed)
    assert [call for call in resumed.calls if call.startswith("reset")] == [f"reset {derive_seed(3, 4)} 0"]
