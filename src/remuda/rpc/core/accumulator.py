"""Agreed updates of a group: every member applies the same results in the same order, whatever fails.

    accumulator = Accumulator("peer-1", Timing())
    effects = accumulator.give(gradient, samples=32, base=accumulator.applied)
    effects = accumulator.on_message(now, message, payload) + accumulator.on_tick(now)
    while accumulator.ready:
        version, result = accumulator.ready[0]        # the main loop applies the result, and then calls:
        effects = accumulator.on_applied()

A result is *reduced* by the data plane, *prepared* when a member holds it, *committed* when all members hold it, and
*applied* when the main loop has used it. Only the leader commits, and only after all members have acknowledged the
result. A new leader first proposes its prepared results again, so that a result which some member may have committed
is never replaced by another one for the same version. Contributions to a reduction that was abandoned are contributed
again, but not before all members have the new leader's state: until then, a member may hold a prepared result that
counts them, and may lead the next view.
"""

from __future__ import annotations

from typing import Any

from remuda.rpc.core.broker import Timing
from remuda.rpc.core.contributions import Contributions
from remuda.rpc.core.messages import (
    BROKER,
    Abandon,
    Ack,
    Beat,
    Commit,
    Contribute,
    Cut,
    Effects,
    Header,
    Install,
    Join,
    Message,
    Note,
    Offer,
    Propose,
    Seen,
    Send,
    Sync,
    Synced,
    TakeState,
    View,
)

OUT, SYNCING, OPEN = "out", "syncing", "open"


class Accumulator:
    """A peer's part of the protocol."""

    def __init__(self, name: str, timing: Timing, virtual_batch: int = 1, window: int = 1, max_lag: int = 1) -> None:
        """Create a peer outside of any view.

        The leader starts an update when offers reach `virtual_batch` samples. At most `window` updates are reduced or
        prepared at once. Gradients of parameters that are more than `max_lag` updates old are dropped.
        """
        self.name, self.timing = name, timing
        self.virtual_batch, self.window, self.max_lag = virtual_batch, window, max_lag
        self.lineage, self.epoch, self.phase = 0, 0, OUT
        self.members: tuple[str, ...] = ()
        self.leader = ""
        self.version = 0  # committed updates
        self.applied = 0  # updates that the main loop has applied
        self.ready: list[tuple[int, object]] = []  # committed results that the main loop has not applied yet
        self.prepared: dict[int, tuple[Header, object]] = {}  # by version; all after `version`
        self.counted: dict[str, int] = {}  # sequence number of every peer's newest contribution in a committed update
        self.crcs: dict[int, int] = {}  # checksums of the newest committed results, to acknowledge proposals again
        self.own = Contributions()
        self.contributed = 0  # newest version that was cut in this epoch, or that the epoch began with
        self.is_begun = False  # whether the leader is known to have opened this epoch
        self.dropped = 0  # contributions dropped because they were too old
        # What the leader knows of the members.
        self.synced: set[str] = set()
        self.joins: dict[str, Join] = {}  # members that wait for the leader's state
        self.snapshot: tuple[int, object] | None = None  # (version, state) for members that join this view
        self.offers: dict[str, Offer] = {}
        self.acks: dict[int, frozenset[str]] = {}
        self._now = 0.0  # time of the newest call of on_message or on_tick
        self._sent_at = 0.0  # when messages were last sent again
        self._moved_at = 0.0  # when a version was last cut or committed
        self._beat_at = -1e9

    # --- the main loop --------------------------------------------------------------------------------------------

    @property
    def wants_gradients(self) -> bool:
        """Whether `give` would be taken: the peer is in a view, and the leader knows of its last contribution."""
        return self.phase == OPEN and self.own.confirmed == self.own.sequence

    def give(self, gradient: object, samples: int, base: int) -> Effects:
        """Contribute a gradient of the parameters of version `base`; `gradient` is added to those not yet reduced."""
        if self.version - base > self.max_lag:
            self.dropped += 1
            return []
        self.own.add(gradient, samples)
        return self._offer()

    def on_applied(self) -> Effects:
        """Record that the main loop has applied the first result of `ready`."""
        self.applied, _ = self.ready.pop(0)
        return self._serve_joins() if self.joins else []

    def on_state(self, version: int, state: object) -> Effects:
        """Receive the state of the main loop that a TakeState effect asked for."""
        if version != self.version or self.phase == OUT:
            return []
        self.snapshot = (version, state)
        return self._serve_joins()

    def on_reduced(self, header: Header, result: object) -> Effects:
        """Receive a result of the data plane; results of earlier epochs are ignored."""
        is_new = header.version > self.version and header.version not in self.prepared
        if header.epoch != self.epoch or self.phase != OPEN or not is_new:
            return []
        self.prepared[header.version] = (header, result)
        return self._acknowledge(header.version, header.crc)

    # --- messages -------------------------------------------------------------------------------------------------

    def on_message(self, now: float, message: Message, payload: Any = None) -> Effects:
        self._now = now
        if isinstance(message, View):
            return self._on_view(message) if message.epoch > self.epoch else []
        if message.epoch != self.epoch or self.phase == OUT:
            return []
        if isinstance(message, Sync):
            return self._on_sync(message, payload)
        self.is_begun |= isinstance(message, (Cut, Propose, Commit, Seen))
        if isinstance(message, Cut):
            return self._on_cut(message.version)
        if isinstance(message, Propose):
            return self._on_propose(message)
        if isinstance(message, Commit):
            return self._on_commit(message)
        if isinstance(message, Seen):
            self.own.confirmed = max(self.own.confirmed, message.sequence)
            return []
        if self.name != self.leader:
            return []
        if isinstance(message, Join):
            return self._on_join(message)
        if isinstance(message, Synced):
            return self._on_synced(message)
        if isinstance(message, Offer):
            return self._on_offer(message)
        if isinstance(message, Ack):
            return self._on_ack(message)
        return []

    def on_tick(self, now: float) -> Effects:
        """Send beats, and send messages again that have not been answered."""
        self._now = now
        effects: Effects = []
        if now - self._beat_at >= self.timing.beat:
            self._beat_at = now
            effects.append(Send(BROKER, self.beat()))
        if self.phase != OUT and now - self._sent_at >= self.timing.resend:
            self._sent_at = now
            effects += self._resend()
        return effects

    def beat(self) -> Beat:
        is_waiting = self.phase == OPEN and self.contributed > self.version
        is_stuck = is_waiting and self._now - self._moved_at > self.timing.round
        known = (self.epoch, self.name, self.lineage, self.version, len(self.prepared))
        return Beat(*known, is_synced=self.phase == OPEN, is_stuck=is_stuck)

    # --- views and state ------------------------------------------------------------------------------------------

    def _on_view(self, view: View) -> Effects:
        """Enter a new epoch: stop reductions, keep prepared results, and wait for the leader's state."""
        self.epoch, self.members, self.leader = view.epoch, view.members, view.leader
        self.synced, self.joins, self.snapshot = set(), {}, None
        self.offers, self.acks = {}, {}
        self.own.abandon()
        self.is_begun = False
        self.contributed, self.own.confirmed, self._moved_at = 0, 0, self._now
        effects: Effects = [Abandon(view.epoch)]
        if self.name not in view.members:
            self.phase = OUT
            return effects
        self.phase = SYNCING
        if self.name != self.leader:
            return [*effects, Send(self.leader, self._join())]
        self.lineage = view.lineage
        self._drop_after_gap()
        self._drop_counted()
        self.synced.add(self.name)
        return effects + (self._open() if len(self.members) == 1 else [])

    def _join(self) -> Join:
        return Join(self.epoch, self.name, self.lineage, self.version)

    def _on_join(self, message: Join) -> Effects:
        if message.peer in self.synced:
            return []
        self.joins[message.peer] = message
        return self._serve_joins()

    def _serve_joins(self) -> Effects:
        """Send the state to members that wait for it; ask the main loop for it first if anyone needs it."""
        effects: Effects = []
        counted = tuple(sorted(self.counted.items()))
        headers = tuple(header for header, _ in self.prepared.values())
        results = tuple(result for _, result in self.prepared.values())
        message = Sync(self.epoch, self.lineage, self.version, headers, counted)
        for peer, join in list(self.joins.items()):
            state = None
            if (join.lineage, join.version) < (self.lineage, self.version) or join.lineage != self.lineage:
                if self.snapshot is None:
                    if self.applied == self.version:  # between updates: the queue of the main loop is empty
                        return [*effects, TakeState(self.version)]
                    continue
                state = self.snapshot[1]
            del self.joins[peer]
            effects.append(Send(peer, message, (state, results)))
        return effects

    def _on_sync(self, message: Sync, payload: tuple[object, tuple[object, ...]]) -> Effects:
        """Take over the leader's state and prepared results; keep an own version that is newer."""
        effects: Effects = []
        if self.phase == SYNCING:
            state, results = payload
            if message.lineage != self.lineage or message.version > self.version:
                self.lineage = message.lineage
                self.version = self.applied = message.version
                self.ready, self.crcs = [], {}
                self.counted = dict(message.counted)
                effects.append(Install(message.lineage, message.version, state))
            prepared = zip(message.prepared, results, strict=True)
            self.prepared = {head.version: (head, result) for head, result in prepared if head.version > self.version}
            self._drop_counted()
            self.phase, self.contributed = OPEN, max([self.version, *self.prepared])
            effects += self._offer()
        synced = Synced(self.epoch, self.name)
        return [*effects, Send(self.leader, synced), Send(BROKER, synced)]

    def _on_synced(self, message: Synced) -> Effects:
        if message.peer in self.members:
            self.synced.add(message.peer)
        if self.phase == SYNCING and self.synced >= set(self.members):
            return self._open()
        return []

    def _open(self) -> Effects:
        """All members are synced: propose what earlier epochs prepared, then begin new updates."""
        self.phase, self.snapshot = OPEN, None
        self.contributed = max([self.version, *self.prepared])
        self._moved_at = self._now
        effects: Effects = []
        for version, (header, _) in sorted(self.prepared.items()):
            effects += self._to_others(Propose(self.epoch, version, header.crc))
            self._add_ack(version, self.name)
        return effects + self._commit_acknowledged() + self._offer()

    def _drop_counted(self) -> None:
        self.own.drop_counted(self.name, self.counted, [header for header, _ in self.prepared.values()])

    def _drop_after_gap(self) -> None:
        """Drop prepared results that follow a missing one: they cannot have been committed, because order is kept."""
        version = self.version + 1
        while version in self.prepared:
            version += 1
        self.prepared = {key: self.prepared[key] for key in range(self.version + 1, version)}

    # --- rounds ---------------------------------------------------------------------------------------------------

    def _offer(self) -> Effects:
        """Tell the leader what this peer would contribute."""
        if self.phase != OPEN:
            return []
        held = self.own.next()
        if held is None:
            self.own.confirmed = self.own.sequence
            return []
        offer = Offer(self.epoch, self.name, self.contributed, self.own.sequence, held.samples)
        return self._on_offer(offer) if self.name == self.leader else [Send(self.leader, offer)]

    def _on_offer(self, offer: Offer) -> Effects:
        """Receive what a member holds, and confirm it unless the next update has enough.

        A member gives nothing more until its offer is confirmed or cut. An update therefore exceeds the virtual batch
        by less than one contribution of each member.
        """
        if self.phase != OPEN or offer.after != self.contributed:
            return []  # the member offers again
        known = self.offers.get(offer.peer)
        if known is None or known.sequence < offer.sequence:
            self.offers[offer.peer] = offer
        effects = self._cut_if_due()
        if effects or self._offered() >= self.virtual_batch:
            return effects
        if offer.peer == self.name:
            self.own.confirmed = offer.sequence
            return []
        return [Send(offer.peer, Seen(self.epoch, offer.sequence))]

    def _offered(self) -> int:
        return sum(offer.samples for offer in self.offers.values())

    def _cut_if_due(self) -> Effects:
        """Begin the next update if the offers suffice and the window has room."""
        if self.phase != OPEN or self.contributed - self.version >= self.window:
            return []
        if self._offered() < self.virtual_batch:
            return []
        version = self.contributed + 1
        return self._to_others(Cut(self.epoch, version)) + self._on_cut(version)

    def _on_cut(self, version: int) -> Effects:
        """Contribute what this peer holds to an update; a member that holds nothing skips it."""
        if self.phase != OPEN or version != self.contributed + 1:
            return []  # a repeated message, or one that overtook an earlier cut and is sent again
        self.contributed, self.offers, self._moved_at = version, {}, self._now
        return [Contribute(self.epoch, version, self.own.cut(version)), *self._offer()]

    def _on_propose(self, message: Propose) -> Effects:
        version = message.version
        crc = self.prepared[version][0].crc if version in self.prepared else self.crcs.get(version)
        if crc is None:
            return []
        self.contributed = max(self.contributed, version)
        return self._acknowledge(version, crc)

    def _acknowledge(self, version: int, crc: int) -> Effects:
        ack = Ack(self.epoch, self.name, version, crc)
        return self._on_ack(ack) if self.name == self.leader else [Send(self.leader, ack)]

    def _on_ack(self, ack: Ack) -> Effects:
        if ack.version <= self.version:  # the member missed the commit
            crc = self.crcs.get(ack.version)
            return [Send(ack.peer, Commit(self.epoch, ack.version, crc))] if crc == ack.crc else []
        self._add_ack(ack.version, ack.peer)
        if ack.version in self.prepared and self.prepared[ack.version][0].crc != ack.crc:
            return [Note(f"{ack.peer} holds other bits than the leader for update {ack.version}")]
        return self._commit_acknowledged()

    def _add_ack(self, version: int, peer: str) -> None:
        self.acks[version] = self.acks.get(version, frozenset()) | {peer}

    def _commit_acknowledged(self) -> Effects:
        """Commit results in order, as far as they are prepared and acknowledged by all members."""
        effects: Effects = []
        while self._may_commit(self.version + 1):
            version = self.version + 1
            crc = self.prepared[version][0].crc
            self.acks.pop(version, None)
            self._commit(version)
            effects += self._to_others(Commit(self.epoch, version, crc))
        return effects + (self._cut_if_due() if effects else [])

    def _may_commit(self, version: int) -> bool:
        is_prepared = self.phase == OPEN and version in self.prepared
        return is_prepared and self.acks.get(version, frozenset()) >= set(self.members)

    def _on_commit(self, message: Commit) -> Effects:
        """Commit up to this version: results are committed in order, and this member has acknowledged all of them."""
        if self.phase != OPEN:
            return []
        for version in range(self.version + 1, message.version + 1):
            if version in self.prepared:
                self._commit(version)
            else:
                break
        return []

    def _commit(self, version: int) -> None:
        header, result = self.prepared.pop(version)
        self.version, self._moved_at = version, self._now
        self.ready.append((version, result))
        self.counted.update(header.counted)
        self.own.reducing.pop(version, None)
        self.crcs[version] = header.crc
        self.crcs.pop(version - 2 * self.window, None)

    # --- messages again -------------------------------------------------------------------------------------------

    def _to_others(self, message: Message) -> Effects:
        return [Send(peer, message) for peer in self.members if peer != self.name]

    def _resend(self) -> Effects:
        """Repeat what may have been lost: all messages may be received any number of times."""
        if self.name != self.leader:
            if self.phase == SYNCING:
                return [Send(self.leader, self._join())]
            acks = [Ack(self.epoch, self.name, each, head.crc) for each, (head, _) in self.prepared.items()]
            synced = [] if self.is_begun else [Synced(self.epoch, self.name)]
            return [*(Send(self.leader, message) for message in [*synced, *acks]), *self._offer()]
        if self.phase == SYNCING:
            return self._serve_joins()
        effects: Effects = []
        for version in range(self.version + 1, self.contributed + 1):
            if version in self.prepared and self.prepared[version][0].epoch != self.epoch:
                effects += self._to_others(Propose(self.epoch, version, self.prepared[version][0].crc))
            else:
                effects += self._to_others(Cut(self.epoch, version))
        return effects
