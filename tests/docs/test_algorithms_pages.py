"""Run the blocks of the pages in docs/algorithms (tests/documentation.py describes how)."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation import Page, all_pages


@pytest.mark.parametrize("name", [name for name in all_pages() if name.startswith("docs/algorithms/")])
def test_every_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Page(name).run(tmp_path, monkeypatch)
