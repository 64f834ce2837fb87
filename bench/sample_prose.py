"""Draw docstrings and comments of the package at random, for a reader to judge.

    python bench/sample_prose.py --seed 1 --count 40
    python bench/sample_prose.py --seed 1 --count 40 --blind     # leaves out file and line

A reader marks each passage that has to be read twice. The same seed on the same commit gives the same passages.
Docstrings of modules, classes and functions count, and so do comments; consecutive lines of comment are one passage.
Directives for tools, such as `# noqa`, are left out.
"""

import argparse
import ast
import io
import random
import textwrap
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIRECTIVES = ("# noqa", "# type:", "# fmt:", "# pragma:", "#!")


@dataclass(frozen=True)
class Passage:
    """A docstring or comment and where it stands."""

    path: Path
    line: int
    kind: str  # "docstring" or "comment"
    about: str  # qualified name of what a docstring describes, or the code that a comment stands beside
    text: str


def passages(root: Path) -> list[Passage]:
    """Return every docstring and comment below `root`, in the order of paths and lines."""
    found = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        found += sorted([*docstrings(path, source), *comments(path, source)], key=lambda passage: passage.line)
    return found


def docstrings(path: Path, source: str) -> list[Passage]:
    found = []

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = (*names, node.name)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                about = ".".join(names) or "module"
                found.append(Passage(path, node.body[0].lineno, "docstring", about, text))
        for child in ast.iter_child_nodes(node):
            visit(child, names)

    visit(ast.parse(source), ())
    return found


def comments(path: Path, source: str) -> list[Passage]:
    lines = source.splitlines()
    found: list[Passage] = []
    last_line, is_open = 0, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(DIRECTIVES) or not token.string.strip("# -"):
            continue
        line, column = token.start
        code, text = lines[line - 1][:column].strip(), token.string.removeprefix("#").strip()
        if is_open and not code and line == last_line + 1:
            before = found.pop()
            found.append(Passage(path, before.line, "comment", before.about, f"{before.text}\n{text}"))
        else:
            following = next((each.strip() for each in lines[line:] if each.strip() and each.strip()[0] != "#"), "")
            found.append(Passage(path, line, "comment", code or following, text))
        last_line, is_open = line, not code
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--blind", action="store_true", help="leave out file and line")
    parser.add_argument("--root", type=Path, default=ROOT / "src" / "remuda")
    arguments = parser.parse_args()
    every = passages(arguments.root)
    drawn = random.Random(arguments.seed).sample(every, min(arguments.count, len(every)))
    for number, passage in enumerate(drawn, 1):
        place = "" if arguments.blind else f"  {passage.path.relative_to(arguments.root)}:{passage.line}"
        print(f"{number}. {passage.kind} of {passage.about}{place}")
        print(textwrap.indent(passage.text, "     "), end="\n\n")
    print(f"{len(drawn)} of {len(every)} passages, seed {arguments.seed}")


if __name__ == "__main__":
    main()
