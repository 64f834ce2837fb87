"""Membership of one group: the broker decides who is a member, in which order, and who leads.

    broker = Broker(Timing(), now)
    effects = broker.on_message(now, beat) + broker.on_tick(now)

The rules are those of PacificA: membership changes only here, every change begins a new epoch, and only a *carrier*,
a peer that holds every committed update, can become the leader. `state` and `restore` are for the broker's file.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from remuda.rpc.core.messages import Beat, Effects, Message, Note, Send, Store, Synced, View


class Timing(msgspec.Struct, frozen=True):
    """Times in seconds; all peers of a group and their broker use the same ones."""

    beat: float = 0.25  # between two beats of a peer
    silence: float = 1.0  # a peer without a beat for this long leaves the group
    view: float = 0.2  # between two views
    resend: float = 0.1  # before a message that was not answered is sent again
    round: float = 5.0  # time limit of a reduction


class BrokerState(msgspec.Struct, frozen=True):
    """What the broker must not forget; written to its file at each change."""

    lineage: int = 0  # number of times that a state was declared valid: at the first view, and by --unclean
    epoch: int = 0
    members: tuple[str, ...] = ()
    leader: str = ""
    carriers: frozenset[str] = frozenset()  # peers that hold every committed update; empty before a lineage begins


class Broker:
    """The broker's part of the protocol for one group."""

    def __init__(self, timing: Timing, now: float, state: BrokerState | None = None) -> None:
        """Begin without members, or continue from the `state` of an earlier broker.

        A restarted broker first listens for `timing.silence` seconds, because it cannot know which peers are alive.
        """
        self.timing = timing
        self.state = BrokerState() if state is None else state
        self.beats: dict[str, Beat] = {}  # newest beat of every peer, in the order of their first beats
        self._heard_at: dict[str, float] = {}
        self._viewed_at = now
        self._quiet_until = now + (timing.silence if self.state.epoch else 0.0)
        self._is_told: set[str] = set()  # problems that were logged

    def on_message(self, now: float, message: Message) -> Effects:
        if isinstance(message, Beat):
            self.beats[message.peer] = message
            self._heard_at[message.peer] = now
            state = self.state
            if message.epoch < state.epoch and message.peer in state.members:  # the peer missed the newest view
                return [Send(message.peer, self._view())]
            if not message.is_synced:
                return []
        return self._on_synced(message) if isinstance(message, (Beat, Synced)) else []

    def on_tick(self, now: float) -> Effects:
        """Begin a new view if the set of peers that beat has changed, or if a member reports a stuck reduction."""
        silent = [peer for peer, at in self._heard_at.items() if now - at > self.timing.silence]
        for peer in silent:
            del self._heard_at[peer], self.beats[peer]
        if now < self._quiet_until or now - self._viewed_at < self.timing.view:
            return []
        is_stuck = any(beat.is_stuck and beat.epoch == self.state.epoch for beat in self.beats.values())
        if not is_stuck and set(self.beats) == set(self.state.members):
            return []
        return self.change_view(now, self.beats)

    def change_view(self, now: float, alive: Iterable[str]) -> Effects:
        """Begin a new epoch with the peers `alive`; do nothing if none of them holds every committed update."""
        old = self.state
        beats = [self.beats[peer] for peer in alive]
        members = tuple(beat.peer for beat in sorted(beats, key=lambda beat: beat.order))
        if not members:
            return []
        if problem := self._find_problem(beats):
            return self._tell(problem)
        carriers = self._carriers(frozenset(members))
        if not carriers:
            return self._tell(
                f"no peer that holds all updates is connected (of {', '.join(sorted(old.carriers))}): start one of "
                "them, or continue from a checkpoint with --unclean."
            )
        leader = max(carriers, key=self._rank)
        if old.carriers:
            lineage = old.lineage
        else:  # a lineage begins with the state of its leader, which all others copy
            lineage, carriers = old.lineage + 1, frozenset({leader})
        self.state = BrokerState(lineage, old.epoch + 1, members, leader, carriers)
        self._viewed_at = now
        self._is_told.clear()
        return [Store(), *(Send(peer, self._view()) for peer in members)]

    def begin_lineage(self, now: float) -> Effects:
        """Give up updates that only lost peers hold, and continue with those that are connected (--unclean)."""
        lineage = max([self.state.lineage, *(beat.lineage for beat in self.beats.values())])
        epoch = max([self.state.epoch, *(beat.epoch for beat in self.beats.values())])
        self.state = BrokerState(lineage, epoch)
        return self.change_view(now, self.beats)

    def _carriers(self, alive: frozenset[str]) -> frozenset[str]:
        """Return those that may lead: the carriers that are alive, or everyone if a lineage is about to begin."""
        return self.state.carriers & alive if self.state.carriers else alive

    def _rank(self, peer: str) -> tuple[int, int, str]:
        beat = self.beats[peer]
        return beat.version, beat.prepared, peer

    def _find_problem(self, beats: list[Beat]) -> str:
        """Return why a view must not begin; an empty string if it may.

        Peers know of a later epoch than the broker only if the broker's file was lost or is an old copy.
        """
        state = self.state
        newest = max(beats, key=lambda beat: (beat.lineage, beat.epoch))
        if (newest.lineage, newest.epoch) > (state.lineage, state.epoch) and newest.epoch:
            return (
                f"{newest.peer} is in epoch {newest.epoch} of lineage {newest.lineage}, but this broker's file ends "
                f"at epoch {state.epoch} of lineage {state.lineage}: restore the newest file, or use --unclean."
            )
        return ""

    def _on_synced(self, message: Beat | Synced) -> Effects:
        state = self.state
        if message.epoch != state.epoch or message.peer not in state.members or message.peer in state.carriers:
            return []
        self.state = msgspec.structs.replace(state, carriers=state.carriers | {message.peer})
        return [Store()]

    def _view(self) -> View:
        state = self.state
        return View(state.epoch, state.lineage, state.members, state.leader)

    def _tell(self, problem: str) -> Effects:
        if problem in self._is_told:
            return []
        self._is_told.add(problem)
        return [Note(problem)]
