"""Tests that the documentation of algorithms names existing tests and files and correct defaults."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from remuda.registry import algorithm_names, find_algorithm

ROOT = Path(__file__).parents[2]
PAGES = algorithm_names()


def tables(algo: str) -> list[list[str]]:
    text = (ROOT / "docs" / "algorithms" / f"{algo}.md").read_text()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]


@pytest.mark.parametrize("algo", PAGES)
def test_named_tests_and_files_exist(algo: str) -> None:
    known = set(re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in ROOT.glob("tests/**/*.py")), re.M))
    details = [row for row in tables(algo) if "`test_" in row[-1]]
    assert len(details) > (10 if algo in ("ppo", "a2c", "dqn") else 3)
    for _, where, tests in details:
        assert set(re.findall(r"`(test_\w+)`", tests)) <= known
        for name in re.findall(r"`([\w/]+\.py)`", where):
            assert (ROOT / "src" / "remuda" / name).is_file(), name


def as_written(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return "1e-5" if value == 1e-5 else str(value)


@pytest.mark.parametrize("algo", PAGES)
def test_every_option_is_listed_with_its_default(algo: str) -> None:
    listed = {row[0].strip("`"): row[1].strip("`") for row in tables(algo) if re.fullmatch(r"`[a-z_]+`", row[0])}
    assert listed == {item.name: as_written(item.default) for item in fields(find_algorithm(algo).options)}
