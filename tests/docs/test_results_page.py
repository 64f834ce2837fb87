"""The commands of docs/results.md run, one of each kind, and the others settle; tests/documentation.py says how."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation import RECORDED, Page


def test_every_command_is_one_that_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(RECORDED)
    assert len(page.commands) > 100
    page.run(tmp_path, monkeypatch)
