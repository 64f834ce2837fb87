"""The nouns of Remuda: what its parts hand to one another, and what each promises. No behaviour lives here.

Reads in one go: an `Envs` steps environments, a `Sampler` lets an `Agent` act in them and returns a Rollout, an
`Algorithm` turns batches into losses, a `Replay` says which batches are due, a `Learner` (learning/learner.py)
turns losses into updates, `Weights` carry them back to the sampler, and a `Scheme` decides which process does what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from remuda.data.arrays import ArrayTuple
from remuda.data.rollout import Batch, Rollout
from remuda.data.space import Array as Array
from remuda.data.space import ArrayTree as ArrayTree
from remuda.data.space import Space as Space

if TYPE_CHECKING:  # env workers import this module, and never torch
    from torch import Tensor, nn

    from remuda.errors import Interrupted
    from remuda.learning.learner import Learner


# --- environments ---------------------------------------------------------------------------------------------

# Actions of one slot, each leaf [B of the slot]: an ArrayTree of the action space, or a dict with the env's own keys.
Actions: TypeAlias = Any
# The state of envs for a checkpoint: plain values and arrays that data/packing.py can pack.
EnvsState: TypeAlias = Mapping[str, Any]


class Step(ArrayTuple):
    """One step of one slot; numpy arrays [B of the slot], valid until the next `send` to that slot."""

    obs: ArrayTree  # what the agent sees next; at the end of an episode, its true final observation
    reward: Array  # float32
    terminated: Array  # bool
    truncated: Array  # bool
    mask: Array  # bool; False where no action was taken: the env was reset, held or rebuilt instead


@dataclass(frozen=True)
class Episode:
    """Statistics of one finished episode."""

    env: int
    values: Mapping[str, float]  # ep_rew, ep_len, ep_discounted_rew, ep_nonzero_rew, info/..., and the user's own


class Envs(Protocol):
    """`num_envs` environments in `num_slots` slots of equal size; every slot is sent to and received as a whole.

    envs.reset(seed=1)                      # every slot will answer with first observations and mask False
    while training:
        slot, step = envs.recv()            # slots come in the order in which they were sent
        envs.send(slot, act(step.obs))      # does not block
    envs.close()

    An env is reset by the step after the end of its episode; that row has mask False. An env that raises, or whose
    worker process is lost, is rebuilt and answers with such a row too.

    With `hold` an env whose episode has ended is not reset. It answers with its last observation and mask False until
    `renew`, which starts the next episode of these envs and leaves the others alone. Implementations that cannot
    do this (native vector envs) raise RuntimeError for `hold` and `renew`.
    """

    observation: Space
    action: Space
    num_envs: int
    num_slots: int
    should_stop: (
        Callable[[], bool] | None
    )  # polled while waiting or stepping; once it returns True, Interrupted is raised

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start new episodes in all envs and give up what was sent before; every slot can then be received.

        Each env first takes up to `warm_up` random steps, a number drawn from the seed, so that episodes do not end
        in lockstep. Return the total number of these steps.
        """

    def send(self, slot: int, action: Actions, hold: bool = False) -> None:
        """Send actions to all envs of a slot without waiting; the slot must have been received before."""

    def renew(self, slot: int) -> None:
        """Start new episodes where `hold` prevented a reset; received like a `send`, with mask False everywhere."""

    def recv(self) -> tuple[int, Step]:
        """Wait for the slot that was sent first among those not yet received; return its number and its step."""

    def info(self, slot: int) -> dict[str, Array]:
        """Return the requested entries of `info` of the last received step, float64 [B of the slot].

        nan marks envs whose info has no such number. Implementations without entries of info return {}.
        """

    def episodes(self) -> list[Episode]:
        """Return the episodes that finished since the last call."""

    def restarts(self) -> int:
        """Return how many times an env was rebuilt so far, because it raised or its worker was lost."""

    def waited(self) -> float:
        """Return the seconds spent in `recv` so far beyond the time that the fastest worker took to step."""

    def get_state(self) -> EnvsState:
        """Return all that the coming steps depend on; every slot must have been received.

        Raise NoState where an env cannot be saved (envs/states.py).
        """

    def set_state(self, state: EnvsState) -> None:
        """Continue from `get_state`, as if every slot had just been received: the next call is a `send`."""

    def prepare(self, seed: int, restarts: int) -> None:
        """Take the place of envs that were lost `restarts` times: the next step of every env resets it.

        Instead of `reset`, in a worker that replaces a lost one. Implementations that replace lost workers
        themselves, or cannot reset on demand, raise RuntimeError.
        """

    def close(self) -> None:
        """Close all envs and end their processes; may be called twice."""


class AsyncEnvs(Envs, Protocol):
    """`Envs` whose slots are received in any order, as soon as each is ready: a slow env delays only its own slot."""

    def ready(self, seconds: float) -> list[int]:
        """Return the slots that `recv(slot)` returns at once; wait up to `seconds` for the first of them."""

    def recv(self, slot: int | None = None) -> tuple[int, Step]:
        """Wait for this slot; None stands for the one that was sent first."""


# --- learning -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """Where a run stands; schedules are functions of it."""

    version: int = 0  # updates applied
    progress: float = 0.0  # share of the run's steps that are done, 0 to 1


@dataclass(frozen=True)
class Losses:
    """What an algorithm says of a batch."""

    groups: dict[str, Tensor]  # {group of parameters: scalar due now}
    metrics: dict[str, Tensor | float]
    priority: Tensor | None = None  # of each drawn row, for a prioritised replay
    stop: bool = False  # leave the rest of this round, without applying this batch


@dataclass(frozen=True)
class FastGradients:
    """The derivatives of `Losses.groups`, each a vector in the order of its group's parameters."""

    groups: dict[str, Tensor]
    metrics: dict[str, Tensor | float]
    stop: bool = False
    priority: Tensor | None = None


class Quick(Protocol):
    """What an agent without state may offer to a sampler: choose now, and say what belongs to all rows later."""

    def choose(self, obs: Any, noise: Tensor) -> Any: ...  # actions [B], all of which explore
    def evaluate_actions(self, obs: Any, action: Any) -> ArrayTuple: ...  # of rows [N], as `Agent.act`


class Agent(Protocol):
    """The networks and how they act; an nn.Module."""

    noise: tuple[tuple[Literal["uniform", "normal"], int], ...]  # kinds and widths that `act` wants for each env

    def initial_state(self, batch: int) -> Any: ...

    exploration: float  # how much it explores where nobody says: see `act`

    def act(
        self, obs: Any, state: Any, explore: Tensor | None, noise: Tensor
    ) -> tuple[Any, ArrayTuple | None, Any]: ...  # explore [B]: how much, 0 is greedy; None: as much as it can

    # It may also have find_quick(obs, noise) -> Quick | None, and
    # value(obs, state) -> [B], of what was seen after `state`, which stays as it is.


class Algorithm(Protocol):
    """The losses of a batch, and nothing else; an nn.Module that holds agent, targets and normalisers."""

    agent: Any

    def groups(self) -> dict[str, list[nn.Parameter]]: ...
    def prepare(self, rollout: Rollout) -> Batch: ...  # one pass over fresh data, before its first gradient
    def losses(self, batch: Batch, clock: Clock) -> Losses: ...
    # It may also have quick_gradients(batch, clock) -> FastGradients | None: by hand, None where it cannot.
    def after_update(self, clock: Clock) -> None: ...  # target networks
    # Normalisers, once per rollout, after its gradients; False if the agent did not change.
    def after_rollout(self, rollout: Rollout) -> bool | None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


class Replay(Protocol):
    """Batches in, the batches that are due out. What is kept longer than a round is copied: samplers reuse arrays."""

    def add(self, batch: Batch) -> None: ...
    def batches(self) -> Iterator[Batch]: ...  # ONE FINITE ROUND of what is due now, maybe empty
    def feedback(self, key: Any, priority: Tensor | None) -> None: ...
    def cut(self) -> None: ...  # envs begin anew: what comes next does not follow what came last
    def paused(self) -> AbstractContextManager[None]: ...  # nothing comes in, while the learner does something else
    # State for a checkpoint: plain values, and files of its own that they name. Only what is new is written.
    def save(self, directory: Path) -> dict[str, Any] | None: ...  # None: there is nothing to save
    def load(self, directory: Path, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class SharedReplay(Replay, Protocol):
    """A replay that other processes write to."""

    @property
    def is_due(self) -> bool: ...  # whether `batches` has any, of which it then gives some and not all
    @property
    def is_throttled(self) -> bool: ...  # whether writers wait for updates that are due

    # Take note of what was written since; returns the real steps among it, of so many that were left to be taken.
    def sync(self, left: int | None = None) -> int: ...
    def commit(self) -> None: ...  # the round in which that was followed is over
    def fresh(self) -> Iterator[Rollout]: ...  # what was written since the last call, for statistics of observations
    def on_writer_lost(self, group: int) -> int: ...  # its writer is dead; returns the row at which another begins
    def metrics(self) -> dict[str, float]: ...


class Sampler(Protocol):
    """Envs x Agent -> Rollouts; owns its envs."""

    def reset(self, seed: int, warm_up: int = 0) -> int: ...  # random steps that were taken to spread the envs
    def collect(self) -> Rollout: ...  # T steps of every slot with one version: strictly on-policy
    def take_seconds(self) -> dict[str, float]: ...  # where the time went since the last call
    def episodes(self) -> list[Episode]: ...  # as of Envs
    def restarts(self) -> int: ...
    def running(self) -> int: ...  # envs in the middle of an episode after the last rollout
    def get_state(self) -> bytes: ...  # between two rollouts: with it the next ones are the same, bit by bit
    def set_state(self, state: bytes) -> None: ...  # instead of reset
    def close(self) -> None: ...


class RolloutSource(Protocol):
    """Envs x Agent -> Rollouts of workers that act by themselves, each as it is ready; owns its envs."""

    dropped: int  # rollouts that were too old to be used

    # As Sampler.reset, for a learner of this version.
    def start(self, seed: int, warm_up: int = 0, version: int = 0) -> int: ...
    def take(self, version: int, should_stop: Callable[[], bool]) -> Rollout: ...  # for a learner of this version
    def release(self, version: int) -> None: ...  # it is learned from, and newer weights are published
    def metrics(self) -> dict[str, float]: ...
    def take_seconds(self) -> dict[str, float]: ...
    def episodes(self) -> list[Episode]: ...
    def restarts(self) -> int: ...
    def close(self) -> None: ...


class ReplayWriters(Protocol):
    """Envs x Agent -> rows of a replay, by workers that write them there themselves; owns its envs."""

    # As Sampler.reset, for a learner of this version.
    def start(self, seed: int, warm_up: int = 0, version: int = 0) -> int: ...
    def look(self, version: int) -> None: ...  # for a learner of this version; raises what a worker could not handle
    def take_ages(self) -> float: ...  # by how many updates acting weights were behind
    def receive_all(self) -> None: ...  # wait until what was sampled so far is told of; not for long
    def take_seconds(self) -> dict[str, float]: ...
    def episodes(self) -> list[Episode]: ...
    def restarts(self) -> int: ...
    def close(self) -> None: ...


class Evaluator(Protocol):
    """Somebody who evaluates the newest weights while training goes on."""

    def look(self, version: int, steps: int) -> list[dict[str, Any]]: ...  # what is new, with `steps` of its weights
    def close(self) -> None: ...


class Weights(Protocol):
    """A versioned cell that holds the newest parameters."""

    def publish(self, version: int) -> None: ...
    def pull(self, have: int) -> int: ...  # copies only if newer; returns the version now held
    def close(self) -> None: ...


# --- running --------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Counters of a run; saved with every checkpoint."""

    steps: int = 0  # real env steps, warm-up included
    rounds: int = 0  # rollouts that were learned from
    episodes: int = 0
    restarts: int = 0  # envs that were rebuilt
    dropped: int = 0  # rollouts that were too old to learn from
    cut: int = 0  # episodes that checkpoint.cut_episodes ended before their end


@dataclass(frozen=True)
class Recipe:
    """What to learn: factories that a scheme calls in the process where the thing is needed."""

    seed: int
    steps: int  # real env steps after which the run is done
    make_learner: Callable[[], Learner]
    make_replay: Callable[[Any, int], Any]  # agent, rounds done so far -> Replay, or SharedReplay
    make_weights: Callable[[Any, int], Weights]  # agent, its version -> the cell through which samplers get it
    # agent, weights, env workers (0: envs in this process), rounds done, should_stop -> Sampler
    make_sampler: Callable[[Any, Weights, int, int, Callable[[], bool]], Sampler]
    # agent, weights, acting workers, rounds done, max_lag, should_stop -> Stream
    make_source: Callable[[Any, Weights, int, int, int | None, Callable[[], bool]], RolloutSource]
    # weights, replay, acting workers, rounds done, should_stop -> Feed
    make_writers: Callable[[Weights, Any, int, int, Callable[[], bool]], ReplayWriters]
    # weights, their version, steps done -> Evaluator, or None where none is wanted
    make_evaluator: Callable[[Weights, int, int], Evaluator | None] = lambda weights, version, steps: None
    num_threads: int = 1  # of torch, in the process that learns
    warm_up: int = 0  # random steps per env before the first rollout, at most
    # Rounds after which all envs start new episodes, so that a run resumed from there is bit-equal although the state
    # of its envs cannot be saved (checkpoint.cut_episodes); 0 never cuts.
    cut_every: int = 0


@dataclass
class Round:
    """What a scheme tells the log after each rollout that was learned from."""

    progress: Progress
    learner: Learner
    episodes: list[Episode]
    metrics: dict[str, float]  # train/*, lag/*
    seconds: dict[str, float]  # where the time went: env, inference, update, wait
    replay: Replay
    # Returns the sampler's state for a checkpoint, or raises NoState; None: asynchronous samplers have none.
    get_state: Callable[[], bytes] | None = None
    is_whole: bool = True  # False: a stop signal ended the round before all due updates were made
    was_cut: bool = False  # all envs have just started new episodes, so that this round's checkpoint is exact
    cut_follows: bool = False  # a later round will be cut: its checkpoint is exact, and this round's is not
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # of an Evaluator, since the last round


class Log(Protocol):
    """The run directory's side of a scheme: told of every round, and may stop the run."""

    # weights into the learner; counters, and the sampler's state if there is one
    def resume(self, learner: Learner) -> tuple[Progress, bytes | None]: ...
    def restore(self, replay: Replay) -> None: ...  # what the run had collected; before its first round
    def begin(self) -> None: ...  # warm-up is over: rates count from here
    def round(self, round: Round) -> bool: ...  # True: stop now
    def should_stop(self) -> bool: ...  # a signal arrived: stop at the end of this round
    def must_stop(self) -> bool: ...  # it arrived some time ago: give this round up

    # as an `__exit__`, of who has learner and replay still open: keeps what was learned before something broke
    def save_if_failed(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    # Saves what was learned by a run that a signal interrupted within a round.
    def save_if_stopped(self, error: Interrupted) -> None: ...


class Scheme(Protocol):
    """How to run a recipe: which process does what, and which edges wait."""

    def run(self, recipe: Recipe, log: Log) -> Learner: ...


def derive_seed(seed: int, *keys: int) -> int:
    """A seed of 31 bits for one env (index, restart) or update, unrelated to the seeds of its neighbours."""
    return int(np.random.SeedSequence((seed, *keys)).generate_state(1)[0] >> 1)
