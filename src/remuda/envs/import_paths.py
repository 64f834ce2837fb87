"""Send functions and classes to another process as import paths, never as pickles.

    reference = describe(make_env)          # {"module": "my_envs", "name": "make_env"}
    ...                                     # send it as JSON
    make_env = find(reference)              # in the worker

A definition in `__main__`, that is in a script or notebook, has no import path. Its source text is sent instead, with
the text of everything that the definition refers to (envs/source.py). If this text cannot be collected and there is a
script, the worker loads the script's file under another module name, so that code below the guard
`if __name__ == "__main__":` does not run again.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from remuda.envs.source import NoSource, TextLoader, collect, load
from remuda.errors import ConfigError, EnvSpecError, nearest

SCRIPT = "__remuda_main__"  # the name under which a worker loads the user's script
GUARD = "if __name__ == '__main__':"
OR_SERIAL = ", or use scheme=serial"  # ends some error messages; `EnvPool`, which has no scheme, removes it


def sentence(error: BaseException, limit: int = 300) -> str:
    """Return the type of an exception and the first line of its text, without a period, cut to `limit` characters."""
    lines = str(error).strip().splitlines()
    text = lines[0].strip().rstrip(".") if lines else ""
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Unreachable(EnvSpecError):
    """A function or class cannot be found or rebuilt in other processes; `reason` is a clause that says why."""

    def __init__(self, label: str, reason: str) -> None:
        self.reason = reason
        name = label if label.isidentifier() else "make"
        super().__init__(
            f"{label} cannot be used in worker processes, as {reason}: define it in a module file, e.g. my_code.py, "
            f"and pass my_code.{name} or 'my_code:{name}'{OR_SERIAL}."
        )


def describe(thing: object) -> dict[str, str]:
    """Return a reference from which `find` gets `thing`, a function or class, in another process.

    Raise Unreachable if another process cannot find or rebuild it.
    """
    module_name, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(name, str):
        raise Unreachable(repr(thing), "it is neither a function nor a class and has no import path")
    if "<" in name:  # as in "<lambda>" or "make.<locals>.Env"
        kind = "a lambda" if name.endswith("<lambda>") else "defined inside a function"
        raise Unreachable(f"{module_name}.{name}", f"it is {kind} and has no import path")
    if _walk(sys.modules.get(module_name), name) != thing:
        raise Unreachable(f"{module_name}.{name}", f"{module_name} has another object of this name")
    if module_name == "__main__":
        return _describe_main(name)
    # A worker that starts workers of its own passes on the reference that it received from its parent.
    module = sys.modules[module_name]
    if isinstance(module.__loader__, TextLoader):
        return {**module.__loader__.source, "name": name}
    return (
        {"script": str(module.__file__), "name": name}
        if module_name == SCRIPT
        else {"module": module_name, "name": name}
    )


def _describe_main(name: str) -> dict[str, str]:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # the program was started by python -m package.module
        return {"module": spec.name, "name": name}
    try:
        return {**collect(name.partition(".")[0]), "name": name}
    except NoSource as error:
        path = getattr(main, "__file__", None)
        if path is None or not os.path.exists(path):
            raise Unreachable(name, f"it refers to something that has no source text ({error})") from None
        return {"script": os.path.abspath(path), "name": name}


def find(reference: Mapping[str, str]) -> Any:
    """Return the function or class for which `describe` returned this reference in another process."""
    name = reference["name"]
    if "source" in reference:
        module, where = _load_source(reference), reference["file"]
    elif "script" in reference:
        module, where = _load_script(reference["script"]), reference["script"]
    else:
        module, where = load_module(reference["module"]), reference["module"]
    thing = _walk(module, name)
    if thing is None:
        raise EnvSpecError(f"{where} has no {name} when a worker loads it: define it above {GUARD}")
    return thing


def import_named(path: str, option: str) -> Any:
    """Return the object at `package.module:Name`; errors name the `option` that was set to this path."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{option}={path!r} is not an import path: write package.module:Name.")
    try:
        module = load_module(module_name)
    except EnvSpecError as error:
        raise ConfigError(f"{option}={path!r}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{option}={path!r}: {missing(module, name)}") from None


def missing(module: ModuleType, name: str) -> str:
    """Return a sentence which says that `module` has no attribute `name`, and lists the most similar names."""
    names = [known for known in dir(module) if not known.startswith("_")]
    return f"{module.__name__} has no {name}: {nearest(name, names)}"


def load_module(name: str) -> ModuleType:
    """Import a module by name; if that fails, raise EnvSpecError with one sentence that says why."""
    if name.endswith(".py"):
        raise EnvSpecError(f"{name} is the name of a file: write {name[:-3]}, the name of the module.")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise EnvSpecError(f"module {name} was not found: install it, or add its folder to PYTHONPATH.") from None
        raise EnvSpecError(f"module {name} needs {error.name}, which is not installed: pip install it.") from error
    except (Exception, SystemExit) as error:
        raise EnvSpecError(f"module {name} failed while it was imported ({sentence(error)}): fix it.") from error


def _load_script(path: str) -> ModuleType:
    if SCRIPT in sys.modules:
        return sys.modules[SCRIPT]
    loader = importlib.machinery.SourceFileLoader(SCRIPT, path)
    spec = importlib.util.spec_from_loader(SCRIPT, loader)
    if spec is None:
        raise EnvSpecError(f"{path} is not a Python file that a worker can load: import the env from a module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT] = module
    try:
        loader.exec_module(module)
    except EnvSpecError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvSpecError(
            f"{path} failed while a worker loaded it ({sentence(error)}): put what it runs under {GUARD}"
        ) from error
    return module


def _load_source(reference: Mapping[str, str]) -> ModuleType:
    try:
        return load(reference)
    except (Exception, SystemExit) as error:
        raise EnvSpecError(
            f"{reference['name']} of {reference['file']} failed when a worker rebuilt it from its source "
            f"({sentence(error)}): define it in a module file and import it from there."
        ) from error


def _walk(root: object, name: str) -> Any:
    """Return the object that a dotted name leads to from `root`, or None if an attribute is missing."""
    for part in name.split("."):
        root = getattr(root, part, None)
    return root


def as_json(values: Mapping[str, object], owner: str) -> dict[str, object]:
    """Return these keyword arguments as a dict; raise EnvSpecError if JSON would change one of them."""
    for key, value in values.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise EnvSpecError(
                f"{key}={value!r} of {owner} is not JSON, so it cannot reach worker processes: "
                f"use numbers, strings, lists and dicts{OR_SERIAL}."
            )
    return dict(values)
