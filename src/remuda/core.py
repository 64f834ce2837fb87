"""The interfaces of Remuda, as dataclasses and protocols without behavior.

An `Envs` steps environments in which an `Agent` acts. A `Replay` decides which batches are due, an `Algorithm`
computes their losses, and a `Learner` (learning/learner.py) turns these into updates. `Weights` carry the new
parameters to the samplers. Samplers, recipes and schemes, which put these parts together, are in recipe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from remuda.data.arrays import ArrayTuple, namedarraytuple
from remuda.data.rollout import Batch, Rollout

if TYPE_CHECKING:  # env workers import this module, and never torch
    from torch import Tensor, nn


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
    """The position in a run, of which schedules are functions."""

    version: int = 0  # updates applied
    progress: float = 0.0  # fraction of the run's steps that are done, 0 to 1


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


def derive_seed(seed: int, *keys: int) -> int:
    """Return a 31-bit seed for one purpose, such as (env index, restarts); neighboring keys give unrelated seeds."""
    return int(np.random.SeedSequence((seed, *keys)).generate_state(1)[0] >> 1)
