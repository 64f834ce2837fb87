"""Registry of fast paths, by class of algorithm and class of agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from remuda.core import Agent, Algorithm, FastPolicy
from remuda.fast.agreement import CheckedGradients, GradientFunction

# Functions of these two types return None for an algorithm or agent whose networks they do not support.
MakeGradients = Callable[[Any], GradientFunction | None]
MakePolicy = Callable[[Any], FastPolicy | None]
Made = TypeVar("Made", bound=MakeGradients)
MadePolicy = TypeVar("MadePolicy", bound=MakePolicy)


@runtime_checkable
class HasThreads(Protocol):
    """A gradient function that has threads. `close` ends the threads."""

    def close(self) -> None: ...


_gradients: dict[tuple[type, type, bool], MakeGradients] = {}
_policies: dict[type, MakePolicy] = {}


def register(algorithm: type, agent: type, side_by_side: bool = False) -> Callable[[Made], Made]:
    """Register the decorated function, which makes the gradient function of an algorithm.

    With `side_by_side`, the gradient function computes the gradients of actor and critics at the same time.

        @register(PPO, PolicyAgent)
        def ppo_gradients(ppo: PPO) -> GradientFunction | None: ...

    The function is called for algorithms of class `algorithm` whose agent has the class `agent`. A gradient function
    takes a batch and a clock, and returns the gradients that autograd would compute from `losses`. It returns None if
    it does not support the batch; autograd then computes the gradients.
    """

    def add(make: Made) -> Made:
        _gradients[algorithm, agent, side_by_side] = make
        return make

    return add


def register_policy(agent: type) -> Callable[[MadePolicy], MadePolicy]:
    """Register the decorated function, which makes the fast policy of an agent of class `agent`."""

    def add(make: MadePolicy) -> MadePolicy:
        _policies[agent] = make
        return make

    return add


def find(algorithm: Algorithm, side_by_side: bool = False) -> CheckedGradients | None:
    """Return hand-written gradients of the algorithm's losses, or None if there are none.

    Only functions that were registered with the same value of `side_by_side` are considered.

    A subclass gets the gradients of its base class only if it does not override `losses`. The agent's class must be
    exactly the registered class, because a subclass may compute other outputs.
    """
    own = type(algorithm)
    for registered in own.__mro__:
        make = _gradients.get((registered, type(algorithm.agent), side_by_side))
        if make is not None:
            is_inherited = getattr(own, "losses") is getattr(registered, "losses")  # noqa: B009  (for mypy)
            compute = make(algorithm) if is_inherited else None
            if compute is None:
                return None
            end = compute.close if isinstance(compute, HasThreads) else lambda: None
            return CheckedGradients(own.__name__, compute, end)
    return None


def find_policy(agent: Agent) -> FastPolicy | None:
    """Return a fast policy that shares the agent's parameters, or None if the agent is not supported."""
    make = _policies.get(type(agent))
    return None if make is None else make(agent)
