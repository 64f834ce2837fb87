"""Exceptions inside a user's env: where they were raised, and how many of them a run survives.

except FAILURES as error:
    text = raised(error)                                  # "ValueError: no such card (cards.py:41, in step)"
    reason = count.add(in_a_row, restarts, finished)      # None if the env may be rebuilt
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from dataclasses import dataclass

import gymnasium

import remuda
from remuda.envs.import_paths import sentence
from remuda.processes.notices import Notice

FAILURES = (Exception, SystemExit)  # SystemExit, because an env that calls sys.exit() has failed, too
RESTARTS_IN_A_ROW = 20  # an env that fails more often than this without a completed step in between is given up
FAILURES_WITHOUT_EPISODE = 20  # an env that fails this often while no env finishes an episode is given up
LONGEST_TRACEBACK = 1 << 16  # in characters; limited because an exception may contain the text of a whole file


@dataclass
class FailureCount:
    """Counts the failures of one env and decides when the run gives up on that env.

    A run survives up to `max_restarts` random failures of an env, as long as any env of the same LocalEnvs or pool
    finishes episodes between the failures.
    """

    max_restarts: int
    without_episode: int = 0  # failures of this env since any env last finished an episode
    finished: int = 0  # how many episodes all envs together had finished at this env's last failure

    def add(self, in_a_row: int, restarts: int, finished: int) -> str | None:
        """Count one failure; return why the env is given up, or None if it may be rebuilt.

        The reason continues the message about the failure, such as ", 21 times in a row without completing a step".
        It is "" if `max_restarts` is 0.

        `in_a_row` is the number of failures without a completed step between them, including this one. `restarts` is
        how often the env has been rebuilt, including the rebuild for this failure. `finished` is how many episodes
        all envs of the LocalEnvs or pool together have finished.
        """
        self.without_episode = self.without_episode + 1 if finished == self.finished else 1
        self.finished = finished
        if in_a_row > RESTARTS_IN_A_ROW:
            return f", {in_a_row} times in a row without completing a step"
        # This limit is for failures with completed steps between them; the limit above is for failures in a row.
        if self.without_episode >= FAILURES_WITHOUT_EPISODE and self.without_episode > in_a_row:
            return f", {self.without_episode} times while no env finished an episode"
        if restarts > self.max_restarts:
            return f", more than envs.max_restarts={self.max_restarts} times" if self.max_restarts > 0 else ""
        return None


def raised(error: BaseException) -> str:
    """Return the exception as one line, with the file, line and function of the user's code that raised it.

    >>> raised(ValueError("no such card"))
    'ValueError: no such card'
    """
    place = find_place(error)
    return sentence(error) if place is None else f"{sentence(error)} ({place[0]}, in {place[1]})"


def find_place(error: BaseException) -> tuple[str, str] | None:
    """Return (file:line, function) of the innermost frame in the user's own code.

    If all frames belong to installed libraries, return the innermost frame outside of Remuda and Gymnasium, or else
    the innermost frame of all. Return None if the exception was never raised, or only in code without a file.
    """
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    for folders in (_LIBRARIES, _FRAMEWORKS, ()):
        for code, line in reversed(frames):
            if not code.co_filename.startswith(("<", *folders)):
                return f"{code.co_filename}:{line}", code.co_name
    return None


def notice_of(error: BaseException, text: str, known: set[str]) -> Notice:
    """Return a `Notice` with this text.

    The notice includes the traceback only if the place in the code that raised the error is not in `known` yet; the
    place is then added.
    """
    place = (find_place(error) or ("unknown",))[0]
    if place in known:
        return Notice(text)
    known.add(place)
    whole = "".join(traceback.format_exception(error)).rstrip()
    return Notice(text, whole[-LONGEST_TRACEBACK:], place)


def _folders(*paths: str) -> tuple[str, ...]:
    """Return these folders with and without symbolic links resolved, because a stack frame may name either path."""
    return tuple({os.path.join(path, "") for each in paths for path in (each, os.path.realpath(each))})


_FRAMEWORKS = _folders(*(os.path.dirname(str(module.__file__)) for module in (remuda, gymnasium)))
_LIBRARIES = (*_FRAMEWORKS, *_folders(*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))))
