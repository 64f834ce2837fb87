"""Registries of algorithms, schemes and env backends, which map the names on the command line to the code.

    remuda.register_algorithm("mine", MyAlgorithm)          # or "mypackage.algorithms:MyAlgorithm"
    remuda.register_scheme("mine", "mypackage.schemes:make", "what it does", is_asynchronous=False)
    remuda.register_env_backend("mine", "mypackage.games")

Remuda's own entries are registered by the same functions (registry/builtin.py). A package that is installed but not
imported can register entries through entry points of the groups `remuda.algorithms`, `remuda.schemes` and
`remuda.env_backends`. Wherever a registered name is accepted, so is an import path, `package.module:Name`.

Help texts and tables read the registries, so importing this package must be cheap: the package imports neither torch
nor numpy, and resolves the import paths of Remuda's own entries only when the objects that they name are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from remuda.errors import ConfigError, nearest
from remuda.registry.algorithms import AlgorithmEntry, Presets, check_options, entry_for_class
from remuda.registry.entries import EnvBackendEntry, Registry, SchemeEntry

if TYPE_CHECKING:
    from remuda.config.algo_base import AlgoOptions

__all__ = [
    "AlgorithmEntry",
    "EnvBackendEntry",
    "SchemeEntry",
    "algorithm_names",
    "algorithm_reference",
    "all_algorithms",
    "all_env_backends",
    "all_schemes",
    "env_backend_names",
    "find_algorithm",
    "find_env_backend",
    "find_scheme",
    "register_algorithm",
    "register_env_backend",
    "register_reference",
    "register_scheme",
    "scheme_names",
]


# --- algorithms -----------------------------------------------------------------------------------------------------


def register_algorithm(
    name: str,
    algorithm: type[Any] | str,
    *,
    options: type[AlgoOptions] | None = None,
    presets: Presets | str | None = None,
    builder: str | None = None,
    description: str | None = None,
) -> AlgorithmEntry:
    """Register an algorithm under `name`, and return its entry.

    `algorithm` is the class of the algorithm, or the import path of the class. `options` is a dataclass derived from
    `AlgoOptions` or from one of its subclasses in remuda.config. `presets` is a mapping {pattern of env ids: {group
    of options: {option: value}}} (config/presets.py), or its import path. `builder` is the import path of the
    `remuda.build.algorithm.Builder` that makes agent and algorithm. `description` is the line that `remuda algos`
    shows.

    Arguments that are left out are taken from the class: from its attributes `Options`, `presets` and `builder`, and
    the description from the first line of its docstring. Without these attributes, options and presets are those of
    the registered algorithm from which the class is derived (presets only if `options` are derived from the options
    of that algorithm), and the builder is `options.builder`.

    If `algorithm` is an import path and `options` are given, the class is not imported yet. Presets and description
    are then empty unless they are given.
    """
    if isinstance(algorithm, str) and options is not None:
        check_options(name, options)
        entry = AlgorithmEntry(name, algorithm, options, presets or {}, builder or options.builder, description or "")
    else:
        kind = _imported(algorithm, "algorithm") if isinstance(algorithm, str) else algorithm
        entry = entry_for_class(name, kind, _known_algorithms(), options, presets, builder, description)
    return _algorithms.add(entry)


def find_algorithm(name: str) -> AlgorithmEntry:
    """Return the entry of an algorithm, by its registered name or by the import path of its class."""
    found = _algorithms.find(name)
    if found is not None:
        return found
    if ":" not in name:
        raise ConfigError(f"{name!r} is not an algorithm: {nearest(name, _algorithms.names())}")
    return entry_for_class(name, _imported(name, "algorithm"), _known_algorithms())


def algorithm_names() -> list[str]:
    """Return the names of all registered algorithms, sorted."""
    return _algorithms.names()


def all_algorithms() -> list[AlgorithmEntry]:
    """Load and return the entries of all registered algorithms, sorted by name."""
    return _algorithms.all()


def algorithm_reference(name: str) -> dict[str, object] | None:
    """Describe an algorithm that was registered at run time, as JSON for `register_reference` in another process.

    Return None if other processes find the algorithm by its name alone. Raise Unreachable if the algorithm's class or
    options can be neither imported nor rebuilt there.
    """
    from remuda.envs.import_paths import describe

    if ":" in name or _algorithms.is_installed(name):
        return None
    entry = find_algorithm(name)
    return {
        "name": name,
        "algorithm": describe(entry.load_class()),
        "options": describe(entry.options),
        "builder": entry.builder,
    }


def register_reference(reference: Mapping[str, Any] | None) -> None:
    """Register the algorithm that `algorithm_reference` described in another process; do nothing for None."""
    from remuda.envs.import_paths import find

    if reference is not None:
        kind, options = find(reference["algorithm"]), find(reference["options"])
        register_algorithm(reference["name"], kind, options=options, builder=reference["builder"])


def _known_algorithms() -> list[AlgorithmEntry]:
    return _algorithms.loaded()


def _algorithm_of(name: str, found: object) -> AlgorithmEntry:
    return found if isinstance(found, AlgorithmEntry) else entry_for_class(name, found, _known_algorithms())


# --- schemes --------------------------------------------------------------------------------------------------------


def register_scheme(
    name: str,
    make: Callable[[Any], Any] | str,
    description: str,
    *,
    has_workers: bool = True,
    is_asynchronous: bool = False,
    has_ranks: bool = False,
) -> SchemeEntry:
    """Register a scheme under `name`, and return its entry.

    `make` is a callable that takes the run's configuration and returns a `recipe.Scheme`, or the callable's import
    path. `description` is shown by `remuda schemes`. `has_workers` tells whether envs are stepped in worker processes
    by default. `is_asynchronous` tells whether samplers run ahead of the learner, which then learns from rollouts or
    replay rows that were sampled with older weights. `has_ranks` tells whether the run is divided among
    `scheme.ranks` processes, each of which samples and learns.
    """
    return _schemes.add(SchemeEntry(name, make, description, has_workers, is_asynchronous, has_ranks))


def find_scheme(name: str) -> SchemeEntry:
    """Return the entry of a scheme, by its registered name or by the import path of a `SchemeEntry`."""
    found = _schemes.find(name)
    if found is not None:
        return found
    if ":" not in name:
        raise ConfigError(f"scheme={name!r} is not known: {nearest(name, _schemes.names())}")
    return _scheme_of(name, _imported(name, "scheme"))


def scheme_names() -> list[str]:
    """Return the names of all registered schemes, in the order of their registration."""
    return _schemes.names(is_sorted=False)


def all_schemes() -> list[SchemeEntry]:
    """Load and return the entries of all registered schemes, in the order of their registration."""
    return _schemes.all(is_sorted=False)


def _scheme_of(name: str, found: object) -> SchemeEntry:
    if not isinstance(found, SchemeEntry):
        raise ConfigError(f"scheme={name} is not a scheme: make it a remuda.registry.SchemeEntry.")
    return found


# --- env backends ---------------------------------------------------------------------------------------------------


def register_env_backend(name: str, backend: object) -> EnvBackendEntry:
    """Register a library of native vector envs under `name`, and return its entry.

    `backend` is an object or a module with the members of `envs.backends.Backend`, or the import path of either:
    `package.module:name` for an object, `package.module` for a module.
    """
    return _env_backends.add(EnvBackendEntry(name, backend))


def find_env_backend(name: str) -> EnvBackendEntry:
    """Return the entry of an env backend, by its registered name or by the import path of the backend."""
    found = _env_backends.find(name)
    if found is not None:
        return found
    if ":" not in name:
        known = ("auto", "python", *env_backend_names())
        raise ConfigError(f"envs.backend={name!r} is not known: {nearest(name, known)}")
    return EnvBackendEntry(name, _imported(name, "envs.backend"))


def env_backend_names() -> list[str]:
    """Return the names of all registered env backends, in the order in which `envs.backend=auto` tries them."""
    return _env_backends.names(is_sorted=False)


def all_env_backends() -> list[EnvBackendEntry]:
    """Load and return all registered env backends, in the order in which `envs.backend=auto` tries them."""
    return _env_backends.all(is_sorted=False)


def _imported(path: str, option: str) -> Any:
    from remuda.envs.import_paths import import_named  # imported here, because import_paths imports Gymnasium

    return import_named(path, option)


_algorithms = Registry("algorithm", "remuda.algorithms", "register_algorithms", _algorithm_of)
_schemes = Registry("scheme", "remuda.schemes", "register_schemes", _scheme_of)
_env_backends = Registry("env backend", "remuda.env_backends", "register_env_backends", EnvBackendEntry)
