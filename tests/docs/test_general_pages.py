"""The blocks of README.md and of the pages directly below docs/ run; tests/documentation.py says how."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation import RECORDED, Block, Command, Page, all_pages, blocks_of, firsts

NOT_RUN = 6  # commands that are marked no-run; a seventh needs a reason as good as theirs


@pytest.mark.parametrize("name", [name for name in all_pages() if name.count("/") < 2 and name != RECORDED])
def test_every_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Page(name).run(tmp_path, monkeypatch)


def test_few_commands_are_not_run() -> None:
    marked = [(name, command.text) for name in all_pages() for command in Page(name).commands if command.no_run]
    assert len(marked) == NOT_RUN, marked


def test_most_commands_are_trained_and_not_only_settled() -> None:
    """What is settled alone costs seconds or is a seed of a recorded run."""
    commands = [(name, command) for name in all_pages() if name != RECORDED for command in Page(name).commands]
    training = {(name, command.text) for name, command in commands if command.is_training and not command.no_run}
    assert len(training & set(firsts().values())) > 0.6 * len(training)


def test_blocks_and_commands_are_found() -> None:
    text = "a\n```\nremuda envs \\\n  Pong    # all\n# no-run: slow\n```\n"
    text += "```python\n# mine.py\nx = 1\n```\n```\na = b\n```\n"
    shell, python, formula = blocks_of(text)
    assert (shell.line, python.line, python.file, formula.commands) == (2, 7, "mine.py", [])
    assert [command.words for command in shell.commands] == [["remuda", "envs", "Pong"]]
    assert [command.no_run for command in shell.commands] == ["slow"]
    assert Command("make bench  # hours; no-run: takes hours").no_run == "takes hours"
    with pytest.raises(AssertionError, match="what are"):
        _ = Block("", 1, "remuda envs\nrm -r /\n").commands


def test_a_block_that_fails_is_named_by_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page("README.md")
    page.blocks = blocks_of("\n\n```\nremuda train ppo --env NoSuchEnv-v0\n```\n")
    with pytest.raises(AssertionError, match=r"README\.md:3: `remuda train ppo --env NoSuchEnv-v0` ended with .* 2"):
        page.run(tmp_path, monkeypatch)
