"""Exhaustive exploration of a small group: every order of messages, losses, repetitions, exclusions and crashes.

    found = explore(Scope(peers=3, views=4, contributions=3))
    print(found.states, found.violation)

The explorer drives the state machines of `remuda.rpc.core` that production uses. Messages that were sent may be
delivered at any later time, in any order, any number of times, or never. The broker may exclude and admit any peer at
any time. A reduction may complete at some members and not at others. After every step the invariants of
docs/rpc/protocol.md are checked.

A step of one machine depends on this machine and its input alone, so each is computed once: machines and messages are
numbered, and a state of the group is a tuple of numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from operator import methodcaller
from typing import Any, TypeAlias, TypeVar

import msgspec

from remuda.rpc.core.accumulator import Accumulator
from remuda.rpc.core.broker import Broker, Timing
from remuda.rpc.core.contributions import Contributions
from remuda.rpc.core.messages import (
    BROKER,
    Ack,
    Beat,
    Commit,
    Contribute,
    Cut,
    Effects,
    Header,
    Install,
    Join,
    Offer,
    Seen,
    Send,
    Synced,
    TakeState,
    View,
)
from remuda.rpc.invariants import Violation, World, check

Machine = TypeVar("Machine", Accumulator, Broker)
Step: TypeAlias = tuple[object, ...]  # words that describe a step, joined only for a trace
TIMING = Timing(silence=0.0, view=0.0)
COPIED = (dict, list, set, Contributions)
IGNORED = (
    "_now",
    "_sent_at",
    "_moved_at",
    "_beat_at",
    "_heard_at",
    "_viewed_at",
    "_quiet_until",
    "_is_told",
    "timing",
)


class Scope(msgspec.Struct, frozen=True):
    """What is explored."""

    peers: int = 3
    newcomers: int = 1  # peers that no view contains before the second one
    views: int = 3
    contributions: int = 2  # contributions of all peers together
    crashes: int = 1
    virtual_batch: int = 1
    window: int = 1
    machine: type[Accumulator] = Accumulator
    broker: type[Broker] = Broker
    limit: int = 50_000_000  # states


class Found(msgspec.Struct):
    """Result of an exploration."""

    states: int = 0
    steps: int = 0
    committed: int = 0  # largest number of committed updates in any state
    violation: str = ""
    trace: list[str] = []


def snapshot(machine: Machine) -> Machine:
    """Return a copy of a machine; the values in its containers are immutable."""
    copy = object.__new__(type(machine))
    copy.__dict__.update(
        {name: value.copy() if isinstance(value, COPIED) else value for name, value in vars(machine).items()}
    )
    return copy


def frozen(value: Any) -> Any:
    if isinstance(value, Contributions):
        return value.key()
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, set):
        return frozenset(value)
    return value


class Explorer:
    """Breadth-first search over all states in a scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.names = [chr(ord("A") + index) for index in range(scope.peers)]
        self.things: list[Any] = []
        self._numbers: dict[Hashable, int] = {}
        self._steps: dict[Hashable, tuple[int, Effects]] = {}
        self._fields = [name for name in vars(self._peer("A")) if name not in IGNORED]

    def _peer(self, name: str) -> Accumulator:
        return self.scope.machine(name, TIMING, self.scope.virtual_batch, self.scope.window)

    def number(self, thing: Any) -> int:
        """Return the number of a machine or message; equal ones have the same number."""
        if isinstance(thing, Accumulator):
            key: Hashable = ("peer", *(frozen(getattr(thing, name)) for name in self._fields))
        elif isinstance(thing, Broker):
            key = ("broker", thing.state, tuple(sorted(thing.beats.items())))
        else:
            key = thing
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.things)
            self.things.append(thing)
        return found

    def step(self, machine: int, key: Hashable, call: Callable[[Any], Effects]) -> tuple[int, Effects]:
        """Return the number of the machine after `call`, and the effects; `key` identifies the call."""
        known = self._steps.get((machine, key))
        if known is None:
            copy = snapshot(self.things[machine])
            effects = call(copy)
            known = self._steps[machine, key] = (self.number(copy), effects)
        return known

    def first(self) -> World:
        broker = self.number(self.scope.broker(TIMING, 0.0))
        peers = tuple(self.number(self._peer(name)) for name in self.names)
        empty: tuple[Any, ...] = ()
        return World(broker, peers, frozenset(), (), 0, 0, frozenset(), tuple(empty for _ in peers))

    # --- steps ------------------------------------------------------------------------------------------------------

    def next(self, world: World) -> Iterator[tuple[Step, World]]:
        """Yield every state that one step leads to, with a description of the step."""
        scope = self.scope
        for number in world.network:
            to, message, payload = self.things[number]
            if to == BROKER:
                broker, _ = self.step(world.broker, number, methodcaller("on_message", 0.0, message))
                if broker != world.broker:
                    yield ("broker receives", message), self._with(world, broker=broker)
                continue
            yield from self._move(
                world,
                self.names.index(to),
                number,
                methodcaller("on_message", 0.0, message, payload),
                (to, "receives", message),
            )
        for index, number in enumerate(world.peers):
            if number < 0:
                continue
            name, machine = self.names[index], self.things[number]
            if world.given < scope.contributions and machine.wants_gradients:
                given = ((name, machine.own.sequence + 1),)
                yield from self._move(
                    self._with(world, given=world.given + 1),
                    index,
                    "give",
                    methodcaller("give", given, 1, machine.version),
                    (name, "gives", given),
                )
            yield from self._reduced(world, index)
            if world.crashes < scope.crashes:
                peers = (*world.peers[:index], -1, *world.peers[index + 1 :])
                yield (name, "crashes"), self._with(world, peers=peers, crashes=world.crashes + 1)
        if len(world.views) < scope.views:
            yield from self._views(world)

    def _views(self, world: World) -> Iterator[tuple[Step, World]]:
        names = self.names if world.views else self.names[: len(self.names) - self.scope.newcomers]
        for chosen in range(1, 1 << len(names)):
            alive = [name for index, name in enumerate(names) if chosen >> index & 1]
            for leader in alive:

                def change(broker: Any, alive: list[str] = alive, leader: str = leader) -> Effects:
                    beats = [Beat(0, name, 0, int(name == leader), 0) for name in alive]
                    broker.beats = dict(zip(alive, beats, strict=True))
                    effects = list(broker.change_view(0.0, alive))
                    broker.beats = {}
                    return effects

                broker, effects = self.step(world.broker, ("view", chosen, leader), change)
                yield from self._begun(world, broker, effects)

    def _begun(self, world: World, broker: int, effects: Effects) -> Iterator[tuple[Step, World]]:
        sent = [effect for effect in effects if isinstance(effect, Send)]
        if sent:
            view = sent[0].message
            assert isinstance(view, View)
            after = self._with(world, broker=broker, views=(*world.views, (view.epoch, view.members)))
            yield ("broker begins", view), self._sent(after, sent)

    def _reduced(self, world: World, index: int) -> Iterator[tuple[Step, World]]:
        """Complete a reduction at one member, if all members have contributed to it."""
        machine = self.things[world.peers[index]]
        epoch = machine.epoch
        members = dict(world.views).get(epoch, ())
        held: dict[int, dict[str, Any]] = {}
        for at, version, peer, what in world.reductions:
            if at == epoch:
                held.setdefault(version, {})[peer] = what
        for version, by_peer in held.items():
            if len(by_peer) < len(members) or version <= machine.version or version in machine.prepared:
                continue
            present = [(peer, by_peer[peer]) for peer in members if by_peer[peer] is not None]
            result = tuple(one for _, each in present for one in each.gradient)
            header = Header(
                version,
                epoch,
                hash(result),
                len(result),
                len(members) - len(present),
                sum(each.samples for _, each in present),
                tuple((peer, each.last) for peer, each in present),
            )
            yield from self._move(
                world,
                index,
                ("reduced", header),
                methodcaller("on_reduced", header, result),
                (self.names[index], "reduces update", version, "of epoch", epoch),
            )

    def _move(
        self, world: World, index: int, key: Hashable, call: Callable[[Any], Effects], what: Step
    ) -> Iterator[tuple[Step, World]]:
        """Let one peer take a step, and its main loop apply whatever is ready."""
        before = world.peers[index]
        if before < 0:
            return
        number, effects = self.step(before, key, call)
        if number == before and not effects:
            return
        sent, name, states = [], self.names[index], world.states[index]
        reductions = world.reductions
        queue = list(effects)
        while True:
            for effect in queue:
                if isinstance(effect, Send):
                    sent.append(effect)
                elif isinstance(effect, Contribute):
                    reductions |= {(effect.epoch, effect.version, name, effect.held)}
                elif isinstance(effect, Install):
                    states = effect.state  # type: ignore[assignment]
            asked = [effect for effect in queue if isinstance(effect, TakeState)]
            machine = self.things[number]
            if machine.ready:
                states = (*states, machine.ready[0][1])
                number, queue = self.step(number, "applied", methodcaller("on_applied"))
            elif asked:
                take = methodcaller("on_state", asked[0].version, states)
                number, queue = self.step(number, ("state", states), take)
            else:
                break
        peers = (*world.peers[:index], number, *world.peers[index + 1 :])
        histories = (*world.states[:index], states, *world.states[index + 1 :])
        after = self._with(world, peers=peers, states=histories, reductions=reductions)
        after = self._sent(after, sent)
        yield what, after

    def _with(self, world: World, **changes: Any) -> World:
        return msgspec.structs.replace(world, **changes)

    def _sent(self, world: World, sent: list[Any]) -> World:
        """Add messages to the network, and remove those that can have no effect any more."""
        network = set(world.network)
        network.update(self.number((effect.to, effect.message, effect.payload)) for effect in sent)
        peers = {
            name: self.things[number] if number >= 0 else None
            for name, number in zip(self.names, world.peers, strict=True)
        }
        kept = [number for number in network if not self._is_spent(world, peers, *self.things[number][:2])]
        oldest = min((machine.epoch for machine in peers.values() if machine is not None), default=0)
        reductions = frozenset(each for each in world.reductions if each[0] >= oldest)
        return self._with(world, network=frozenset(kept), reductions=reductions)

    def _is_spent(self, world: World, peers: dict[str, Any], to: str, message: Any) -> bool:
        """Return whether a message can have no effect any more, now or later; the search then forgets it."""
        if to == BROKER:
            state = self.things[world.broker].state
            return not isinstance(message, Synced) or message.epoch < state.epoch or message.peer in state.carriers
        peer = peers[to]
        if peer is None or message.epoch < peer.epoch:
            return True
        if message.epoch > peer.epoch:
            return False
        match message:
            case View():
                return True
            case Seen():
                return bool(message.sequence <= peer.own.confirmed)
            case Offer():
                return bool(message.after < peer.contributed)
            case Cut():
                return bool(message.version <= peer.contributed)
            case Commit():
                return bool(message.version <= peer.version)
            case Ack():
                return message.peer in peer.acks.get(message.version, ())
            case Join() | Synced():
                return message.peer in peer.synced
        return False


def explore(scope: Scope) -> Found:
    """Visit every state in a scope, and stop at the first violation, which is one of the shortest."""
    explorer, found = Explorer(scope), Found()
    first = explorer.first()
    visited: set[World] = {first}
    parents: list[tuple[int, Step]] = [(-1, ())]
    queue = deque([(0, first)])
    while queue and found.states < scope.limit:
        at, world = queue.popleft()
        found.states += 1
        found.committed = max(found.committed, *(len(state) for state in world.states))
        for what, after in explorer.next(world):
            found.steps += 1
            if after in visited:
                continue
            visited.add(after)
            parents.append((at, what))
            try:
                check(explorer.things, explorer.names, scope.virtual_batch, world, after)
            except Violation as violation:
                found.violation = str(violation)
                found.trace = trace_of(parents, len(parents) - 1)
                return found
            queue.append((len(parents) - 1, after))
    return found


def trace_of(parents: list[tuple[int, Step]], at: int) -> list[str]:
    """Return the steps from the first state to state number `at`."""
    steps: list[str] = []
    while at > 0:
        at, what = parents[at]
        steps.append(" ".join(map(str, what)))
    return steps[::-1]
