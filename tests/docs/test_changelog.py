"""Test that CHANGELOG.md has the form of keepachangelog.com and that new names in its table of renames exist."""

from __future__ import annotations

import re

import pytest
from documentation import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src" / "remuda").rglob("*.py")))
ROWS = [
    line.strip("| ").split(" | ") for line in TEXT.splitlines() if re.match(r"\| (class|function|method) \|", line)
]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`(?:\w+\.)?(\w+)`", row[2])})


def test_sections_have_the_usual_names() -> None:
    versions = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert versions[0] == "Unreleased"
    sections = set(re.findall(r"^### (.+)$", TEXT, re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Renames"}


@pytest.mark.parametrize("name", NAMES)
def test_new_names_exist(name: str) -> None:
    assert re.search(rf"^ *(class|def) {name}\b", SOURCE, re.MULTILINE), name
