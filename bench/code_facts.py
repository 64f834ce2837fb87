"""Count what the conventions of the package limit: modules, lines, `Any`, and `getattr` with a default.

    python bench/code_facts.py
    python bench/code_facts.py --list getattr     # list everything that one count includes
    python bench/code_facts.py --json

Names are counted in the syntax tree, so that words in comments, docstrings and imports are left out.
"""

import argparse
import ast
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 400  # a module with this many lines or more counts as long

COUNTS = ("modules", "long modules", "Any", "getattr", "optional members")

Places = dict[str, list[str]]


def facts(root: Path) -> Places:
    """Return, for each count, the places (file and line) of everything that it includes."""
    found: Places = {name: [] for name in COUNTS}
    for path in sorted(root.rglob("*.py")):
        source, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
        found["modules"].append(name)
        if len(source.splitlines()) >= LONGEST:
            found["long modules"].append(name)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name) and node.id == "Any":
                found["Any"].append(f"{name}:{node.lineno}")
            if isinstance(node, ast.Attribute) and node.attr == "Any":
                found["Any"].append(f"{name}:{node.lineno}")
            if isinstance(node, ast.Call) and is_getattr_with_default(node):
                found["getattr"].append(f"{name}:{node.lineno}: {ast.unparse(node)}")
                if not is_of_python(node):
                    found["optional members"].append(found["getattr"][-1])
    return found


def is_getattr_with_default(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) == 3


def is_of_python(call: ast.Call) -> bool:
    """Return whether the attribute belongs to Python, such as `__module__`, or to the module `os`."""
    target, name = call.args[:2]
    is_dunder = isinstance(name, ast.Constant) and str(name.value).startswith("__")
    return is_dunder or (isinstance(target, ast.Name) and target.id == "os")


def num_lines(root: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in root.rglob("*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT / "src" / "remuda")
    parser.add_argument("--list", choices=COUNTS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = facts(arguments.root)
    if arguments.list:
        print("\n".join(found[arguments.list]))
        return
    counts = {**{name: len(places) for name, places in found.items()}, "lines": num_lines(arguments.root)}
    if arguments.json:
        print(json.dumps(counts))
        return
    print(f"modules                  {counts['modules']:>7,}")
    print(f"lines                    {counts['lines']:>7,}")
    print(f"modules of {LONGEST} or more  {counts['long modules']:>7,}")
    print(f"Any                      {counts['Any']:>7,}")
    print(f"getattr with a default   {counts['getattr']:>7,}")
    print(f"  not of Python's own    {counts['optional members']:>7,}")


if __name__ == "__main__":
    main()
