"""The broker of a group: who is a member, who may lead, and what it refuses."""

from __future__ import annotations

from remuda.rpc.core.broker import Broker, BrokerState, Timing
from remuda.rpc.core.messages import Beat, Effects, Note, Send, Store, Synced, View

TIMING = Timing()


def beat(peer: str, epoch: int = 0, version: int = 0, **values: int) -> Beat:
    return Beat(epoch, peer, values.pop("lineage", int(epoch > 0)), version, values.pop("prepared", 0), **values)


def views(effects: Effects) -> dict[str, View]:
    return {
        effect.to: effect.message
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, View)
    }


def with_members(*peers: str) -> Broker:
    """Return a broker whose first view has these members, all of which are synced."""
    broker = Broker(TIMING, 0.0)
    for peer in peers:
        broker.on_message(0.0, beat(peer))
    broker.on_tick(0.3)
    for peer in peers:
        broker.on_message(0.3, Synced(1, peer))
    return broker


def test_the_first_view_is_led_by_the_newest_version_and_stored_before_it_is_sent() -> None:
    broker = Broker(TIMING, 0.0)
    for peer, version in [("b", 3), ("a", 7), ("c", 7)]:
        broker.on_message(0.0, beat(peer, version=version))
    assert broker.on_tick(0.1) == [], "views are at least 0.2 s apart"
    effects = broker.on_tick(0.2)
    assert isinstance(effects[0], Store)
    assert views(effects) == {peer: View(1, 1, ("b", "a", "c"), "c") for peer in "abc"}
    assert broker.state.carriers == {"c"}, "the others do not hold the leader's state yet"


def test_members_are_sorted_by_their_order_and_then_by_their_first_beat() -> None:
    broker = Broker(TIMING, 0.0)
    for peer, order in [("x", 5), ("y", 1), ("z", 1)]:
        broker.on_message(0.0, beat(peer, order=order))
    broker.on_tick(0.2)
    assert broker.state.members == ("y", "z", "x")


def test_a_peer_without_beats_leaves_and_only_carriers_may_lead() -> None:
    broker = Broker(TIMING, 0.0)
    for peer in "ab":
        broker.on_message(0.0, beat(peer))
    broker.on_tick(0.2)
    assert broker.state.leader == "b"
    broker.on_message(1.1, beat("a", epoch=1))
    effects = broker.on_tick(1.2)
    assert views(effects) == {}, "a has not received the state of b, and must not continue alone"
    assert [type(effect) for effect in effects] == [Note]
    assert "of b" in effects[0].text
    assert broker.on_tick(1.3) == [], "the problem is logged once"
    broker.on_message(1.4, beat("b", epoch=1))
    assert views(broker.on_tick(1.5)) == {}, "the members are those of the view again"
    broker.on_message(1.5, Synced(1, "a"))
    broker.on_message(2.6, beat("a", epoch=1))
    assert views(broker.on_tick(2.7))["a"] == View(2, 1, ("a",), "a")


def test_a_beat_of_a_synced_member_makes_it_a_carrier_if_its_message_was_lost() -> None:
    broker = with_members("a")
    broker.on_message(0.4, beat("b"))
    broker.on_message(0.4, beat("a", epoch=1))
    broker.on_tick(0.6)
    assert broker.state.carriers == {"a"}
    broker.on_message(0.7, beat("b", epoch=2, is_synced=True))
    assert broker.state.carriers == {"a", "b"}


def test_a_member_that_missed_its_view_receives_it_again() -> None:
    broker = with_members("a", "b")
    assert views(broker.on_message(0.5, beat("a", epoch=0))) == {"a": View(1, 1, ("a", "b"), "b")}
    assert broker.on_message(0.5, beat("a", epoch=1)) == []


def test_a_stuck_reduction_begins_a_new_epoch_with_the_same_members() -> None:
    broker = with_members("a", "b")
    for peer in "ab":
        broker.on_message(0.6, beat(peer, epoch=1, is_stuck=True))
    assert views(broker.on_tick(0.7))["a"] == View(2, 1, ("a", "b"), "b")


def test_a_restarted_broker_listens_before_it_changes_the_view() -> None:
    state = with_members("a", "b").state
    broker = Broker(TIMING, 10.0, state)
    broker.on_message(10.1, beat("a", epoch=1))
    assert broker.on_tick(10.9) == []
    broker.on_message(10.9, beat("a", epoch=1))
    broker.on_message(10.9, beat("b", epoch=1))
    assert broker.on_tick(11.5) == [], "all members are there"
    assert broker.state == state


def test_a_lost_file_is_refused_and_unclean_begins_a_new_lineage() -> None:
    for state in (None, BrokerState(1, 3, ("a",), "a", frozenset({"a"}))):
        broker = Broker(TIMING, 0.0, state)
        for at in (0.0, 0.9, 1.2):
            broker.on_message(at, beat("a", epoch=8))
            broker.on_message(at, beat("b", epoch=9))
        (note,) = broker.on_tick(1.3)
        assert isinstance(note, Note)
        assert "b is in epoch 9 of lineage 1, but this broker's file ends at epoch" in note.text
        assert "--unclean" in note.text
        assert views(broker.begin_lineage(1.4))["a"] == View(10, 2, ("a", "b"), "b")
        assert broker.state.carriers == {"b"}
