"""The interfaces of Remuda, as dataclasses and protocols without behavior.

An `Envs` steps environments. A `Sampler` lets an `Agent` act in them and returns rollouts. A `Replay` decides which
batches are due, an `Algorithm` computes their losses, and a `Learner` (learning/learner.py) turns these into updates.
`Weights` carry the new parameters to the samplers, and a `Scheme` decides which process does what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from remuda.data.arrays import ArrayTuple, namedarraytuple
from remuda.data.rollout import Batch, Rollout

if TYPE_CHECKING:  # env workers import this module, and must not import torch
    import torch
    from torch import Tensor, nn

    from remuda.errors import Interrupted
    from remuda.learning.gradients import Gradients
    from remuda.learning.learner import Learner


# --- environments ---------------------------------------------------------------------------------------------

Array: TypeAlias = NDArray[Any]
# What a space describes for a batch of envs: one numpy array, or a named array tuple with one value per entry.
ArrayTree: TypeAlias = Any
# Actions of one slot, each leaf [B of the slot]: an ArrayTree of the action space, or a dict with the env's own keys.
Actions: TypeAlias = Any
# The state of envs for a checkpoint: plain values and arrays that data/packing.py can pack.
EnvsState: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Space:
    """Describe an observation or action: what agents need to know of a Gymnasium space.

    A leaf is one array per env. A dict or tuple has entries and describes a named array tuple of them.
    """

    kind: Literal["box", "discrete", "multidiscrete", "multibinary", "dict", "tuple"]
    shape: tuple[int, ...] = ()
    dtype: str = ""  # as stored in rollouts: float64 boxes become float32, discrete ones int64, multibinary int8
    low: Array | None = None  # box only
    high: Array | None = None
    n: int = 0  # discrete only: the number of values
    start: int = 0  # discrete only: the smallest value; rollouts and agents count from 0
    sizes: Array | None = None  # multidiscrete only, of its shape: the number of values of each element
    starts: Array | None = None  # multidiscrete only: the smallest value of each element
    entries: Mapping[str, Space] = field(default_factory=dict)  # dict and tuple only, by field name
    keys: tuple[str, ...] = ()  # dict only: the env's own keys of its entries, in the same order
    env_dtype: str = ""  # integers only: the dtype of the env's own space

    @property
    def is_leaf(self) -> bool:
        return self.kind not in ("dict", "tuple")

    def leaves(self, path: str = "") -> Iterator[tuple[str, Space]]:
        """Yield every leaf with its dotted path below `path`; a leaf yields itself under `path`."""
        if self.is_leaf:
            yield path, self
        for name, entry in self.entries.items():
            yield from entry.leaves(f"{path}.{name}" if path else name)

    def tree(self, make: Callable[[str, Space], Any], path: str = "") -> ArrayTree:
        """Return make(path, leaf) for a leaf, or a named array tuple of these values for a space with entries."""
        if self.is_leaf:
            return make(path, self)
        values = [entry.tree(make, f"{path}.{name}" if path else name) for name, entry in self.entries.items()]
        return namedarraytuple("Entries", tuple(self.entries))(*values)


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
        ...

    def send(self, slot: int, action: Actions, hold: bool = False) -> None:
        """Send actions to all envs of a slot without waiting; the slot must have been received before."""
        ...

    def renew(self, slot: int) -> None:
        """Start new episodes where `hold` prevented a reset; received like a `send`, with mask False everywhere."""
        ...

    def recv(self) -> tuple[int, Step]:
        """Wait for the slot that was sent first among those not yet received; return its number and its step."""
        ...

    def info(self, slot: int) -> dict[str, Array]:
        """Return the requested entries of `info` of the last received step, float64 [B of the slot].

        nan marks envs whose info has no such number. Implementations without entries of info return {}.
        """
        ...

    def episodes(self) -> list[Episode]:
        """Return the episodes that finished since the last call."""
        ...

    def restarts(self) -> int:
        """Return how many times an env was rebuilt so far, because it raised or its worker was lost."""
        ...

    def waited(self) -> float:
        """Return the seconds spent in `recv` so far beyond the time that the fastest worker took to step."""
        ...

    def get_state(self) -> EnvsState:
        """Return all that the coming steps depend on; every slot must have been received.

        Raise NoState where an env cannot be saved (envs/states.py).
        """
        ...

    def set_state(self, state: EnvsState) -> None:
        """Continue from `get_state`, as if every slot had just been received: the next call is a `send`."""
        ...

    def prepare(self, seed: int, restarts: int) -> None:
        """Take the place of envs that were lost `restarts` times: the next step of every env resets it.

        Instead of `reset`, in a worker that replaces a lost one. Implementations that replace lost workers
        themselves, or cannot reset on demand, raise RuntimeError.
        """
        ...

    def close(self) -> None:
        """Close all envs and end their processes; may be called twice."""
        ...


class AsyncEnvs(Envs, Protocol):
    """`Envs` whose slots are received in any order, as soon as each is ready: a slow env delays only its own slot."""

    def ready(self, seconds: float) -> list[int]:
        """Return the slots that `recv(slot)` returns at once; wait up to `seconds` for the first of them."""
        ...

    def recv(self, slot: int | None = None) -> tuple[int, Step]:
        """Wait for this slot; None stands for the one that was sent first."""
        ...


# --- learning -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """The position in a run, of which schedules are functions."""

    version: int = 0  # updates applied
    progress: float = 0.0  # fraction of the run's steps that are done, 0 to 1


@dataclass(frozen=True)
class Losses:
    """The losses of a batch."""

    groups: dict[str, Tensor]  # scalar loss of each group of parameters that is updated now
    metrics: dict[str, Tensor | float]
    priority: Tensor | None = None  # new priority of each drawn row, for a prioritized replay
    stop: bool = False  # end the round without applying this batch


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
    """Batches go in, and the batches that are due come out.

    Samplers reuse their arrays, so a replay copies everything that it keeps for longer than a round.
    """

    def add(self, batch: Batch) -> None: ...
    def batches(self) -> Iterator[Batch]: ...  # one finite round of the batches that are due now, possibly none
    def feedback(self, key: Any, priority: Tensor | None) -> None: ...  # absolute TD errors of a batch with this key
    def cut(self) -> None: ...  # ends all episodes, because the envs start anew
    def paused(self) -> AbstractContextManager[None]: ...  # no rows are added while the learner does something else
    # The state for a checkpoint: plain values, and names of the files that hold the rows. Only new rows are written.
    def save(self, directory: Path) -> dict[str, Any] | None: ...  # None: there is nothing to save
    def load(self, directory: Path, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class SharedReplay(Replay, Protocol):
    """A replay that other processes write to."""

    @property
    def is_due(self) -> bool: ...  # whether `batches` yields any; it may leave others for the next round
    @property
    def is_throttled(self) -> bool: ...  # whether writers wait for updates that are due

    # Count what was written since the last call, and return the real steps; writers stop after `left` steps.
    def sync(self, left: int | None = None) -> int: ...
    def commit(self) -> None: ...  # ends the round: what was counted in it becomes part of the run
    def new_observations(self) -> Iterator[Rollout]: ...  # written since the last call, to update normalizers
    def on_writer_lost(self, group: int) -> int: ...  # returns the row at which another writer of the group starts
    def metrics(self) -> dict[str, float]: ...


class Sampler(Protocol):
    """Samples rollouts synchronously; owns its envs."""

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start every env; return the number of random steps that were taken to spread the envs."""

    def collect(self) -> Rollout:
        """Sample T rows of every env with one version of the weights. The next call reuses the arrays."""

    def take_seconds(self) -> dict[str, float]: ...  # where the time went since the last call: env, inference, wait
    def episodes(self) -> list[Episode]: ...  # finished since the last call, in order of env index
    def restarts(self) -> int: ...  # envs rebuilt so far, because they raised or their worker was lost
    def running(self) -> int: ...  # envs that were in the middle of an episode when the last rollout ended

    def get_state(self) -> bytes:
        """Return the state between two rollouts, with which the next ones are bit-equal; may raise NoState."""

    def set_state(self, state: bytes) -> None: ...  # instead of `reset`
    def close(self) -> None: ...


class AsyncSampler(Protocol):
    """What all asynchronous samplers share; they own their envs."""

    def start(self, seed: int, warm_up: int = 0, version: int = 0) -> int:
        """Start sampling for a learner of this version; return the random steps taken, as `Sampler.reset` does."""

    def take_seconds(self) -> dict[str, float]: ...  # as Sampler.take_seconds, on average over the workers
    def episodes(self) -> list[Episode]: ...  # as Sampler.episodes
    def restarts(self) -> int: ...  # as Sampler.restarts
    def close(self) -> None: ...


class RolloutSource(AsyncSampler, Protocol):
    """Asynchronous samplers whose rollouts are taken as they become ready."""

    dropped: int  # rollouts that were too old to be used

    def take(self, version: int, should_stop: Callable[[], bool]) -> Rollout:
        """Wait for a rollout that a learner of this version may use; raise Interrupted if `should_stop`."""

    def release(self, version: int) -> None:
        """Allow the memory of the last rollout to be reused, once weights of this version are published."""

    def metrics(self) -> dict[str, float]: ...


class ReplayWriters(AsyncSampler, Protocol):
    """Asynchronous samplers that write their rows to a replay."""

    def poll(self, version: int) -> None:
        """Record the learner's version; raise the error of a worker that could not handle it."""

    def take_lag(self) -> float: ...  # updates by which acting weights were behind, on average since the last call
    def drain(self) -> None: ...  # wait, for a limited time, for the statistics of all rows that were written


class Evaluator(Protocol):
    """Evaluates the newest weights while training goes on."""

    def poll(self, version: int, steps: int) -> list[dict[str, Any]]:
        """Record that `version` was published at `steps`; return new evaluations, with the steps of their weights."""

    def close(self) -> None: ...


class Weights(Protocol):
    """A versioned cell that holds the newest parameters."""

    def publish(self, version: int) -> None: ...

    def pull(self, have: int) -> int:
        """Copy the newest parameters if they are newer than version `have`; return the version now held."""

    def invitation(self) -> tuple[dict[str, Any], list[int]]:
        """Return the message and the descriptors with which another process can `join`."""

    @classmethod
    def join(cls, module: nn.Module, message: Mapping[str, Any], fds: list[int]) -> Self:
        """Accept an invitation in another process, for a copy of the agent; removes its descriptors from `fds`."""

    def close(self) -> None: ...


# --- running --------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Counters of a run, saved with every checkpoint."""

    steps: int = 0  # real env steps, including warm-up
    rounds: int = 0  # rollouts that were learned from
    episodes: int = 0
    restarts: int = 0  # envs that were rebuilt
    dropped: int = 0  # rollouts that were too old to learn from
    cut: int = 0  # episodes that checkpoint.cut_episodes ended early


@dataclass(frozen=True)
class Recipe:
    """What to learn: factories that a scheme calls in the process that needs the result."""

    seed: int
    steps: int  # real env steps after which the run is done
    make_learner: Callable[[], Learner]
    make_replay: Callable[[Any, int], Any]  # agent, rounds done -> Replay, or SharedReplay
    make_weights: Callable[[Any, int], Weights]  # agent, its version
    # agent, weights, env workers (0: envs in this process), rounds done, should_stop
    make_sampler: Callable[[Any, Weights, int, int, Callable[[], bool]], Sampler]
    # agent, weights, sampler workers, rounds done, max_lag, should_stop
    make_source: Callable[[Any, Weights, int, int, int | None, Callable[[], bool]], RolloutSource]
    # weights, replay, sampler workers, rounds done, should_stop
    make_writers: Callable[[Weights, Any, int, int, Callable[[], bool]], ReplayWriters]
    # weights, their version, steps done; returns None if the run has no evaluator
    make_evaluator: Callable[[Weights, int, int], Evaluator | None] = lambda weights, version, steps: None
    num_threads: int = 1  # torch threads of the learner's process
    warm_up: int = 0  # most random steps per env before the first rollout
    # Every `cut_every` rounds all envs start new episodes, so that a run resumed from there is bit-equal although the
    # state of its envs cannot be saved (checkpoint.cut_episodes). 0 means never.
    cut_every: int = 0


@dataclass
class Round:
    """What a scheme reports to the log after each round of learning."""

    progress: Progress
    learner: Learner
    episodes: list[Episode]
    metrics: dict[str, float]  # train/*, lag/*
    seconds: dict[str, float]  # where the time went: env, inference, update, wait
    replay: Replay
    # Returns the sampler's state for a checkpoint, or raises NoState; None for asynchronous samplers.
    get_state: Callable[[], bytes] | None = None
    is_whole: bool = True  # False if a stop signal ended the round before all due updates were made
    was_cut: bool = False  # all envs have just started new episodes, so that this round's checkpoint is exact
    cut_follows: bool = False  # a later round will be cut, and its checkpoint is exact, while this round's is not
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # new results of the Evaluator


class Log(Protocol):
    """The run directory as a scheme sees it: receives every round, and may stop the run."""

    def resume(self, learner: Learner) -> tuple[Progress, bytes | None]:
        """Load the last checkpoint into the learner; return the counters, and the sampler's state if it was saved."""

    def restore(self, replay: Replay) -> None: ...  # load the replay of the last checkpoint, before the first round
    def begin(self) -> None: ...  # start the clock for rates, after warm-up
    def round(self, round: Round) -> bool: ...  # record a round; True: stop now
    def should_stop(self) -> bool: ...  # True once a signal has arrived: stop at the end of this round
    def must_stop(self) -> bool: ...  # True some time after a signal: give this round up

    def save_if_failed(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save what was learned if an error ends the run; an `__exit__` to call while learner and replay are open."""

    def save_if_stopped(self, error: Interrupted) -> None: ...  # a signal interrupted a round: save what was learned


class Scheme(Protocol):
    """How to run a recipe: which process does what, and which parts wait for each other."""

    def run(self, recipe: Recipe, log: Log) -> Learner: ...


def derive_seed(seed: int, *keys: int) -> int:
    """Return a 31-bit seed for one purpose, such as (env index, restarts); neighboring keys give unrelated seeds."""
    return int(np.random.SeedSequence((seed, *keys)).generate_state(1)[0] >> 1)
