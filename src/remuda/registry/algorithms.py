"""Registry entries of algorithms, and functions that derive an entry from the class of an algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from remuda.errors import ConfigError
from remuda.registry.entries import load

if TYPE_CHECKING:
    from remuda.build.algorithm import Builder
    from remuda.config.algo_base import AlgoOptions

# Preset values of options, as {pattern of env ids: {group of options: {option: value}}}.
Presets: TypeAlias = Mapping[str, Mapping[str, Mapping[str, object]]]


@dataclass(frozen=True)
class AlgorithmEntry:
    """A registered algorithm. Its import paths are resolved when the class, presets or builder are used."""

    name: str
    algorithm: type[Any] | str  # the class, or its import path
    options: type[AlgoOptions]  # a frozen dataclass, whose fields the command line shows as --algo.NAME
    preset_table: Presets | str  # the mapping `presets`, or its import path
    builder: str  # import path of the `Builder` that makes the agent and the algorithm from a configuration
    description: str = ""  # the line that `remuda algos` shows

    @property
    def presets(self) -> Presets:
        """Preset values of options, as {pattern of env ids: {group of options: {option: value}}}."""
        found: Presets = load(self.preset_table) if isinstance(self.preset_table, str) else self.preset_table
        return found

    @property
    def data(self) -> str:
        """Source of batches: "rollouts" (rows of rollouts), "sequences" (columns of rollouts) or "replay"."""
        return self.options.data

    @property
    def actions(self) -> str:
        """The kind of action space that the algorithm supports: "any", "Discrete" or "Box"."""
        return self.options.actions

    @property
    def may_run_async(self) -> bool:
        """Whether the algorithm, with its default options, may learn from steps sampled with older weights."""
        return not self.options().is_on_policy

    @property
    def path(self) -> str:
        """Import path of the algorithm's class."""
        return self.algorithm if isinstance(self.algorithm, str) else path_of(self.algorithm)

    def load_class(self) -> type[Any]:
        """Return the class of the algorithm."""
        found: type[Any] = load(self.algorithm) if isinstance(self.algorithm, str) else self.algorithm
        return found

    def load_builder(self) -> Builder:
        """Return the builder object that makes the agent and the algorithm."""
        found: Builder = load(self.builder)
        return found


def path_of(kind: type[object]) -> str:
    """Return the import path of a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def entry_for_class(
    name: str,
    kind: Any,
    known: Iterable[AlgorithmEntry],
    options: type[AlgoOptions] | None = None,
    presets: Presets | str | None = None,
    builder: str | None = None,
    description: str | None = None,
) -> AlgorithmEntry:
    """Return a new entry for the algorithm class `kind`.

    Arguments that are not given are taken from the class attributes `Options`, `presets` and `builder`, which
    subclasses inherit; the description is the first line of the class's docstring. Without such attributes, options
    and presets come from the entry in `known` of the nearest base class (presets only if the options are derived from
    the options of that entry), and the builder is `options.builder`.
    """
    if not isinstance(kind, type) or not _attribute(kind, "losses"):
        raise ConfigError(
            f"{name} is not the class of an algorithm: derive one from a class of remuda.algorithms, such as PPO."
        )
    base = _base(kind, known)
    options = options or _attribute(kind, "Options") or (None if base is None else base.options)
    if options is None:
        raise ConfigError(
            f"{name} has no options: derive it from an algorithm that has, such as remuda.algorithms:PPO, or set its "
            "class attribute Options."
        )
    check_options(name, options)
    if presets is None:
        presets = _attribute(kind, "presets")
    if presets is None and base is not None and issubclass(options, base.options):
        presets = base.preset_table
    builder = builder or _attribute(kind, "builder") or options.builder
    text = description or (inspect.cleandoc(kind.__doc__).splitlines()[0].rstrip(".") if kind.__doc__ else "")
    return AlgorithmEntry(name, kind, options, {} if presets is None else presets, builder, text)


def check_options(name: str, options: object) -> None:
    """Raise ConfigError if the options class of algorithm `name` is not declared as the command line requires."""
    from remuda.config.algo_base import AlgoOptions

    label = f"the options of {name}"
    if not (isinstance(options, type) and issubclass(options, AlgoOptions)):
        raise ConfigError(f"{label} are not derived from remuda.config.algo_base.AlgoOptions: derive them.")
    if "__dataclass_fields__" not in vars(options):
        raise ConfigError(f"{label} are not a dataclass: put @dataclass(frozen=True) above {options.__name__}.")
    for item in fields(options):
        if "help" not in item.metadata:
            raise ConfigError(
                f"{label}: {item.name} has no help text: declare it as option(default, text), which is "
                "in remuda.config.fields."
            )


def _base(kind: type[object], known: Iterable[AlgorithmEntry]) -> AlgorithmEntry | None:
    """Return the entry of class `kind` or of its nearest base class that has one; None if no class has an entry.

    If a class has several entries, the first one in `known` is returned.
    """
    by_path: dict[str, AlgorithmEntry] = {}
    for entry in known:
        by_path.setdefault(entry.path, entry)
    return next((by_path[path] for each in kind.__mro__ if (path := path_of(each)) in by_path), None)


def _attribute(kind: type[object], name: str) -> Any:
    """Return the attribute `name` of a class or its bases, without binding it, or None if no class declares it."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
