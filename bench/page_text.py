"""Wrap the text of generated pages, so that scripts can build pages from strings of any length."""

import re
import textwrap

WIDTH = 118


def wrap_paragraphs(text: str) -> str:
    """Rewrap paragraphs and list items to WIDTH; leave headings, tables, pictures and code as they are."""
    out, is_code = [], False
    for block in text.split("\n\n"):
        is_prose = not is_code and not re.match(r"[#|!<]|```|\s", block)
        out.append("\n".join(fill(item) for item in items_of(block)) if is_prose else block.rstrip("\n"))
        is_code ^= len(re.findall(r"^```", block, re.MULTILINE)) % 2 == 1
    return "\n\n".join(out) + "\n"


def items_of(block: str) -> list[str]:
    """Split a list into its items; a paragraph is one item."""
    return re.split(r"\n(?=- )", block) if block.startswith("- ") else [block]


def fill(item: str) -> str:
    indent = "  " if item.startswith("- ") else ""
    return textwrap.fill(
        " ".join(item.split()), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def with_interval(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
