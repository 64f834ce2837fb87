"""The all-reduce of a group: every member gives a vector, and every member gets their sum.

    forest = Forest(members=("A", "B", "C"), trees=3, arity=2)
    reduction = Reduction(forest, "A", key=(epoch, version), parts=np.array_split(vector, 12), add=np.add)
    effects = reduction.start() + reduction.on_message(message, payload) + reduction.on_tick(now)
    reduction.result                                  # the parts of the sum, or None until it is complete

The vector is cut into parts. Each part travels up one of several trees and is added on the way; the sum travels down
the same tree. In every tree, another member is the root, so that all members send and receive about as much. One
algorithm has the known ones as cases, for P members: `Forest(members, 1, P - 1)` is a star, (1, 2) a binary tree,
(P, 2) the forest of moolib, and (P, P - 1) the direct exchange, in which every member adds one slice of all vectors.

A node adds its own part and those of its children in the order of the members, whatever the order in which they
arrive. The bits of the sum therefore depend on the view alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from remuda.rpc.core.messages import Effects, Message, Send


class Up(Message, frozen=True):
    """The sum of one part over a subtree travels to the parent of its root."""

    version: int
    peer: str
    part: int


class Down(Message, frozen=True):
    """The sum of one part over all members travels to the children."""

    version: int
    part: int


class Ask(Message, frozen=True):
    """A member asks a child for the sum of its subtree, or its parent for the sum over all members, once more."""

    version: int
    peer: str
    part: int
    is_up: bool


class Forest:
    """The trees of a view; the same on every member."""

    def __init__(self, members: Sequence[str], trees: int, arity: int) -> None:
        self.members, self.arity = tuple(members), max(arity, 1)
        self.trees = max(1, min(trees, len(self.members)))
        self._index = {name: index for index, name in enumerate(self.members)}

    def root(self, part: int) -> int:
        """Return the index of the member that is the root for a part; roots are spread evenly over the members."""
        return (part % self.trees) * len(self.members) // self.trees

    def parent(self, part: int, name: str) -> str | None:
        """Return the member to which `name` sends its subtree's sum of a part; None for the root."""
        place = self._place(part, name)
        return None if place == 0 else self._at(part, (place - 1) // self.arity)

    def children(self, part: int, name: str) -> list[str]:
        """Return the members from which `name` receives sums of a part, in the order of the view."""
        first = self._place(part, name) * self.arity + 1
        places = range(first, min(first + self.arity, len(self.members)))
        return sorted((self._at(part, place) for place in places), key=self._index.__getitem__)

    def depth(self) -> int:
        """Return the number of levels below the root."""
        depth, reached, level = 0, 1, 1
        while reached < len(self.members):
            level *= self.arity
            reached += level
            depth += 1
        return depth

    def _place(self, part: int, name: str) -> int:
        """Return the place of a member in a tree; the places are numbered level by level, from 0 for the root."""
        return (self._index[name] - self.root(part)) % len(self.members)

    def _at(self, part: int, place: int) -> str:
        return self.members[(place + self.root(part)) % len(self.members)]


class Reduction:
    """One member's part in one all-reduce."""

    def __init__(
        self,
        forest: Forest,
        name: str,
        key: tuple[int, int],
        parts: Sequence[Any],
        add: Callable[[Any, Any], Any],
        resend: float = 0.1,
    ) -> None:
        """Prepare the reduction with the key (epoch, version).

        `parts` are this member's parts, which all members cut in the same way. `add` returns the sum of two parts,
        and must not change either of them.
        """
        self.forest, self.name, self.resend = forest, name, resend
        self.epoch, self.version = key
        self.parts, self._add = list(parts), add
        self._received: list[dict[str, Any]] = [{} for _ in parts]  # sums of the children's subtrees
        self._sums: list[Any] = [None] * len(parts)  # sums of this member's subtree, once they are complete
        self._totals: list[Any] = [None] * len(parts)
        self._open = len(parts)  # number of parts without a total
        self._moved_at: float | None = None

    @property
    def result(self) -> list[Any] | None:
        return None if self._open else self._totals

    def start(self) -> Effects:
        return [effect for part in range(len(self.parts)) for effect in self._go_up(part)]

    def on_message(self, message: Message, payload: Any = None) -> Effects:
        """Process a message of this reduction; messages of others and repeated ones have no effect."""
        if not isinstance(message, Up | Down | Ask) or (message.epoch, message.version) != (self.epoch, self.version):
            return []
        part = message.part
        if not 0 <= part < len(self.parts):
            return []
        if isinstance(message, Up):
            if message.peer not in self.forest.children(part, self.name) or message.peer in self._received[part]:
                return []
            self._moved_at = None
            self._received[part][message.peer] = payload
            return self._go_up(part)
        if isinstance(message, Down):
            return self._go_down(part, payload) if self._totals[part] is None else []
        return self._answer(message)

    def on_tick(self, now: float) -> Effects:
        """Ask for what is missing if nothing has arrived for `resend` seconds; messages may have been lost."""
        if not self._open:
            return []
        if self._moved_at is None:
            self._moved_at = now
        if now - self._moved_at < self.resend:
            return []
        self._moved_at = now
        effects: Effects = []
        for part, total in enumerate(self._totals):
            if total is not None:
                continue
            if self._sums[part] is None:
                for child in self.forest.children(part, self.name):
                    if child not in self._received[part]:
                        effects.append(Send(child, Ask(self.epoch, self.version, self.name, part, True)))
            else:
                parent = self.forest.parent(part, self.name)
                assert parent is not None, "the root has a total as soon as it has a sum"
                effects.append(Send(parent, Ask(self.epoch, self.version, self.name, part, False)))
        return effects

    def _go_up(self, part: int) -> Effects:
        """Send the sum of a part over this member's subtree to the parent, if it is complete and was not sent yet."""
        children = self.forest.children(part, self.name)
        received = self._received[part]
        if self._sums[part] is not None or len(received) < len(children):
            return []
        total = self.parts[part]
        for child in children:
            total = self._add(total, received[child])
        self._sums[part] = total
        received.clear()
        parent = self.forest.parent(part, self.name)
        if parent is None:
            return self._go_down(part, total)
        return [Send(parent, Up(self.epoch, self.version, self.name, part), total)]

    def _go_down(self, part: int, total: Any) -> Effects:
        self._totals[part] = total
        self._open -= 1
        self._moved_at = None
        message = Down(self.epoch, self.version, part)
        return [Send(child, message, total) for child in self.forest.children(part, self.name)]

    def _answer(self, ask: Ask) -> Effects:
        """Send again what another member asks for, if it is there."""
        found = self._sums[ask.part] if ask.is_up else self._totals[ask.part]
        if found is None:
            return []
        up = Up(self.epoch, self.version, self.name, ask.part)
        return [Send(ask.peer, up if ask.is_up else Down(self.epoch, self.version, ask.part), found)]
