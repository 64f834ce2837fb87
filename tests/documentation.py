"""Run the blocks of README.md and docs/**/*.md: every command and every Python block.

    page = Page("docs/agents.md")
    page.run(tmp_path, monkeypatch)

The blocks of a page run from top to bottom in one directory, as if a reader typed what the page shows:

- A command is a line of a block without a language that begins with one of `PROGRAMS`. `remuda ...` runs in this
  process, with REMUDA_MAX_STEPS and with short evaluations (`SHORT`). Other programs must be marked as not run.
- A Python block is executed in a namespace that the blocks of a page share. A block whose first line is a comment
  with a file name, such as `# mine.py`, is written to that file instead, before anything runs.
- For pages that show the inside of a training loop, the namespace contains the objects of such a loop (`PARTS`).
- `# no-run: reason` at the end of a command, or on a line of its own for the whole block, keeps commands from being
  run. So does `<!-- no-run: reason -->` on the line before a block, which is not visible in the rendered page.
  `tests/docs/test_general_pages.py` counts the commands that are not run.

These tests run on two cores, so an expensive command runs once. If an earlier command of any page has the same
`cost_key`, the later one is only built: its options are parsed, its env is probed, the configuration is checked and
its nets and replay are made, but nothing is trained.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import re
import shlex
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from registering import forget_registered

ROOT = Path(__file__).parents[1]
MAX_STEPS = 128  # by then the first episodes of CartPole have ended
FEW_STEPS = 16  # for Atari, where a step takes about 100 times as long
SHORT = ["--eval.episodes", "1", "--eval.max_steps", "10"]
SMALL_PPO = {  # for Atari, too
    "--algo.n_steps": "8",
    "--algo.batch_size": "16",
    "--algo.n_epochs": "1",
    "--envs.screen_size": "42",
    "--sampler.envs": "2",
}
PROGRAMS = ("remuda", "make", "python", ".venv/bin/python", "pip", "torchrun", "mpirun", "kill", "git")
SHELL = ("", "sh", "bash", "console")
PARTS = {  # maps a page to the algorithm whose objects its loops use
    "docs/algorithms/ppo.md": "ppo",
    "docs/algorithms/dqn.md": "dqn",
    "docs/algorithms/impala.md": "impala",
    "docs/schemes/synchronous.md": "ppo",
}
SETTLED: set[str] = set()  # configurations, without their seed, that have already been built
RECORDED = "docs/results.md"  # bench/learning.py writes one command for each seed of each record into it


@dataclass(frozen=True)
class Block:
    """A fenced block and the number of its first line."""

    language: str
    line: int
    text: str
    no_run: str | None = None  # the reason in a comment before the block

    @property
    def file(self) -> str | None:
        """Return the name of the file that this block is a part of, or None."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found and self.language == "python" else None

    @property
    def commands(self) -> list[Command]:
        if self.language not in SHELL:
            return []
        lines = [line.removeprefix("$ ") for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]
        if not any(line.split()[0] in PROGRAMS for line in lines):
            return []  # a formula or a table
        marks = [mark[1] for line in lines if (mark := re.match(r"# no-run: (.+)", line))]
        marks += [self.no_run] if self.no_run else []
        commands = [line for line in lines if not line.startswith("#")]
        unknown = [line for line in commands if line.split()[0] not in PROGRAMS]
        assert not unknown, f"line {self.line}: {unknown} are no commands, but are in a block of commands"
        return [Command(line, marks[0] if marks else None) for line in commands]


@dataclass(frozen=True)
class Command:
    """One line of shell."""

    text: str
    block_mark: str | None = None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def no_run(self) -> str | None:
        """Return the reason why the command is not run here, or None if it is run."""
        found = re.search(r"# .*no-run: (.+)", self.text)
        return found[1] if found else self.block_mark

    @property
    def is_training(self) -> bool:
        return self.words[:2] == ["remuda", "train"] and "--resume" not in self.words

    def option(self, name: str, default: str = "") -> str:
        return self.words[self.words.index(name) + 1] if name in self.words else default

    def cost_key(self, page: str) -> tuple[str, ...]:
        """Return a key that is equal for commands of which only the first is run (see the top of this file)."""
        algo, scheme, env = self.words[2], self.option("--scheme", "serial"), self.option("--env")
        if env.startswith("ALE/"):
            return ("Atari",)  # the nets are large: seconds for each command, whatever the algorithm
        if scheme == "async" or self.option("--sampler.inference") == "workers":
            # Worker processes import torch, which takes seconds, so each arrangement of processes runs once.
            if self.option("--sampler.inference") == "central":
                return ("central",)
            source = "rollouts" if algo in ("ppo", "impala", "appo") else "replay"
            return (source, scheme)
        if page == RECORDED:
            return (algo, re.split(r"[/-]", env)[0], scheme)
        return (page, *self.words)


class Page:
    """A page of the documentation, by its path in the repository."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks = list(blocks_of((ROOT / name).read_text(encoding="utf-8")))

    @property
    def commands(self) -> list[Command]:
        return [command for block in self.blocks for command in block.commands]

    def run(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run every block in `directory`; a failure names the line of its block."""
        monkeypatch.chdir(directory)
        monkeypatch.setenv("REMUDA_MAX_STEPS", str(MAX_STEPS))
        monkeypatch.syspath_prepend(str(directory))
        forget_registered(monkeypatch)
        (directory / "examples").symlink_to(ROOT / "examples")
        files: dict[str, str] = {}
        for block in self.blocks:
            if block.file is not None:
                files[block.file] = files.get(block.file, "") + block.text
        for file, text in files.items():
            (directory / file).write_text(text)
            monkeypatch.delitem(sys.modules, Path(file).stem, raising=False)  # a file of this name from another page
            importlib.import_module(Path(file).stem)
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [sys.modules.pop(Path(file).stem) for file in files])
            names: dict[str, Any] = {"__name__": "__main__"}
            if self.name in PARTS:
                names |= stack.enter_context(parts(PARTS[self.name]))
            for block in self.blocks:
                self.run_block(block, names)

    def run_block(self, block: Block, names: dict[str, Any]) -> None:
        for command in block.commands:
            if command.no_run is None:
                code = self.run_command(command)
                assert code == 0, f"{self.name}:{block.line}: `{command.text}` ended with exit code {code}"
        if block.language == "python" and block.file is None:
            exec(compile(block.text, f"{self.name}:{block.line}", "exec"), names)

    def run_command(self, command: Command) -> int:
        from remuda.cli import main

        program, *words = command.words
        assert program == "remuda", f"`{command.text}` is not run here: mark it with `# no-run: reason`"
        words = [found for word in words for found in (sorted(glob.glob(word)) or [word])]
        if words[0] != "train":
            return main(words)
        with pytest.MonkeyPatch.context() as patch:
            if command.is_training and is_run_elsewhere(self.name, command):
                patch.setattr("remuda.runs.train.train", build_only)
            if command.option("--env").startswith("ALE/"):
                patch.setenv("REMUDA_MAX_STEPS", str(FEW_STEPS))
                if words[1] == "ppo":
                    words += [word for name in SMALL_PPO.keys() - set(words) for word in (name, SMALL_PPO[name])]
            return main([*words, *SHORT])


def blocks_of(text: str) -> list[Block]:
    found = []
    pattern = r"^(?:<!-- no-run: (?P<reason>.+) -->\n)?```(?P<language>.*)\n(?P<text>(?:.*\n)*?)```$"
    for match in re.finditer(pattern, text, re.MULTILINE):
        line = text[: match.start("language")].count("\n") + 1
        found.append(Block(match["language"].strip(), line, match["text"], match["reason"]))
    return found


def all_pages() -> list[str]:
    """Return every page, with the page of recorded results last."""
    names = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
    return [name for name in names if name != RECORDED] + [RECORDED]


def is_run_elsewhere(page: str, command: Command) -> bool:
    """Return whether a command with the same cost key runs instead of this one."""
    here = (page, command.text)
    return firsts().get(command.cost_key(page), here) != here


@functools.cache
def firsts() -> dict[tuple[str, ...], tuple[str, str]]:
    found: dict[tuple[str, ...], tuple[str, str]] = {}
    for name in all_pages():
        for command in Page(name).commands:
            if command.is_training and command.no_run is None:
                found.setdefault(command.cost_key(name), (name, command.text))
    return found


def build_only(config: Any, spec: Any, info: Any, **rest: Any) -> Generator[None, None, dict[str, Any]]:
    """Replace `train`: build what the configuration names without training it."""
    from remuda.build.recipe import make_recipe

    if (without_seed := repr(replace(config, seed=0))) not in SETTLED:
        SETTLED.add(without_seed)
        make_recipe(config, spec, info)
    yield
    return {"eval": None, "signal": None, "status": "built", "steps": 0, "updates": 0, "steps_per_second": 0.0,
            "path": "nowhere"}  # fmt: skip


@contextlib.contextmanager
def parts(algo: str) -> Iterator[dict[str, Any]]:
    """Make the objects that a training loop consists of, for a small CartPole run of this algorithm."""
    from remuda.build.recipe import make_recipe
    from remuda.config.resolve import resolve_config
    from remuda.schemes.learning_round import LocalUpdates

    setup = resolve_config({"algo": algo, "env": "CartPole-v1"}, {})
    recipe = make_recipe(*setup)
    learner = recipe.make_learner()
    agent = learner.algorithm.agent
    with (
        contextlib.closing(recipe.make_weights(agent, learner.version)) as weights,
        contextlib.closing(recipe.make_replay(agent, 0)) as replay,
        contextlib.closing(recipe.make_sampler(agent, weights, 0, 0, lambda: False)) as sampler,
    ):
        sampler.reset(recipe.seed)
        rollout = sampler.collect()
        made = {"learner": learner, "weights": weights, "sampler": sampler, "replay": replay, "rollout": rollout}
        yield {**made, "updates": LocalUpdates()}
