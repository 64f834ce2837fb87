"""From `remuda train ppo` to the loss: read off a real call stack, then counted."""

import sys
from pathlib import Path

import remuda
from remuda.algorithms.ppo import PPO
from remuda.cli import main

SOURCE = Path(remuda.__file__).parent
PATH = [
    "cli/__init__.py",
    "cli/train.py",
    "runs/train.py",
    "schemes/synchronous.py",
    "schemes/learning_round.py",
    "learning/learner.py",
    "algorithms/ppo.py",
]
MAX_FILES, MAX_LINES, MAX_PPO = 7, 1000, 150


def test_seven_files_and_a_thousand_lines_from_the_command_to_the_loss(tmp_path, monkeypatch, capsys):
    stacks = []
    losses = PPO.losses

    def spy(self, batch, clock):
        frame, files = sys._getframe(1), []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(SOURCE) and path not in files:
                files.append(path)
            frame = frame.f_back
        stacks.append([Path(sys.modules[type(self).__module__].__file__), *files])
        return losses(self, batch, clock)

    monkeypatch.setattr(PPO, "losses", spy)
    assert (
        main(["train", "ppo", "--env", "CartPole-v1", "--steps", "300", "--out", str(tmp_path / "run"), "--quiet"])
        == 0
    )
    path = stacks[0]
    names = [str(file.relative_to(SOURCE)) for file in reversed(path)]
    assert names == PATH
    assert len(path) <= MAX_FILES
    assert sum(len(file.read_text().splitlines()) for file in path) <= MAX_LINES
    assert len(path[0].read_text().splitlines()) <= MAX_PPO


def test_the_architecture_page_names_the_same_files():
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text()
    section = page.split("## From the command to the loss")[1].split("## ")[0]
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert rows == PATH
