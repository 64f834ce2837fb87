"""Measure how much code runs between the command and the parameter update, by tracing real runs.

Two lists are measured for PPO on CartPole and for SAC under `async`, both with the default options:

- *update*: the modules on the call stack of `Learner.gradients`, from the command down, and all modules with a
  function that runs from there to the end of an ordinary update. Updates that compare the fast path with autograd
  are rare (the first one, and then each time the number of updates has doubled) and are not measured; they would add
  the modules of the algorithm's own loss.
- *round*: the same modules, and all modules with a function that runs in the learner's thread from one round's
  updates to the next: sampling or waiting for samplers, preparing, drawing batches, publishing weights.

The measurement excludes some packages and everything that they call: the environments (envs/), terminal, metrics and
checkpoints (logs/, and runs/ except for what is on the call stack) and the parsing of options (config/). Worker
processes are not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import remuda
from remuda.algorithms.ppo import PPO
from remuda.cli import main
from remuda.learning.learner import Learner
from remuda.schemes.learning_round import LocalUpdates

SOURCE = Path(remuda.__file__).parent
LEFT_OUT = ("envs/", "logs/", "runs/", "config/")
FIRST, LAST = 40, 61  # updates that are not compared with autograd, over more than one round of PPO (20 updates)

TRAIN_PPO = ["train", "ppo", "--env", "CartPole-v1", "--steps", "1500"]
TRAIN_SAC = ["train", "sac", "--env", "Pendulum-v1", "--scheme", "async", "--steps", "200"]
TRAIN_SAC += ["--algo.learning_starts", "100"]
COMMON = ["--quiet", "--eval.episodes", "0"]

# The maximum numbers of files and lines. The limits of an update are goals: 10 files and 1,500 lines for PPO, 22 and
# 4,000 for SAC under `async`. The limits of a round are what has been reached so far.
LIMITS = {
    "ppo": {"update": (10, 1500), "round": (26, 3500)},
    "sac": {"update": (22, 4000), "round": (28, 4850)},
}
MAX_LINES_OF_A_FILE, MAX_LINES_OF_PPO = 400, 80

# The modules from the command to the definition of the loss, in call order. docs/architecture.md has the same list.
PATH_TO_LOSS = [
    "cli/__init__.py",
    "cli/train.py",
    "runs/train.py",
    "schemes/synchronous.py",
    "schemes/learning_round.py",
    "learning/learner.py",
    "algorithms/ppo.py",
]


def module_of(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(SOURCE)) if path.is_relative_to(SOURCE) else None


def modules_on_stack(frame: FrameType | None) -> list[str]:
    """Return the package's modules on the call stack without duplicates, innermost first."""
    found: list[str] = []
    while frame is not None:
        name = module_of(frame)
        if name is not None and name not in found:
            found.append(name)
        frame = frame.f_back
    return found


class Recorder:
    """A profile function that records the called modules, except those of LEFT_OUT and what they call."""

    def __init__(self, stack: set[str]) -> None:
        """`stack` has the modules on the call stack of an update, which are never left out."""
        self.found: set[str] = set()
        self._stack = stack
        self._left_out: FrameType | None = None  # the call whose own calls are ignored

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._left_out is not None:
            if event == "return" and frame is self._left_out:
                self._left_out = None
        elif event == "call" and (name := module_of(frame)) is not None:
            if name.startswith(LEFT_OUT) and name not in self._stack:
                self._left_out = frame
            else:
                self.found.add(name)


def measure(arguments: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Run a command and return the modules of both lists."""
    stack: set[str] = set()
    in_update, in_round = Recorder(stack), Recorder(stack)
    gradients: Callable[..., Any] = Learner.gradients
    exchange: Callable[..., Any] = LocalUpdates.exchange
    updates = 0

    def begin(self: Learner, batch: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates == FIRST:
            stack.update(modules_on_stack(sys._getframe(1)))
            sys.setprofile(in_update)
        return gradients(self, batch)

    def end(self: LocalUpdates, learner: Learner, found: Any) -> Any:
        result = exchange(self, learner, found)
        if updates in (FIRST, LAST):
            sys.setprofile(in_round if updates == FIRST else None)
        return result

    monkeypatch.setattr(Learner, "gradients", begin)
    monkeypatch.setattr(LocalUpdates, "exchange", end)
    try:
        assert main([*arguments, "--out", str(out), *COMMON]) == 0
    finally:
        sys.setprofile(None)
    assert updates >= LAST
    return {"update": stack | in_update.found, "round": stack | in_update.found | in_round.found}


def lines_of(name: str) -> int:
    return len((SOURCE / name).read_text().splitlines())


@pytest.mark.parametrize(("algo", "arguments"), [("ppo", TRAIN_PPO), ("sac", TRAIN_SAC)])
def test_files_and_lines_between_command_and_update_stay_within_limits(
    algo: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    found = measure(arguments, tmp_path / "run", monkeypatch)
    with capsys.disabled():
        for kind, names in found.items():
            print(f"\n{algo}, {kind}: {len(names)} files, {sum(map(lines_of, names))} lines")
            print("".join(f"    {name} {lines_of(name)}\n" for name in sorted(names)), end="")
    for kind, (max_files, max_lines) in LIMITS[algo].items():
        assert len(found[kind]) <= max_files
        assert sum(map(lines_of, found[kind])) <= max_lines
        assert max(map(lines_of, found[kind])) <= MAX_LINES_OF_A_FILE
    assert "cli/train.py" in found["update"]
    assert "learning/optimizers.py" in found["update"]
    assert any(name.startswith("fast/") for name in found["update"]), "the default path was not measured"


def test_ppo_fits_on_one_page_and_has_one_loss() -> None:
    text = (SOURCE / "algorithms" / "ppo.py").read_text()
    assert len(text.splitlines()) <= MAX_LINES_OF_PPO
    assert text.count("Losses(") == 1


def test_files_from_the_command_to_the_definition_of_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[list[str]] = []
    losses: Callable[..., Any] = PPO.losses

    def spy(self: PPO, batch: Any, clock: Any) -> Any:
        stacks.append(["algorithms/ppo.py", *modules_on_stack(sys._getframe(1))])
        return losses(self, batch, clock)

    monkeypatch.setattr(PPO, "losses", spy)
    arguments = [*TRAIN_PPO, "--agent.fast_path", "false", "--out", str(tmp_path / "run"), *COMMON]
    assert main(arguments) == 0
    assert stacks[0][::-1] == PATH_TO_LOSS
    assert sum(map(lines_of, PATH_TO_LOSS)) <= 1000


def test_the_architecture_page_lists_the_same_files() -> None:
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text()
    section = page.split("## From the command to the loss")[1].split("## ")[0]
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert rows == PATH_TO_LOSS
