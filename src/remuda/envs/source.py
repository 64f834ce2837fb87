"""Rebuild functions and classes of a script or notebook in another process, from their source text.

    source = collect("MyEnv")               # in the script or notebook: the class and everything that it refers to
    ...                                     # send it as JSON
    module = load(source)                   # in the worker; module.MyEnv is the class

`collect` follows the global names that a definition uses. Functions and classes of `__main__` are copied as text,
modules and names imported from them become import statements, and constants become literals with their current
value. The rest of the script or notebook is left out, so that loading the text does not start the training again.
If all definitions are from one file, they keep their line numbers, so that tracebacks point to the user's lines.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import importlib.abc
import importlib.util
import inspect
import linecache
import os
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

MODULE_NAMES = {"__builtins__", "__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__"}
LITERALS = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set)
MAX_LITERAL = 1_000_000  # size limit of one constant in characters or bytes; every worker receives a copy
COMPREHENSIONS = {"lambda", "listcomp", "setcomp", "dictcomp", "genexpr"}
Definable = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class NoSource(Exception):
    """The source text cannot be collected; the message is the reason, without a remedy."""


@dataclass(frozen=True)
class Definition:
    """The source text of one function or class of `__main__`, and the names that it uses."""

    file: str
    first_line: int
    text: str
    used_at_once: frozenset[str]  # global names needed to execute the definition: bases, decorators, ...
    used_later: frozenset[str]  # global names needed only when the definition's functions are called
    attributes: tuple[tuple[str, ...], ...]  # dotted names in the text, such as ("xml", "dom", "minidom")
    has_postponed_annotations: bool


def collect(name: str) -> dict[str, str]:
    """Return the text and file name of a module that defines the function or class `name` of `__main__`.

    Raise NoSource if the definition needs something without source text: an object, a lambda or a closure.
    """
    namespace = vars(sys.modules["__main__"])
    definitions: dict[str, Definition] = {}
    statements: dict[str, str] = {}
    pending = [name]
    while pending:
        used = pending.pop()
        if used in definitions or used in MODULE_NAMES or used not in namespace:
            continue  # the name was collected before, or `__main__` does not define it (such as a builtin)
        value = namespace[used]
        if is_defined_in_main(value):
            definitions[used] = found = find_definition(used, value)
            pending += sorted(found.used_at_once | found.used_later)
        else:
            statements[used] = statement_for(used, value)
    for found in definitions.values():
        for path in found.attributes:
            if path[0] not in definitions and isinstance(namespace.get(path[0]), ModuleType):
                statements.update(submodule_imports(namespace[path[0]], path[1:]))
    return assemble(name, definitions, statements)


def is_defined_in_main(value: Any) -> bool:
    """Return whether `value` is a function or class that was defined in `__main__`."""
    is_definition = isinstance(value, type) or hasattr(inspect.unwrap(value), "__code__")
    return is_definition and getattr(value, "__module__", None) == "__main__"


# --- definitions ----------------------------------------------------------------------------------------------


def find_definition(name: str, value: object) -> Definition:
    """Return the `Definition` of `value`, the function or class to which `name` is bound, or raise NoSource."""
    qualified = getattr(value, "__qualname__", "")
    if qualified != name:
        kind = "a lambda" if qualified == "<lambda>" else "a closure" if "<" in qualified else f"{qualified} renamed"
        raise NoSource(f"{name} is {kind}")
    for file, line in places_of(value):
        lines = linecache.getlines(file)
        node = find_node(lines, name, line, isinstance(value, type))
        if node is not None:
            break
    else:
        raise NoSource(f"the source of {name} is not kept")
    first, last = first_line(node), node.end_lineno
    text = textwrap.dedent("".join(lines[first - 1 : last])).rstrip("\n")
    is_postponed = any("from __future__ import annotations" in line for line in lines) or has_postponed(value)
    return Definition(file, first, text, *names_in(node, is_postponed), tuple(dotted_names(node)), is_postponed)


def places_of(value: object) -> Iterator[tuple[str, int | None]]:
    """Yield (file, line) where a function or class may be defined, the likeliest first; line is None if unknown."""
    for function in functions_of(value):
        yield function.__code__.co_filename, function.__code__.co_firstlineno
    if isinstance(value, type):  # needed for classes without functions, because only functions record their file
        if (script := getattr(sys.modules["__main__"], "__file__", None)) is not None:
            yield script, None
        for file in reversed(list(linecache.cache)):  # cells of a notebook are in this cache and not on disk
            if not os.path.exists(file):
                yield file, None


def functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the function `value`, or the functions in the body of the class `value`, with decorators unwrapped."""
    if not isinstance(value, type):
        yield inspect.unwrap(value)
        return
    for attribute in vars(value).values():
        found: Any = attribute.fget if isinstance(attribute, property) else attribute
        found = inspect.unwrap(getattr(found, "__func__", found))
        if inspect.isfunction(found) and found.__qualname__ == f"{value.__qualname__}.{found.__name__}":
            yield found


def find_node(lines: list[str], name: str, line: int | None, is_class: bool) -> Definable | None:
    """Return the last definition of `name` that starts at `line`, or None if there is none.

    For a class, `line` may be any line of the class. If `line` is None, return the last definition of `name`.
    """
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return None
    found = None
    for node in top_level(tree):
        if node.name != name or isinstance(node, ast.ClassDef) != is_class:
            continue
        is_here = first_line(node) <= (line or 0) <= (node.end_lineno or 0) if is_class else first_line(node) == line
        if line is None or is_here:
            found = node
    return found


def top_level(node: ast.AST) -> Iterator[Definable]:
    """Yield the definitions of a module, including those inside `if`, `try` and `with`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definable):
            yield child
        else:
            yield from top_level(child)


def first_line(node: Definable) -> int:
    """Return the line on which a definition starts, including its decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def has_postponed(value: object) -> bool:
    """Return whether a function or class was compiled with `from __future__ import annotations`."""
    flag = __future__.annotations.compiler_flag
    return any(function.__code__.co_flags & flag for function in functions_of(value))


def names_in(node: Definable, is_postponed: bool) -> tuple[frozenset[str], frozenset[str]]:
    """Return the global names needed to execute a definition, and those needed only to call its functions."""
    if is_postponed:  # annotations are not evaluated, and may use names that only type checkers import
        node = WithoutAnnotations().visit(ast.parse(ast.unparse(node))).body[0]
    top = symtable.symtable(ast.unparse(node), "<definition>", "exec")
    at_once = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    later: set[str] = set()

    def visit(table: symtable.SymbolTable, runs_at_once: bool) -> None:
        for child in table.get_children():
            runs_now = runs_at_once and (child.get_type() != "function" or child.get_name() in COMPREHENSIONS)
            names = {symbol.get_name() for symbol in child.get_symbols() if symbol.is_global()}
            (at_once if runs_now else later).update(names)
            visit(child, runs_now)

    visit(top, True)
    return frozenset(at_once), frozenset(later - at_once)


class WithoutAnnotations(ast.NodeTransformer):
    """Removes all type annotations."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        self.generic_visit(node)
        node.returns = None
        return node


def dotted_names(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield every dotted name in the node, split at the dots."""
    for found in ast.walk(node):
        path: list[str] = []
        while isinstance(found, ast.Attribute):
            path.insert(0, found.attr)
            found = found.value
        if path and isinstance(found, ast.Name):
            yield (found.id, *path)


# --- imports and constants ------------------------------------------------------------------------------------


def statement_for(name: str, value: object) -> str:
    """Return an import or assignment that binds `name` to `value`; raise NoSource if this is not possible."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if (text := literal(value)) is not None:
        return f"{name} = {text}"
    if (found := import_of(name, value)) is not None:
        module, attribute = found
        return f"from {module} import {attribute} as {name}"
    if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.nbytes <= MAX_LITERAL:
        array = f"numpy.frombuffer({value.tobytes()!r}, {value.dtype.str!r}).reshape({value.shape}).copy()"
        return f"import numpy; {name} = {array}" if name != "numpy" else f"{name} = {array}"
    raise NoSource(f"{name} is an object of type {type(value).__qualname__}")


def literal(value: object) -> str | None:
    """Return source text that evaluates to an equal value of the same type, or None if there is none."""
    if type(value) not in LITERALS:
        return None
    text = repr(value)
    if text in ("inf", "-inf", "nan"):
        return f"float({text!r})"
    try:
        is_equal = len(text) <= MAX_LITERAL and ast.literal_eval(text) == value
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return text if is_equal else None


def import_of(name: str, value: object) -> tuple[str, str] | None:
    """Return (module, attribute) to import `value` from, preferably its own module, or None if no module has it."""
    own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    names = [each for each in (own[1], name) if isinstance(each, str) and each.isidentifier()]
    modules = [own[0]] if isinstance(own[0], str) else []
    modules += sorted(sys.modules, key=lambda module: (module.count("."), module))
    for module_name in modules:
        module = sys.modules.get(module_name)
        # Modules are compared, not names, because `__main__` may also be in sys.modules as `__mp_main__`.
        if not isinstance(module, ModuleType) or module is sys.modules["__main__"]:
            continue
        for attribute in names:
            if vars(module).get(attribute) is value:
                return module_name, attribute
    return None


def submodule_imports(module: ModuleType, path: tuple[str, ...]) -> dict[str, str]:
    """Return import statements, by alias, for the submodules in `path`.

    They are needed because `import xml` alone does not load `xml.dom.minidom`.
    """
    found, value = {}, module
    for attribute in path:
        value = vars(value).get(attribute)  # type: ignore[assignment]
        if not isinstance(value, ModuleType) or sys.modules.get(value.__name__) is not value:
            break
        alias = "_loaded_" + value.__name__.replace(".", "_")
        found[alias] = f"import {value.__name__} as {alias}"
    return found


# --- the module -----------------------------------------------------------------------------------------------


def assemble(name: str, definitions: Mapping[str, Definition], statements: Mapping[str, str]) -> dict[str, str]:
    """Return text and file name of a module: imports and constants on its first line, then the definitions."""
    is_postponed = any(found.has_postponed_annotations for found in definitions.values())
    head = "; ".join([*["from __future__ import annotations"][: int(is_postponed)], *statements.values()])
    files = {found.file for found in definitions.values()}
    if len(files) == 1:
        file, lines = files.pop(), [head]
        for found in sorted(definitions.values(), key=lambda found: found.first_line):
            lines += [""] * (found.first_line - 1 - len(lines)) + found.text.splitlines()
    else:
        file, lines = f"<definitions of {name}>", [head]
        lines += [line for each in in_order(name, definitions) for line in definitions[each].text.splitlines()]
    text = "\n".join(lines) + "\n"
    try:
        ast.parse(text)
    except SyntaxError as error:  # for example if a multi-line string prevented dedenting
        raise NoSource(f"its source cannot be taken out of {file}, {error.msg}") from None
    return {"source": text, "file": file}


def in_order(name: str, definitions: Mapping[str, Definition]) -> list[str]:
    """Return the names of the definitions, each after the definitions that are needed to execute it."""
    placed: list[str] = []
    begun: set[str] = set()

    def place(each: str) -> None:
        if each in begun or each not in definitions:
            return
        begun.add(each)
        for used in sorted(definitions[each].used_at_once):
            place(used)
        placed.append(each)
        for used in sorted(definitions[each].used_later):
            place(used)

    place(name)
    return placed


class TextLoader(importlib.abc.SourceLoader):
    """Imports a module from text that another process sent."""

    def __init__(self, source: Mapping[str, str]) -> None:
        self.source = {name: source[name] for name in ("source", "file")}

    def get_filename(self, fullname: str) -> str:
        return self.source["file"]

    def get_data(self, path: str | bytes) -> bytes:
        return self.source["source"].encode()


def load(source: Mapping[str, str]) -> ModuleType:
    """Import the module whose source text `collect` returned. A process imports the same text only once."""
    name = f"__remuda_main_{hashlib.sha256(source['source'].encode()).hexdigest()[:12]}__"
    if name in sys.modules:
        return sys.modules[name]
    loader = TextLoader(source)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
