"""The state of a group that is explored, and the invariants of docs/rpc/protocol.md that must hold in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from remuda.rpc.core.accumulator import OPEN


class World(msgspec.Struct, frozen=True):
    """A state of the group; machines and messages are numbers of `Explorer.things`."""

    broker: int
    peers: tuple[int, ...]  # -1 for a crashed peer
    network: frozenset[int]
    views: tuple[tuple[int, tuple[str, ...]], ...]  # (epoch, members) of all views
    given: int
    crashes: int
    # contributions to every reduction: (epoch, version, peer, what it holds)
    reductions: frozenset[tuple[int, int, str, Any]]
    # what every peer has committed or installed, in order: for each peer a tuple of contents
    states: tuple[tuple[Any, ...], ...]


class Violation(Exception):
    """An invariant does not hold."""


def check(things: Sequence[Any], names: Sequence[str], virtual_batch: int, before: World, world: World) -> None:
    """Raise Violation if an invariant does not hold in `world`, a successor of `before`.

    `things` holds the machines by their numbers, and `names` the names of the peers.
    """
    machines = {name: things[number] for name, number in zip(names, world.peers, strict=True) if number >= 0}
    states = dict(zip(names, world.states, strict=True))
    longest = max(world.states, key=len)
    for name, state in states.items():
        if state != longest[: len(state)]:
            raise Violation(f"I1: {name} applied {state}, another peer {longest}")
    counted = [one for result in longest for one in result]
    if len(counted) != len(set(counted)):
        raise Violation(f"I7: a contribution is counted twice in {longest}")
    for name, machine in machines.items():
        if machine.applied != len(states[name]) or machine.version != machine.applied + len(machine.ready):
            raise Violation(f"I7: {name} is at version {machine.version}, and has applied {len(states[name])}")
    old = {name: things[number] for name, number in zip(names, before.peers, strict=True) if number >= 0}
    for name, machine in machines.items():
        if name in old:
            _check_step(name, old[name], machine, machines, world, states)
    for name in things[world.broker].state.carriers & machines.keys():
        _check_holds(name, machines[name], states[name], longest, "I3")
    # After a view change, what a peer contributed in vain is contributed again in one piece.
    upper = (virtual_batch + len(names)) * (1 if len(world.views) == 1 else 2)
    for result in longest:
        if not virtual_batch <= len(result) < upper:
            raise Violation(f"I6: an update of {len(result)} samples")


def _check_step(
    name: str, old: Any, new: Any, machines: dict[str, Any], world: World, states: dict[str, Any]
) -> None:
    """Check I4, and I2 if the step from `old` to `new` has committed updates."""
    if new.epoch < old.epoch:
        raise Violation(f"I4: {name} went back from epoch {old.epoch} to {new.epoch}")
    if new.version > old.version and old.phase == OPEN and old.epoch == new.epoch:
        for other in dict(world.views)[new.epoch]:
            if other in machines:
                _check_holds(other, machines[other], states[other], states[name], "I2")


def _check_holds(name: str, machine: Any, state: Any, wanted: Any, rule: str) -> None:
    """Check that a peer has committed or prepared everything in `wanted`."""
    for version in range(len(state) + 1, len(wanted) + 1):
        prepared = machine.prepared.get(version)
        if prepared is None or prepared[1] != wanted[version - 1]:
            raise Violation(f"{rule}: {name} does not hold update {version}, which is committed")
