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
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from remuda.data.arrays import ArrayTuple, namedarraytuple
from remuda.data.rollout import Batch, Rollout

if TYPE_CHECKING:  # env workers import this module, and never torch
    import torch
    from torch import Tensor, nn

    from remuda.errors import Interrupted
    from remuda.learning.gradients import Gradients
    from remuda.learning.learner import Learner


# --- environments ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Space:
    """What an observation or action looks like: all that agents need to know of a Gymnasium space.

    A leaf is one array per env. A dict or tuple has entries, and what it describes is a named array tuple of them.
    """

    kind: Literal["box", "discrete", "multidiscrete", "multibinary", "dict", "tuple"]
    shape: tuple[int, ...] = ()
    dtype: str = ""  # as stored in rollouts: float64 boxes become float32, discrete ones int64, multibinary int8
    low: NDArray[Any] | None = None  # box only
    high: NDArray[Any] | None = None
    n: int = 0  # discrete only: how many values
    start: int = 0  # discrete only: the smallest value; rollouts and agents count from 0
    sizes: NDArray[Any] | None = None  # multidiscrete only, of its shape: how many values each number has
    starts: NDArray[Any] | None = None  # multidiscrete only: the smallest value of each
    entries: Mapping[str, Space] = field(default_factory=dict)  # dict and tuple only, by name of the field
    keys: tuple[str, ...] = ()  # dict only: what the env itself calls its entries
    env_dtype: str = ""  # whole numbers only: of the env's own space

    @property
    def is_leaf(self) -> bool:
        return self.kind not in ("dict", "tuple")

    def leaves(self, path: str = "") -> Iterator[tuple[str, Space]]:
        """Every leaf with its dotted path; that of a space without entries is the one given."""
        if self.is_leaf:
            yield path, self
        for name, entry in self.entries.items():
            yield from entry.leaves(f"{path}.{name}" if path else name)

    def tree(self, make: Callable[[str, Space], Any], path: str = "") -> Any:
        """make(path, leaf) for every leaf: one value, or a named array tuple with a value for each entry."""
        if self.is_leaf:
            return make(path, self)
        values = [entry.tree(make, f"{path}.{name}" if path else name) for name, entry in self.entries.items()]
        return namedarraytuple("Entries", tuple(self.entries))(*values)


class Step(ArrayTuple):
    """What one slot of envs answered, every field [B of the slot]; numpy, valid until the next send to that slot."""

    obs: Any  # what the agent sees next, an array or a tree of them: on an end the true final observation
    reward: Any
    terminated: Any
    truncated: Any
    mask: Any  # False where the action was not taken: the env was reset instead, or lost and rebuilt


@dataclass(frozen=True)
class Episode:
    """Statistics of one finished episode."""

    env: int
    values: Mapping[str, float]  # ep_rew, ep_len, ep_discounted_rew, ep_nonzero_rew, info/..., and the user's own


class Envs(Protocol):
    """B environments in equal slots.

    envs.reset(seed=1)                      # every slot will answer with first observations, mask False
    while training:
        slot, step = envs.recv()            # the next slot, in the order of sending
        envs.send(slot, act(step.obs))      # never blocks
    envs.close()

    Between a rollout's last recv and the next one's first send, what the coming steps depend on can be saved and put
    back, as plain values and arrays (data/packing.py); envs that cannot be saved raise NoState (envs/states.py).

    An env is reset on the step after its end. With `hold` it stays where it ended instead, answering with its last
    observation and mask False, until `renew`, which is answered through recv and touches no other env.
    """

    observation: Space
    action: Space
    num_envs: int
    num_slots: int
    should_stop: Callable[[], bool] | None  # asked while receiving; True raises Interrupted

    def reset(self, seed: int, warm_up: int = 0) -> int: ...
    def send(self, slot: int, action: Any, hold: bool = False) -> None: ...  # [B of the slot], as its tree
    def renew(self, slot: int) -> None: ...  # begin new episodes where `hold` kept an end from being reset
    def recv(self) -> tuple[int, Step]: ...
    def episodes(self) -> list[Episode]: ...  # finished since the last call, in order of env index
    def restarts(self) -> int: ...  # envs rebuilt so far, because they raised or their worker was lost
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...  # the next call is a send
    def waited(self) -> float: ...  # seconds in recv so far in which the quickest worker had nothing to do
    def close(self) -> None: ...


# --- learning -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """The position in a run, on which schedules depend."""

    version: int = 0  # updates applied
    progress: float = 0.0  # fraction of the run's steps that are done, 0 to 1


@dataclass(frozen=True)
class Losses:
    """Losses of a batch, with metrics for the log and priorities for the replay."""

    groups: dict[str, Tensor]  # the scalar loss of each parameter group that is updated now
    metrics: dict[str, Tensor | float]
    priority: Tensor | None = None  # of each drawn row, for a prioritized replay
    stop: bool = False  # end the round here, without applying this batch


class FastPolicy(Protocol):
    """A faster form of a stateless agent's `act`, for samplers: see remuda.fast."""

    def agrees_with(self, agent: Agent, obs: Any, noise: Tensor) -> bool: ...  # False: do not use it
    def choose(self, obs: Any, noise: Tensor) -> Any: ...  # actions [B], as `act` with explore=None
    def evaluate_actions(self, obs: Any, action: Any) -> ArrayTuple: ...  # the second value of `act`, for rows [N]


class FastPath(Protocol):
    """A faster way to the gradients of an algorithm's losses, for learners: see remuda.fast."""

    # None: use `exact`, which computes them by autograd.
    def gradients(self, batch: Batch, clock: Clock, exact: Callable[[Batch], Gradients]) -> Gradients | None: ...


class Agent(Protocol):
    """The networks and how they act; an nn.Module."""

    noise: tuple[tuple[Literal["uniform", "normal"], int], ...]  # kinds and widths of the noise that `act` takes
    exploration: float  # the amount that `explore=None` means

    def initial_state(self, batch: int) -> Any: ...  # of B envs at the start of their episodes; None without memory
    # Return actions [B], what is stored with each row (or None), and the next state. `explore` [B] is the amount of
    # exploration in each env: 0 is greedy, other values depend on the agent. None: `exploration` in every env.
    def act(
        self, obs: Any, state: Any, explore: Tensor | None, noise: Tensor
    ) -> tuple[Any, ArrayTuple | None, Any]: ...


@runtime_checkable
class ValueAgent(Agent, Protocol):
    """An agent that estimates values; a rollout ends with that of the observation after its last row."""

    def value(self, obs: Any, state: Any) -> Tensor: ...  # [B]; `state` is not advanced


@runtime_checkable
class FastAgent(Agent, Protocol):
    """An agent that may have a faster form of `act`."""

    fast_policy: FastPolicy | None  # set by what builds the agent


@runtime_checkable
class CompilableAgent(Agent, Protocol):
    """An agent whose networks can be compiled by torch."""

    def compile_nets(self) -> None: ...


class Algorithm(Protocol):
    """The losses of a batch, and nothing else; an nn.Module that holds agent, targets and normalizers."""

    agent: Any

    def groups(self) -> dict[str, list[nn.Parameter]]: ...
    def prepare(self, rollout: Rollout) -> Batch: ...  # one pass over fresh data, before its first gradient
    def losses(self, batch: Batch, clock: Clock) -> Losses: ...
    def after_update(self, clock: Clock) -> None: ...  # target networks
    def after_rollout(self, rollout: Rollout) -> bool | None: ...  # normalizers; False: the agent did not change
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...
    def to(self, device: torch.device) -> Any: ...


@runtime_checkable
class SeparableAlgorithm(Algorithm, Protocol):
    """An algorithm whose gradient of a batch can be computed from parts of its columns."""

    @property  # gradients of parts are added, or averaged over real rows; None: they cannot be combined
    def gradient_reduction(self) -> Literal["sum", "mean"] | None: ...


@runtime_checkable
class PrioritizingAlgorithm(Algorithm, Protocol):
    """An algorithm that can give new rows a priority, in a sampler that has no target networks."""

    def td_error(self, batch: Batch) -> Tensor: ...  # of each row, or of each sequence


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

    def start(self, seed: int, warm_up: int = 0, version: int = 0) -> int: ...  # as RolloutSource.start
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
