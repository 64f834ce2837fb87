"""Save and restore the state of ale-py's emulator, so that a restored game continues exactly as the original.

    state = get_console(ale, sticky=0.25, recent=[last_action, ...])
    set_console(another, state, sticky=0.25)

With sticky actions, the emulated console may ignore a requested action and repeat the action that it executed last.
ale-py neither saves nor exposes the action executed last, which may differ from the action requested last.
`get_console` therefore finds the executed action by experiment. It first records how the console continues from the
saved state. Then it makes the console execute one possible action after another, each time restores the saved state,
and stops when the console continues exactly as recorded.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

ERROR_PROBABILITY = 1e-12  # with sticky actions, the accepted probability of saving a wrong last action


def get_console(ale: Any, sticky: float, recent: Sequence[Any]) -> dict[str, Any]:
    """Return the state of the console, and leave the console in that state.

    `sticky` is the probability, in every frame, that the console repeats its last action. `recent` contains at least
    one action; the search for the last action starts with the actions in `recent`.
    """
    system = ale.cloneSystemState()
    if not sticky:
        return {"system": system.serialize(), "action": 0}
    frames = _num_frames(sticky)
    wanted = _continuation(ale, system, frames, recent[0])
    legal = [action for action in ale.getLegalActionSet() if action not in recent]
    for action in [*recent, *legal]:
        _press(ale, action, frames)
        if _continuation(ale, system, frames, recent[0]) == wanted:
            break
    _press(ale, action, frames)
    ale.restoreSystemState(system)
    return {"system": system.serialize(), "action": action.value}


def set_console(ale: Any, state: Mapping[str, Any], sticky: float) -> None:
    """Put the console into a state that `get_console` returned."""
    library = importlib.import_module("ale_py")
    _press(ale, library.Action(state["action"]), _num_frames(sticky) if sticky else 1)
    ale.restoreSystemState(library.ALEState(state["system"]))


def _num_frames(sticky: float) -> int:
    """Return the number of frames after which a requested action was almost surely executed at least once."""
    return math.ceil(math.log(ERROR_PROBABILITY) / math.log(min(sticky, 0.99)))


def _press(ale: Any, action: Any, frames: int) -> None:
    """Request `action` for `frames` frames, so that `action` is the last action that the console executed.

    Start a new game first, because the console executes no actions after the end of a game.
    """
    ale.reset_game()
    for _ in range(frames):
        ale.act(action)


def _continuation(ale: Any, system: Any, frames: int, action: Any) -> bytes:
    """Return a hash of the states that follow `system` when `action` is requested for `frames` frames.

    Calling this function changes the action that the console executed last.
    """
    ale.restoreSystemState(system)
    hashed = hashlib.sha256()  # covers all frames, because different actions may lead to the same last frame
    for _ in range(frames):
        ale.act(action)
        hashed.update(ale.cloneSystemState().serialize())
    return hashed.digest()
