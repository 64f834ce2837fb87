"""Definitions of a script or notebook are collected as source text that another process imports."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from notebook import Notebook

from remuda.envs.import_paths import Unreachable, describe, find
from remuda.envs.source import NoSource, collect, load


@pytest.fixture
def cell() -> Iterator[Notebook]:
    with closing(Notebook()) as notebook:
        yield notebook


def rebuilt(name: str) -> Any:
    """Return the definition as a worker rebuilds it."""
    reference = json.loads(json.dumps(describe(getattr(sys.modules["__main__"], name))))
    thing = find(reference)
    assert thing is not getattr(sys.modules["__main__"], name)
    return thing


def test_names_that_a_class_uses_are_included(cell: Notebook) -> None:
    cell("import math\nimport numpy as np\nfrom collections import OrderedDict as Ordered\nSIZE = 3\n")
    cell("def helper(x):\n    return math.sqrt(x) + SIZE\n")
    cell("class Base:\n    def value(self):\n        return helper(16)\n")
    made = cell(
        """
        print("a cell may do other things")
        class Mine(Base):
            table = [helper(i) for i in range(2)]
            def both(self):
                return Ordered(value=self.value(), array=np.ones(SIZE), made=type(Mine2()))
        class Mine2(Mine): pass
        """
    )
    mine = rebuilt("Mine")
    found = mine().both()
    assert found["value"] == made["Mine"]().value() == 7.0
    assert found["array"].tolist() == [1, 1, 1]
    assert mine.table == made["Mine"].table
    assert issubclass(found["made"], mine)


def test_no_other_code_of_the_script_is_run(cell: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    cell("import os\nprint('once')\ndef make():\n    return 3\nresult = make()\n")
    assert rebuilt("make")() == 3
    assert capsys.readouterr().out == "once\n"
    assert "os" not in collect("make")["source"]


@pytest.mark.parametrize(
    "value",
    [
        "3",
        "-0.5",
        "'a\\nb\"'",
        "b'\\x00'",
        "None",
        "True",
        "2j",
        "float('inf')",
        "float('nan')",
        "(1, [2.5, {'a': set()}])",
    ],
)
def test_constants_are_included(cell: Notebook, value: str) -> None:
    original = cell(f"CONSTANT = {value}\ndef get():\n    return CONSTANT\n")["CONSTANT"]
    found = rebuilt("get")()
    assert type(found) is type(original)
    assert found == original or math.isnan(found)


def test_constants_have_their_current_value(cell: Notebook) -> None:
    cell("LENGTHS = [1]\nSIZE = 1\ndef get():\n    return LENGTHS, SIZE\n")
    cell("LENGTHS.append(2)\nSIZE = 5")
    assert rebuilt("get")() == ([1, 2], 5)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", ">f8"])
def test_arrays_are_included(cell: Notebook, dtype: str) -> None:
    original = cell(f"import numpy as np\nA = np.array([[0, 1, 2]], {dtype!r})\ndef get():\n    return A\n")["A"]
    found = rebuilt("get")()
    np.testing.assert_array_equal(found, original)
    assert (found.dtype, found.flags.writeable) == (original.dtype, True)


def test_imports_of_every_kind_are_included(cell: Notebook) -> None:
    cell(
        """
        import xml.dom.minidom
        import os.path as p
        from math import sqrt, pi
        from numpy import float32, add as plus
        from counting import CountingEnv as Env, make
        def get():
            return xml.dom.minidom.parseString("<a/>"), p.join("a", "b"), sqrt(pi), float32(1), plus(1, 2), Env, make
        """
    )
    source = collect("get")["source"]
    assert "import xml.dom.minidom as" in source, "`import xml` alone would not load it in a new process"
    found = rebuilt("get")()
    assert found[1:5] == ("a/b", math.sqrt(math.pi), 1.0, 3)
    assert [thing.__module__ for thing in found[5:]] == ["counting", "counting"]


def test_decorators_defaults_and_dataclasses_are_included(cell: Notebook) -> None:
    cell("import functools\nfrom dataclasses import dataclass\nDEFAULT = 4\n")
    cell(
        """
        class Plain:
            size = DEFAULT
        @dataclass(frozen=True)
        class Config:
            size: int = Plain.size
        @functools.cache
        def twice(x=DEFAULT): return 2 * x
        def make(config=Config()): return config.size + twice()
        """
    )
    assert rebuilt("make")() == 12


def test_newest_definition_is_used(cell: Notebook) -> None:
    cell("def helper(): return 1\ndef make(): return helper()\nclass Plain:\n    size = 1\n")
    cell("def helper(): return 2\nclass Plain:\n    size = 2\n")
    assert rebuilt("make")() == 2
    assert rebuilt("Plain").size == 2


def test_bases_come_first_if_classes_refer_to_each_other(cell: Notebook) -> None:
    cell("class Base:\n    def derived(self): return Derived()\n")
    cell("class Derived(Base): pass\n")
    assert isinstance(rebuilt("Base")().derived(), find(describe(sys.modules["__main__"].Base)))
    assert rebuilt("Derived")().derived()


def test_names_used_only_in_annotations_are_not_needed(cell: Notebook) -> None:
    cell(
        """
        from __future__ import annotations
        def make(size: Unknown = 3) -> AlsoUnknown:
            local: Unknown = size
            return local
        """
    )
    assert rebuilt("make")() == 3
    cell("Unknown = object()")
    assert rebuilt("make")() == 3, "a name that only annotations use is not needed"


def test_method_of_a_class_is_rebuilt(cell: Notebook) -> None:
    made = cell("class Outer:\n    @staticmethod\n    def make(): return 5\n")
    assert find(describe(made["Outer"].make))() == 5


def test_line_numbers_are_those_of_the_file(cell: Notebook) -> None:
    cell("import math\n\nX = 1\n\ndef first():\n    return 1\n\ndef make():\n    raise ValueError(X)\n")
    with pytest.raises(ValueError, match="1") as caught:
        rebuilt("make")()
    (*_, frame) = traceback.extract_tb(caught.value.__traceback__)
    assert (frame.filename, frame.lineno, frame.line) == ("<ipython-input-0-test>", 9, "raise ValueError(X)")


def test_definition_inside_a_try_is_rebuilt(cell: Notebook) -> None:
    cell("try:\n    import nonsense_that_is_missing\nexcept ImportError:\n    def make():\n        return 7\n")
    assert rebuilt("make")() == 7


def test_equal_text_is_loaded_as_one_module(cell: Notebook) -> None:
    cell("def make():\n    return 1\n")
    assert load(collect("make")) is load(collect("make"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("f = lambda: 1\ndef make():\n    return f()", "f is a lambda"),
        (
            "def outer():\n    def inner(): pass\n    return inner\nf = outer()\ndef make():\n    f()",
            "f is a closure",
        ),
        ("import random\nrng = random.Random(1)\ndef make():\n    return rng", "rng is an object of type Random"),
        ("def f(): pass\ng = f\ndef make():\n    g()", "g is f renamed"),
        ("big = list(range(10**6))\ndef make():\n    return big", "big is an object of type list"),
    ],
)
def test_objects_without_source_are_refused_in_one_sentence(cell: Notebook, text: str, words: str) -> None:
    make = cell(text)["make"]
    with pytest.raises(NoSource, match=words):
        collect("make")
    with pytest.raises(Unreachable) as caught:
        describe(make)
    message = str(caught.value)
    assert message.startswith(
        f"make cannot be used in worker processes, as it refers to something that has no source text ({words})"
    )
    assert message.endswith(
        "define it in a module file, e.g. my_code.py, and pass my_code.make or 'my_code:make', or use scheme=serial."
    )
    assert "\n" not in message


def test_lambdas_and_closures_are_refused(cell: Notebook) -> None:
    cell("make = lambda: 1\ndef outer():\n    def inner(): pass\n    return inner\nclosed = outer()\n")
    for name, reason in {"make": "it is a lambda", "closed": "it is defined inside a function"}.items():
        with pytest.raises(Unreachable, match=reason):
            describe(getattr(sys.modules["__main__"], name))


def test_worker_forwards_the_source_that_it_received(cell: Notebook) -> None:
    """Under async with central inference, a worker has env workers of its own."""
    cell("def make():\n    return 3\n")
    assert describe(rebuilt("make")) == describe(sys.modules["__main__"].make)


def test_source_that_fails_in_the_worker_gives_one_sentence() -> None:
    reference = {"source": "import nonsense_that_is_missing\n", "file": "train.py", "name": "make"}
    with pytest.raises(Exception, match=r"^make of train.py failed when a worker rebuilt it .*nonsense.*: define it"):
        find(reference)
