"""Test that docs/speed.md and the table of speeds in README.md are what bench/speed_page.py writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import speed_page
from page_text import wrap_paragraphs


def test_the_page_is_up_to_date() -> None:
    written = (speed_page.ROOT / "docs" / "speed.md").read_text()
    assert written == speed_page.page(speed_page.read_reports()), "run bench/speed_page.py"


def test_the_table_in_the_readme_is_up_to_date() -> None:
    readme = speed_page.README.read_text()
    table = speed_page.readme_table(speed_page.read_reports())
    assert readme == speed_page.with_table(readme, table), "run bench/speed_page.py"


def test_the_table_has_the_ratios_of_the_reports() -> None:
    reports = speed_page.read_reports()
    row = reports["ppo-cartpole"]["contenders"]["sb3"]
    low, high = row["interval"]
    assert f"**{row['first_is_times']:.1f}** ({low:.1f}–{high:.1f})" in speed_page.readme_table(reports)
    assert len(speed_page.readme_table(reports).split("\n\n")[0].splitlines()) == 7


BLOCKS = ["## Heading", "| a | b |\n|---|---|", "```\ncommand\n\nanother\ncommand\n```", "![name](path.png)"]


@pytest.mark.parametrize("block", BLOCKS)
def test_other_blocks_are_not_wrapped(block: str) -> None:
    assert wrap_paragraphs(f"{block}\n\nTwo\nlines.\n") == f"{block}\n\nTwo lines.\n"


def test_list_items_are_wrapped_separately() -> None:
    long = "word " * 30
    assert wrap_paragraphs(f"- first\n- {long}\n  end") == (
        f"- first\n- {'word ' * 23}".rstrip() + f"\n  {'word ' * 7}end\n"
    )
