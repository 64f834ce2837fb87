"""Test that every name in docs/glossary.md exists, and that every term is defined once."""

from __future__ import annotations

import re

import pytest
from documentation import ROOT

PACKAGE = ROOT / "src" / "remuda"
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| term")
]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[-1])})


def test_every_term_is_defined_once_by_a_sentence() -> None:
    assert len(ROWS) > 50
    terms = [term for term, _, _ in ROWS]
    assert len(terms) == len(set(terms))
    assert all(meaning.endswith(".") for _, meaning, _ in ROWS)
    assert all("`" in name for _, _, name in ROWS)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name: str) -> None:
    if name.endswith(".py"):
        assert (PACKAGE / name).is_file()
    elif "/" in name:  # a metric
        group, metric = name.split("/")
        assert re.search(rf'"{group}/{metric}"|"{metric}"', SOURCE), name
    elif "." in name:  # an option
        group, option = name.split(".")
        assert re.search(rf'_group = "{group}\.".*?^    {option}: ', SOURCE, re.DOTALL | re.MULTILINE), name
    else:
        assert re.search(rf"^ *(class|def) {name}\b", SOURCE, re.MULTILINE), name
