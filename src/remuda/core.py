"""The interfaces of Remuda, as dataclasses and protocols without behavior.

An `Envs` steps environments. A `Sampler` (recipe.py) lets an `Agent` act in them and returns rollouts. A `Replay`
stores the rollouts and decides when the learner gets which batches, an `Algorithm` computes the losses of a batch,
and a `Learner` (learning/learner.py) turns losses into updates. `Weights` carry the new parameters to the samplers,
and a `Scheme` (recipe.py) decides which process does what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np

from remuda.data.arrays import ArrayTuple
from remuda.data.rollout import Batch, Rollout
from remuda.data.space import Array as Array
from remuda.data.space import ArrayTree as ArrayTree
from remuda.data.space import Space as Space
from remuda.data.trees import Tree

if TYPE_CHECKING:  # env workers import this module, and must not import torch
    import torch
    from torch import Tensor, nn

    from remuda.learning.gradients import Gradients


# --- environments ---------------------------------------------------------------------------------------------

# Actions for the B envs of one slot: an array [B, ...], an ArrayTree of such arrays, or a dict with the keys of the
# env's own action space.
Actions: TypeAlias = Any
# The state of envs in a checkpoint: plain values and arrays, which data/packing.py can convert to bytes.
EnvsState: TypeAlias = Mapping[str, Any]


class Step(ArrayTuple):
    """The result of one step of the B envs of a slot: numpy arrays [B, ...], valid until the slot's next `send`."""

    obs: ArrayTree  # observation after the step; if the step ended an episode, the final observation of that episode
    reward: Array  # float32
    terminated: Array  # bool
    truncated: Array  # bool
    mask: Array  # bool; False where the env took no action but was reset, held or rebuilt (see `Envs`)


@dataclass(frozen=True)
class Episode:
    """Statistics of one finished episode."""

    env: int
    values: Mapping[str, float]  # ep_rew, ep_len, ep_discounted_rew, ep_nonzero_rew, info/..., user-defined values


class Envs(Protocol):
    """`num_envs` environments in `num_slots` slots of equal size; the envs of a slot are always stepped together.

    envs.reset(seed=1)                      # recv() then returns first observations with mask False, for every slot
    while training:
        slot, step = envs.recv()            # slots come in the order in which they were sent
        envs.send(slot, act(step.obs))      # does not block
    envs.close()

    The step after the end of an episode resets the env, and has mask False. An env that raises, or whose worker
    process is lost, is rebuilt; its next step has mask False, too.

    `send(..., hold=True)` does not reset an env whose episode has ended. The env's steps repeat its last observation
    with mask False until `renew` starts its next episode; `renew` does not step envs in the middle of an episode.
    Implementations without this feature (native vector envs) raise RuntimeError for `hold` and `renew`.
    """

    observation: Space
    action: Space
    num_envs: int
    num_slots: int
    # Polled while envs are stepped or waited for; once it returns True, the current call raises Interrupted.
    should_stop: Callable[[], bool] | None

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start new episodes in all envs and discard actions sent before; every slot can then be received.

        Each env first takes between 0 and `warm_up` random steps, so that episodes do not end in lockstep; the number
        is drawn from the seed. Return the total number of random steps over all envs.
        """

    def send(self, slot: int, action: Actions, hold: bool = False) -> None:
        """Send actions to all envs of a slot without waiting. The slot's previous step must have been received."""

    def renew(self, slot: int) -> None:
        """Reset those envs of the slot whose episode has ended; the slot's next step has mask False for all envs."""

    def recv(self) -> tuple[int, Step]:
        """Wait for the slot that was sent earliest and not received yet; return the slot's number and its step."""

    def info(self, slot: int) -> dict[str, Array]:
        """Return entries of Gymnasium's `info` for the slot's last received step, by name, as float64 arrays [B].

        Only entries that were requested when the envs were made are returned. An entry is nan for envs whose `info`
        has no number of that name.
        """

    def episodes(self) -> list[Episode]:
        """Return the episodes that finished since the last call."""

    def restarts(self) -> int:
        """Return how often envs were rebuilt so far. An env is rebuilt if it raises or if its worker is lost."""

    def waited(self) -> float:
        """Return the seconds that `recv` has waited so far, not counting the step times of the slot's fastest worker.

        Return 0 if the envs have no workers, or if this time is not known.
        """

    def get_state(self) -> EnvsState:
        """Return the complete state of all envs; every slot must have been received.

        Raise NoState if the state of an env cannot be saved (envs/states.py).
        """

    def set_state(self, state: EnvsState) -> None:
        """Restore a state from `get_state`. Every slot then counts as received, so that `send` can be called."""

    def prepare(self, seed: int, restarts: int) -> None:
        """Prepare these new envs to replace the envs of a lost worker; the first step of every env resets the env.

        The new worker calls this method instead of `reset`. `seed` is the seed of the lost worker's last `reset`, and
        `restarts` is the number of times that this worker was lost so far. Implementations that replace lost
        workers themselves, or cannot reset on demand, raise RuntimeError.
        """

    def close(self) -> None:
        """Close all envs and end their processes; may be called twice."""


class AsyncEnvs(Envs, Protocol):
    """`Envs` whose slots can be received in any order, so that a slow env delays only its own slot."""

    def ready(self, seconds: float) -> list[int]:
        """Return the slots for which `recv(slot)` would not block. If there are none, first wait up to `seconds`."""

    def recv(self, slot: int | None = None) -> tuple[int, Step]:
        """Wait for `slot` (None: the slot that was sent first); return the slot's number and its step."""


# --- learning -------------------------------------------------------------------------------------------------

# Observations or actions as agents see them: a tensor, or a named array tuple with one value per entry of the space.
TensorTree: TypeAlias = "Tensor | ArrayTuple"
# Statistics of a rollout, as tensors by name.
Statistics: TypeAlias = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class Clock:
    """The position in a run, on which schedules depend."""

    version: int = 0  # updates applied
    progress: float = 0.0  # fraction of the run's steps that are done, 0 to 1
    part: int = 0  # index of the part that the batch belongs to, if the run is divided into parts; otherwise 0


@runtime_checkable
class PooledMetric(Protocol):
    """A metric of a set of rows that is not a mean over the rows, such as a ratio of variances.

    `pool` computes the metric of the union of several sets. `numbers` returns what it needs to know of one set, such
    as the number, mean and variance of its rows.
    """

    def numbers(self) -> Sequence[float]: ...

    @classmethod
    def pool(cls, numbers: Sequence[Sequence[float]]) -> Self: ...  # `numbers` of each set

    def __float__(self) -> float: ...


@dataclass(frozen=True)
class Losses:
    """Losses of a batch, with metrics for the log and priorities for the replay."""

    groups: dict[str, Tensor]  # scalar loss of each parameter group to update
    metrics: dict[str, Tensor | float]
    priority: Tensor | None = None  # error of each drawn row or sequence, which determines its new priority
    stop: bool = False  # True ends the round without an update for this batch


class FastPolicy(Protocol):
    """A faster form of a stateless agent's `act`, for samplers: see remuda.fast."""

    # Returns whether the other two methods give the results of `agent.act`. If not, the caller must use `agent.act`.
    def agrees_with(self, agent: Agent, obs: Any, noise: Tensor) -> bool: ...
    # Returns the actions [B] that the agent's `act` returns with explore=None.
    def choose(self, obs: Any, noise: Tensor) -> TensorTree: ...
    # Returns the policy output that the agent's `act` returns when it chooses these actions.
    def evaluate_actions(self, obs: Any, action: Any) -> ArrayTuple: ...


class FastPath(Protocol):
    """A faster way to compute the gradients of an algorithm's losses, for learners: see remuda.fast."""

    # Returns the gradients of the batch, or None if the caller must compute them by autograd with `exact`.
    def gradients(self, batch: Batch, clock: Clock, exact: Callable[[Batch], Gradients]) -> Gradients | None: ...
    def close(self) -> None: ...  # ends the threads that compute gradients, if there are any


class Agent(Protocol):
    """The networks and how they act; an nn.Module."""

    noise: tuple[tuple[Literal["uniform", "normal"], int], ...]  # kinds and widths of the noise that `act` takes
    exploration: float  # amount of exploration if `act` is called with explore=None

    def initial_state(self, batch: int) -> Tree: ...  # state [batch] of new episodes; None for stateless agents
    # Return actions [B], the policy output to store with each row (or None), and the next state. `explore` [B] is the
    # amount of exploration in each env: 0 is greedy, other values depend on the agent. None means `self.exploration`.
    def act(
        self, obs: TensorTree, state: Tree, explore: Tensor | None, noise: Tensor
    ) -> tuple[TensorTree, ArrayTuple | None, Tree]: ...


@runtime_checkable
class ValueAgent(Agent, Protocol):
    """An agent that estimates values, so that a rollout includes the value of the observation after its last row."""

    def value(self, obs: TensorTree, state: Tree) -> Tensor: ...  # values [B]; `state` is not advanced


@runtime_checkable
class FastAgent(Agent, Protocol):
    """An agent that may have a faster form of `act`."""

    fast_policy: FastPolicy | None  # set by the code that builds the agent


@runtime_checkable
class CompilableAgent(Agent, Protocol):
    """An agent whose networks can be compiled by torch."""

    def compile_nets(self) -> None: ...


class Algorithm(Protocol):
    """Computes the losses that a learner minimizes; an nn.Module with agent, target networks and normalizers."""

    agent: Any

    def groups(self) -> dict[str, list[nn.Parameter]]: ...
    # Running statistics, such as those of a normalizer, change only in `absorb`. A learner calls `absorb` with the
    # result of `reward_statistics` before `prepare`, and with the result of `obs_statistics` after the rollout's last
    # gradient. Both results may come from another process. They are empty if the algorithm has no such statistics.
    def reward_statistics(self, rollout: Rollout) -> Statistics: ...
    def prepare(self, rollout: Rollout) -> Batch: ...  # called once per rollout, before its first gradient
    def losses(self, batch: Batch, clock: Clock) -> Losses: ...
    def obs_statistics(self, rollout: Rollout) -> Statistics: ...
    def absorb(self, statistics: Statistics) -> None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> object: ...
    def to(self, device: torch.device) -> object: ...


@runtime_checkable
class HasTargetNetworks(Protocol):
    """An algorithm with target networks, which `after_update` may move toward the updated parameters."""

    def after_update(self, clock: Clock) -> None: ...  # called after an update, which `clock.version` counts already


@runtime_checkable
class SeparableAlgorithm(Algorithm, Protocol):
    """An algorithm that lets a learner split a batch by columns and combine the gradients of the parts."""

    # How to combine the gradients of the parts: as a sum, or as a mean weighted by the parts' numbers of real rows.
    # None: batches must not be split.
    @property
    def gradient_reduction(self) -> Literal["sum", "mean"] | None: ...


@runtime_checkable
class ActorCriticAlgorithm(Algorithm, Protocol):
    """An algorithm whose losses are those of critics and those of an actor, which can be computed at the same time.

    `losses` returns the losses of critics and actor; `critic_losses` and `actor_losses` return the two separately.
    All three use the parameters before the update with this batch. `actor_losses` returns no priorities.
    """

    def critic_losses(self, batch: Batch, clock: Clock) -> Losses: ...
    def actor_losses(self, batch: Batch, clock: Clock) -> Losses: ...


@runtime_checkable
class CountsLearnedRows(Protocol):
    """An algorithm whose losses may be means over fewer rows than the real rows of a batch."""

    def num_learned(self, batch: Batch) -> int: ...  # number of rows over which the losses are averaged


@runtime_checkable
class PrioritizingAlgorithm(Algorithm, Protocol):
    """An algorithm with TD errors that samplers can compute, as initial priorities of new rows.

    A sampler's copy of the algorithm receives only the agent's parameters. Its target networks, if any, keep their
    initial weights, so `td_error` must first copy the agent's parameters to them or must not use them.
    """

    def td_error(self, batch: Batch) -> Tensor: ...  # one TD error per row, or per sequence


class Replay(Protocol):
    """Stores sampled rows, and yields batches of them when updates are due.

    Samplers reuse their arrays, so a replay copies everything that it keeps for longer than a round.
    """

    def add(self, batch: Batch) -> None: ...
    def batches(self) -> Iterator[Batch]: ...  # yields the batches that are due now, possibly none
    # Takes the absolute errors of batch `key`, from which a prioritized replay computes new priorities. If `priority`
    # is None, priorities stay as they are.
    def feedback(self, key: Any, priority: Tensor | None) -> None: ...
    def cut(self) -> None: ...  # ends all stored episodes, because the envs start new ones
    def paused(self) -> AbstractContextManager[None]: ...  # in this context, samplers begin no rollout
    # Write the rows that no file in `directory` holds yet. Return the state for a checkpoint: the names of all files
    # with rows, and plain values. Return None if there is nothing to save.
    def save(self, directory: Path) -> dict[str, Any] | None: ...
    def load(self, directory: Path, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class DivisibleReplay(Replay, Protocol):
    """A replay that can store one part of a run (remuda.parts). Each part's replay counts the steps of all parts."""

    needs_saving: bool  # whether `save` returns a state

    def set_part(self, part: int, parts: int) -> None: ...  # called before the first draw

    # `append` stores a batch, and returns its number of real steps and whether a batch can be drawn. `count_steps`
    # takes the number of real steps of all parts together, and whether a batch can be drawn in every part. In a run
    # with one part, `add` calls `append`, then `count_steps`.
    def append(self, batch: Batch) -> tuple[int, bool]: ...
    def count_steps(self, steps: int, can_draw: bool) -> None: ...

    @property
    def num_due(self) -> int: ...  # upper limit of the batches that `batches` yields now; the same in all parts


class SharedReplay(Replay, Protocol):
    """A replay that other processes write to."""

    @property
    def is_due(self) -> bool: ...  # whether a batch is due; one call of `batches` may yield only some due batches
    @property
    def is_throttled(self) -> bool: ...  # whether writers wait when updates fall behind

    # Count the rows written since the last call, and return how many of them are real steps. `left` is the number of
    # real steps that the run still needs, including those that this call returns; writers wait once they have written
    # that many. None sets no limit.
    def sync(self, left: int | None = None) -> int: ...
    def commit(self) -> None: ...  # ends a round: later checkpoints include the steps that `sync` counted in it
    def new_observations(self) -> Iterator[Rollout]: ...  # observations of rows added since the last call
    def on_writer_lost(self, group: int) -> int: ...  # returns the row number where the group's next writer starts
    def metrics(self) -> dict[str, float]: ...


class Weights(Protocol):
    """The newest parameters and their version, which the learner publishes and other processes pull."""

    def publish(self, version: int) -> None: ...

    def pull(self, have: int) -> int:
        """Copy the newest parameters into the agent, unless it has them already; return their version.

        `have` is the result of the last call, or -1 in the first call, which always copies the parameters.
        """

    def invitation(self) -> tuple[dict[str, str | None], list[int]]:
        """Return the arguments `message` and `fds` (file descriptors) with which another process calls `join`."""

    @classmethod
    def join(cls, module: nn.Module, message: Mapping[str, object], fds: list[int]) -> Self:
        """Return weights that `pull` into `module`, this process's copy of the agent.

        `message` and `fds` come from `invitation`. The descriptors that belong to the weights are removed from `fds`.
        """

    def close(self) -> None: ...


# --- running --------------------------------------------------------------------------------------------------


def derive_seed(seed: int, *keys: int) -> int:
    """Return a 31-bit seed from a seed and keys such as env index and restarts; similar keys give unrelated seeds."""
    return int(np.random.SeedSequence((seed, *keys)).generate_state(1)[0] >> 1)
