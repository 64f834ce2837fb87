"""Messages between the broker and the peers of a group, and the effects that their state machines return.

Every message names the epoch of its sender, so that a receiver can ignore messages of earlier views.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

BROKER = "broker"  # the address of the broker in `Send.to`


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; a message is a small immutable header, and large data travels beside it."""

    epoch: int  # the sender's


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a reduction counted: the result for update `version` of the sum over all members."""

    version: int
    epoch: int  # epoch in which the result was reduced; a re-proposed result keeps it
    crc: int  # checksum of the result's bytes
    gradients: int  # number of contributions
    skipped: int  # number of members that contributed nothing
    samples: int
    counted: tuple[tuple[str, int], ...]  # (peer, sequence number of its newest contribution in the result)


# --- between a peer and the broker --------------------------------------------------------------------------------


class Beat(Message, frozen=True):
    """A peer is alive: sent to the broker every `Timing.beat` seconds."""

    peer: str
    lineage: int
    version: int  # updates that the peer knows to be committed
    prepared: int  # results after `version` that the peer holds and that are not committed yet
    order: int = 0  # members are sorted by this number, then by the time of their first beat
    is_synced: bool = False  # whether the peer holds the leader's state of this epoch
    is_stuck: bool = False  # whether a reduction has exceeded its time limit, so that a new view is needed


class View(Message, frozen=True):
    """The broker announces the members of an epoch, in the order in which contributions are added."""

    lineage: int
    members: tuple[str, ...]
    leader: str


class Synced(Message, frozen=True):
    """A member holds the leader's state of this epoch. Sent to the leader and to the broker."""

    peer: str


# --- between the leader and the other members ---------------------------------------------------------------------


class Join(Message, frozen=True):
    """A member asks the leader of a new view for its state, and says which version it has itself."""

    peer: str
    lineage: int
    version: int


class Sync(Message, frozen=True):
    """The leader's state: its version and prepared results. If the member is behind, the state travels beside it."""

    lineage: int
    version: int
    prepared: tuple[Header, ...]
    counted: tuple[tuple[str, int], ...]


class Offer(Message, frozen=True):
    """A member tells the leader how many samples its gradient covers that is not contributed yet."""

    peer: str
    after: int  # newest version to which the member has contributed in this epoch, or at which the epoch began
    sequence: int  # number of the member's newest contribution
    samples: int


class Seen(Message, frozen=True):
    """The leader has received the offer with this sequence number."""

    sequence: int


class Cut(Message, frozen=True):
    """The leader asks all members to contribute what they hold to update `version`."""

    version: int


class Propose(Message, frozen=True):
    """The leader of a new view asks its members to acknowledge a result that an earlier epoch prepared."""

    version: int
    crc: int


class Ack(Message, frozen=True):
    """A member holds the result for update `version`, with this checksum."""

    peer: str
    version: int
    crc: int


class Commit(Message, frozen=True):
    """All members hold the results up to update `version`: apply them in order."""

    version: int
    crc: int


# --- effects ------------------------------------------------------------------------------------------------------


class Effect(msgspec.Struct, frozen=True):
    """Base of what a state machine asks its driver to do."""


class Send(Effect, frozen=True):
    """Send a message to a peer, or to BROKER; `payload` is large data that travels beside it."""

    to: str
    message: Message
    payload: object = None


class Store(Effect, frozen=True):
    """Write the broker's state to its file, and flush it, before any message of the same call is sent."""


class Contribute(Effect, frozen=True):
    """Contribute `held` (None for nothing) to the reduction of update `version` in `epoch`."""

    epoch: int
    version: int
    held: object


class Abandon(Effect, frozen=True):
    """Stop all reductions of epochs before `epoch`; their results are not wanted any more."""

    epoch: int


class TakeState(Effect, frozen=True):
    """Take the state between two updates, at exactly this version, and pass it to `Accumulator.on_state`."""

    version: int


class Install(Effect, frozen=True):
    """Replace the state by this one before anything else is applied."""

    lineage: int
    version: int
    state: object


class Note(Effect, frozen=True):
    """Write a line to the log."""

    text: str


Effects: TypeAlias = list[Effect]
