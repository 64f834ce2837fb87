"""Run one command of each kind of docs/results.md and build the others (tests/documentation.py describes how)."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation import RECORDED, Page


def test_every_command_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(RECORDED)
    assert len(page.commands) > 100
    page.run(tmp_path, monkeypatch)
