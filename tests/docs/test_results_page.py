"""Run one command of each kind of docs/results.md, build the others, and check that the page is up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from documentation import RECORDED, ROOT, Page

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import learning_page


def test_every_command_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(RECORDED)
    assert len(page.commands) > 100
    page.run(tmp_path, monkeypatch)


def test_the_page_is_up_to_date() -> None:
    records = {job.name: learning_page.read_records(job) for job in learning_page.JOBS}
    compared = json.loads(learning_page.COMPARED.read_text())
    assert (ROOT / RECORDED).read_text() == learning_page.page(records, compared), "run bench/learning.py report"
