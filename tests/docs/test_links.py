"""Test that relative links between pages lead to files and headings that exist."""

from __future__ import annotations

import re

import pytest
from documentation import ROOT, all_pages

PAGES = [*all_pages(), "CONTRIBUTING.md", "CHANGELOG.md"]


def anchors(text: str) -> set[str]:
    """Return the anchors of all headings, as GitHub derives them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_have_targets(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_anchors_of_headings() -> None:
    assert anchors("# `async`\n\n## A rollout's way\n```\n# no heading\n```\n") == {"async", "a-rollouts-way"}
