"""The protocol of groups, explored exhaustively in small scopes, and with each of its rules left out."""

from __future__ import annotations

import pytest

from remuda.rpc.core.accumulator import Accumulator
from remuda.rpc.core.broker import Broker
from remuda.rpc.core.messages import Effects, Header, Sync
from remuda.rpc.explorer import Found, Scope, explore


class WithoutAcknowledgement(Accumulator):
    """The leader commits what it has prepared, whether the others hold it or not."""

    def _may_commit(self, version: int) -> bool:
        return self.phase == "open" and version in self.prepared


class CommitOnArrival(Accumulator):
    """As in moolib: every member increments its version when a result arrives."""

    def on_reduced(self, header: Header, result: object) -> Effects:
        effects = super().on_reduced(header, result)
        while self.version + 1 in self.prepared:
            self._commit(self.version + 1)
        return effects


class RollForward(Accumulator):
    """A member commits the prepared results in the leader's state, instead of waiting for a proposal to all."""

    def _on_sync(self, message: Sync, payload: tuple[object, tuple[object, ...]]) -> Effects:
        was_syncing = self.phase == "syncing"
        effects = super()._on_sync(message, payload)
        while was_syncing and self.version + 1 in self.prepared:
            self._commit(self.version + 1)
        return effects


class DropPrepared(Accumulator):
    """Prepared results are dropped when a view changes."""

    def _drop_after_gap(self) -> None:
        self.prepared = {}

    def _on_sync(self, message: Sync, payload: tuple[object, tuple[object, ...]]) -> Effects:
        message = Sync(message.epoch, message.lineage, message.version, (), message.counted)
        state, _ = payload
        return super()._on_sync(message, (state, ()))


class WithoutCarriers(Broker):
    """Any member may lead, also one that has not received the leader's state yet."""

    def _carriers(self, alive: frozenset[str]) -> frozenset[str]:
        return alive


SCOPES = {
    "a newcomer and a crash": Scope(peers=3, newcomers=1, views=2, contributions=1, crashes=1),
    "three views": Scope(peers=2, newcomers=0, views=3, contributions=1, crashes=0),
    "a window of two": Scope(peers=2, newcomers=0, views=2, contributions=2, crashes=0, window=2),
    "a virtual batch of two": Scope(peers=2, newcomers=0, views=2, contributions=3, crashes=0, virtual_batch=2),
}
LARGE_SCOPES = {
    "three views and two updates": Scope(peers=2, newcomers=0, views=3, contributions=2, crashes=0),
    "a window of two and three updates": Scope(peers=2, newcomers=0, views=2, contributions=3, crashes=0, window=2),
    "a newcomer, a crash and two updates": Scope(peers=3, newcomers=1, views=2, contributions=2, crashes=1),
}


def check(scope: Scope) -> None:
    found = explore(scope)
    assert found.violation == "", found.trace
    assert found.states > 1000
    assert found.committed >= 1


@pytest.mark.parametrize("name", SCOPES)
def test_every_state_of_a_small_scope_satisfies_the_invariants(name: str) -> None:
    check(SCOPES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE_SCOPES)
def test_every_state_of_a_larger_scope_satisfies_the_invariants(name: str) -> None:
    check(LARGE_SCOPES[name])


@pytest.mark.parametrize(
    ("machine", "scope"),
    [
        (WithoutAcknowledgement, Scope(peers=2, newcomers=0, views=1, contributions=1, crashes=0)),
        (CommitOnArrival, Scope(peers=2, newcomers=0, views=2, contributions=2, crashes=0)),
        (RollForward, Scope(peers=3, newcomers=0, views=2, contributions=1, crashes=0)),
        (DropPrepared, Scope(peers=2, newcomers=0, views=2, contributions=2, crashes=0)),
    ],
)
def test_leaving_out_a_rule_of_a_peer_is_found(machine: type[Accumulator], scope: Scope) -> None:
    found = explore(Scope(**{name: getattr(scope, name) for name in scope.__struct_fields__} | {"machine": machine}))
    assert_is_found(found)


def test_leaving_out_the_carriers_is_found() -> None:
    scope = Scope(peers=2, newcomers=0, views=2, contributions=1, crashes=0, broker=WithoutCarriers)
    assert_is_found(explore(scope))


def assert_is_found(found: Found) -> None:
    print("\n".join([f"{found.states} states: {found.violation}", *found.trace]))
    assert found.violation
    assert found.trace
