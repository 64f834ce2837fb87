"""Run the blocks of README.md and of the pages directly below docs/ (tests/documentation.py describes how)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documentation import RECORDED, ROOT, Block, Command, Page, all_pages, blocks_of, firsts

NOT_RUN = 9  # the number of commands that are marked no-run; another one needs a good reason


@pytest.mark.parametrize("name", [name for name in all_pages() if name.count("/") < 2 and name != RECORDED])
def test_every_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Page(name).run(tmp_path, monkeypatch)


def test_the_number_of_commands_that_are_not_run_is_known() -> None:
    marked = [(name, command.text) for name in all_pages() for command in Page(name).commands if command.no_run]
    assert len(marked) == NOT_RUN, marked


def test_most_commands_are_trained_and_not_only_built() -> None:
    """Only expensive commands, and further seeds of recorded runs, are built without training."""
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
    (hidden,) = blocks_of("<!-- no-run: installs packages -->\n```\nmake demo\n```\n")
    assert (hidden.line, [command.no_run for command in hidden.commands]) == (2, ["installs packages"])
    with pytest.raises(AssertionError, match="are no commands"):
        _ = Block("", 1, "remuda envs\nrm -r /\n").commands


def test_a_block_that_fails_is_named_by_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page("README.md")
    page.blocks = blocks_of("\n\n```\nremuda train ppo --env NoSuchEnv-v0\n```\n")
    with pytest.raises(AssertionError, match=r"README\.md:3: `remuda train ppo --env NoSuchEnv-v0` ended with .* 2"):
        page.run(tmp_path, monkeypatch)


README = (ROOT / "README.md").read_text(encoding="utf-8")
HERE = re.findall(r"\| `(remuda[ .]train\W.+)` \|$", README.split("## Coming from another library")[1], re.MULTILINE)


def test_commands_for_users_of_other_libraries_are_found() -> None:
    assert len([text for text in HERE if text.startswith("remuda train")]) == 7
    assert len([text for text in HERE if text.startswith("remuda.train")]) == 6


@pytest.mark.parametrize("text", HERE)
def test_commands_for_users_of_other_libraries_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page("README.md")
    page.blocks = (
        [Block("", 1, f"{text}\n")]
        if text.startswith("remuda train")
        else [Block("python", 1, f"import remuda\n{text}\n")]
    )
    page.run(tmp_path, monkeypatch)


def test_the_readme_has_a_row_for_every_algorithm() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\(docs/algorithms/(\w+)\.md\)", README, re.MULTILINE)
    assert all(name == page for name, page in rows)
    assert sorted(name for name, _ in rows) == sorted(
        path.stem for path in (ROOT / "docs" / "algorithms").glob("*.md")
    )


def test_the_picture_is_small() -> None:
    (picture,) = re.findall(r"\]\((docs/images/[\w.]+)\)", README)
    assert (ROOT / picture).stat().st_size < 300_000
