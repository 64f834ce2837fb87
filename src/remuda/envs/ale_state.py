"""The state of ale-py's console: taken and put back so that the game goes on exactly as it would have.

    state = get_console(ale, sticky=0.25, recent=[last_action, ...])
    set_console(another, state, sticky=0.25)

A console's own state lacks one thing: the action that it took last, which a sticky one repeats. Nobody can read it,
and it need not be the last one that was asked for, as that may have been replaced by the one before. So it is found
out: the one with which a console goes on from this state as this one does by itself.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Sequence
from typing import Any

SURE = 1e-12  # chance of being wrong about what a sticky console has taken


def get_console(ale: Any, sticky: float, recent: Sequence[Any]) -> dict[str, Any]:
    """Leaves the console as it was. `recent` actions are tried first."""
    system = ale.cloneSystemState()
    if not sticky:
        return {"system": system.serialize(), "action": 0}
    frames = _frames(sticky)
    wanted = _go_on(ale, system, frames, recent[0])
    legal = [action for action in ale.getLegalActionSet() if action not in recent]
    for action in [*recent, *legal]:
        _press(ale, action, frames)
        if _go_on(ale, system, frames, recent[0]) == wanted:
            break
    _press(ale, action, frames)
    ale.restoreSystemState(system)
    return {"system": system.serialize(), "action": action.value}


def set_console(ale: Any, state: dict[str, Any], sticky: float) -> None:
    library = importlib.import_module("ale_py")
    _press(ale, library.Action(state["action"]), _frames(sticky) if sticky else 1)
    ale.restoreSystemState(library.ALEState(state["system"]))


def _frames(sticky: float) -> int:
    """After so many frames with one action it has been taken at least once."""
    return math.ceil(math.log(SURE) / math.log(min(sticky, 0.99)))


def _press(ale: Any, action: Any, frames: int) -> None:
    """Make this the action that was taken last; at the beginning of a game, as one that is over takes none."""
    ale.reset_game()
    for _ in range(frames):
        ale.act(action)


def _go_on(ale: Any, system: Any, frames: int, action: Any) -> bytes:
    """What becomes of a state, frame by frame; the action that was taken last is another one afterwards."""
    ale.restoreSystemState(system)
    seen = hashlib.sha256()  # of each frame: a paddle that meets the wall would hide how it got there
    for _ in range(frames):
        ale.act(action)
        seen.update(ale.cloneSystemState().serialize())
    return seen.digest()
