"""Test what bench/sample_prose.py and bench/code_facts.py find in a file with known content."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import code_facts
import sample_prose

BENCH = Path(sample_prose.__file__).parent
SOURCE = '''"""A module."""

from typing import Any

# First line of a comment,
# and its second line.
x = 1  # beside code
y = 2  # noqa: E501


class Thing:
    """A class; Any in a docstring does not count."""

    def method(self, value: Any) -> Any:
        """Do something."""
        return getattr(value, "extra", None) or getattr(value, "__doc__", None) or getattr(value, "must")
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "thing.py").write_text(SOURCE)
    return tmp_path


def test_docstrings_and_comments_are_found_with_their_lines(package: Path) -> None:
    found = [(each.line, each.kind, each.about, each.text) for each in sample_prose.passages(package)]
    assert found == [
        (1, "docstring", "module", "A module."),
        (5, "comment", "x = 1  # beside code", "First line of a comment,\nand its second line."),
        (7, "comment", "x = 1", "beside code"),
        (12, "docstring", "Thing", "A class; Any in a docstring does not count."),
        (15, "docstring", "Thing.method", "Do something."),
    ]


def test_the_same_seed_draws_the_same_passages(package: Path) -> None:
    def draw(seed: int) -> str:
        words = [sys.executable, str(BENCH / "sample_prose.py"), "--seed", str(seed), "--count", "3"]
        return subprocess.run([*words, "--root", str(package)], check=True, capture_output=True, text=True).stdout

    first = draw(1)
    assert draw(1) == first
    assert len({draw(seed) for seed in range(6)}) > 1
    assert first.endswith("3 of 5 passages, seed 1\n")


def test_names_are_counted_only_in_code(package: Path) -> None:
    found = code_facts.facts(package)
    assert {name: len(places) for name, places in found.items()} == {
        "modules": 1,
        "long modules": 0,
        "Any": 2,
        "getattr": 2,
        "optional members": 1,
    }
    assert found["optional members"] == ["thing.py:16: getattr(value, 'extra', None)"]


def test_the_package_uses_any_rarely() -> None:
    found = code_facts.facts(code_facts.ROOT / "src" / "remuda")["Any"]
    assert len(found) < 400, "types that tell the truth are preferred: see bench/code_facts.py --list Any"
