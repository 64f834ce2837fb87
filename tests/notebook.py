"""Run cells of a notebook like IPython: in the namespace of `__main__`, with their source text only in linecache."""

from __future__ import annotations

import linecache
import sys
import textwrap
from types import ModuleType
from typing import Any


class Notebook:
    """A notebook, which replaces `__main__` by a module that has neither file nor spec until it is closed."""

    def __init__(self) -> None:
        self._before, self._names = sys.modules["__main__"], list[str]()
        self._main = sys.modules["__main__"] = ModuleType("__main__")

    def __call__(self, text: str) -> dict[str, Any]:
        """Run one cell and return the namespace of the notebook."""
        text, name = textwrap.dedent(text), f"<ipython-input-{len(self._names)}-test>"
        self._names.append(name)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec", dont_inherit=True), vars(self._main))
        return vars(self._main)

    def close(self) -> None:
        sys.modules["__main__"] = self._before
        for name in self._names:
            del linecache.cache[name]
