"""Test that docs/coverage.md has every row and that the modules and tests it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coverage.md").read_text()
COUNTS = {"TB": 31, "RL": 40, "MO": 17, "PR": 14, "SP": 8}


def rows() -> list[str]:
    """Return the ids of all rows, with ranges such as TB15–TB17 expanded."""
    found = []
    for line in PAGE.splitlines():
        match = re.match(r"\| ([A-Z]{2})(\d+)(?:–[A-Z]{2}(\d+))? ", line)
        if match:
            kind, first, last = match[1], int(match[2]), int(match[3] or match[2])
            found += [f"{kind}{number}" for number in range(first, last + 1)]
    return found


def test_every_row_occurs_once():
    expected = [f"{kind}{number}" for kind, count in COUNTS.items() for number in range(1, count + 1)]
    assert rows() == expected


PAGES = ("coverage.md", "envs.md", "agents.md", "samplers.md", "replay.md")


@pytest.mark.parametrize(
    "page", [*PAGES, "algorithms/ppo.md", "algorithms/a2c.md", "algorithms/dqn.md", "schemes/synchronous.md"]
)
def test_every_test_that_a_page_names_exists(page):
    text = (ROOT / "docs" / page).read_text()
    for path in set(re.findall(r"tests/[\w/]+\.py", text)):
        assert (ROOT / path).exists(), path
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
        assert f"def {name}(" in (ROOT / path).read_text() or f"class {name}" in (ROOT / path).read_text(), (
            path,
            name,
        )


def test_every_module_that_a_page_names_exists():
    for path in set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE)):
        if not path.startswith(("tests/", "examples/", "bench/")):
            assert (ROOT / "src" / "remuda" / path).exists(), path
