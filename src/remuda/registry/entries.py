"""The class `Registry`, which maps names to entries, and the classes of entries of schemes and env backends."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from remuda.errors import ConfigError

if TYPE_CHECKING:
    from remuda.config.run_config import RunConfig
    from remuda.envs.backends import Backend
    from remuda.recipe import Scheme

BUILTIN = "remuda.registry.builtin"  # the module that registers Remuda's own entries


class Named(Protocol):
    """Protocol of registry entries: an object with a name."""

    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=Named)


class Registry(Generic[Entry]):
    """Entries of one kind by name: Remuda's own, those of entry points, and those registered at run time.

    Remuda's own entries are loaded at the first access. An entry point is loaded when `find` is called with its name,
    or when `all` is called. If an entry point fails to load, `all` logs this and leaves the entry out, so that a
    broken package does not hide the entries of other packages.
    """

    def __init__(self, kind: str, group: str, own: str, convert: Callable[[str, object], Entry]) -> None:
        """Create a registry.

        `kind` is the word for an entry in error messages. Other packages add entries through entry points of the
        group `group`. `own` is the name of the function in `BUILTIN` that registers Remuda's own entries. `convert`
        makes an entry from the name of an entry point and the object that this entry point loads.
        """
        self._kind, self._group, self._own, self._convert = kind, group, own, convert
        self._article = "an" if kind[0] in "aeiou" else "a"
        self._entries: dict[str, Entry] = {}
        self._builtin: frozenset[str] | None = None  # names of Remuda's own entries; None until they are loaded
        self._is_loading = False

    def add(self, entry: Entry) -> Entry:
        """Add `entry`, replacing any entry of the same name, and return `entry`.

        Raise ConfigError if the entry's name is empty, contains a colon, or belongs to one of Remuda's own entries.
        """
        self._load_builtin()
        if not entry.name or ":" in entry.name:
            raise ConfigError(f"{entry.name!r} cannot name {self._article} {self._kind}: use a word without a colon.")
        if self._builtin is not None and entry.name in self._builtin:
            raise ConfigError(f"{entry.name!r} is {self._article} {self._kind} of Remuda's own: choose another name.")
        self._entries[entry.name] = entry
        return entry

    def find(self, name: str) -> Entry | None:
        """Return the entry with this name, or None if there is none.

        Raise ConfigError if the entry comes from an entry point that fails to load.
        """
        self._load_builtin()
        if name in self._entries:
            return self._entries[name]
        point = self._points.get(name)
        return None if point is None else self._load_point(point)

    def names(self, is_sorted: bool = True) -> list[str]:
        """Return the names of all entries, sorted or in the order of registration, without loading entry points."""
        self._load_builtin()
        names = list(dict.fromkeys([*self._entries, *self._points]))
        return sorted(names) if is_sorted else names

    def is_installed(self, name: str) -> bool:
        """Return whether every process of this installation knows `name`: it is built in or names an entry point."""
        self._load_builtin()
        return name in self._points or (self._builtin is not None and name in self._builtin)

    def all(self, is_sorted: bool = True) -> list[Entry]:
        """Load and return all entries. Entry points that fail to load are logged and left out."""
        found = []
        for name in self.names(is_sorted):
            try:
                entry = self.find(name)
            except ConfigError as error:
                logging.getLogger("remuda").warning("%s", error)
            else:
                found += [] if entry is None else [entry]
        return found

    def loaded(self) -> list[Entry]:
        """Return the entries that have been loaded, in the order of their registration."""
        self._load_builtin()
        return list(self._entries.values())

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)}

    def _load_point(self, point: EntryPoint) -> Entry:
        try:
            entry = self._convert(point.name, point.load())
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._kind} {point.name!r} of the entry point {point.value} failed to load "
                f"({type(error).__name__}: {error}): repair or uninstall that package."
            ) from error
        return self.add(entry)

    def _load_builtin(self) -> None:
        if self._builtin is not None or self._is_loading:
            return
        self._is_loading = True
        try:
            getattr(importlib.import_module(BUILTIN), self._own)()
        finally:
            self._is_loading = False
        self._builtin = frozenset(self._entries)


@dataclass(frozen=True)
class SchemeEntry:
    """A registered scheme, with the properties that checks of a configuration need."""

    name: str
    make: Callable[[RunConfig], Scheme] | str  # function that makes the scheme, or import path of the function
    description: str
    has_workers: bool = True  # whether envs are stepped in worker processes by default
    is_asynchronous: bool = False  # whether samplers run ahead of the learner
    has_ranks: bool = False  # whether the run is divided among `scheme.ranks` processes that sample and learn

    def make_scheme(self, config: RunConfig) -> Scheme:
        """Return the scheme for a run with this configuration."""
        make = load(self.make) if isinstance(self.make, str) else self.make
        scheme: Scheme = make(config)
        return scheme


@dataclass(frozen=True)
class EnvBackendEntry:
    """A registered library of native vector envs."""

    name: str
    backend: Any  # an object or module with the members of `envs.backends.Backend`, or its import path

    def load(self) -> Backend:
        """Return the backend, which is imported if `self.backend` is an import path."""
        found: Backend = load(self.backend) if isinstance(self.backend, str) else self.backend
        return found


def load(path: str) -> Any:
    """Return the object that an import path names: `package.module:name`, or `package.module` for a module."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found
