"""`remuda train`: turn options into a configuration, run it, and print the result."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from remuda.cli.options import Parser, add_group, complete_with, given
from remuda.cli.train_help import add_help
from remuda.config.algo_base import AlgoOptions
from remuda.config.renamed import RENAMED
from remuda.config.run_config import KINDS, SETTINGS
from remuda.config.used_options import is_used_by
from remuda.errors import ConfigError
from remuda.registry import algorithm_names, all_algorithms, find_algorithm, scheme_names


def make_parser(command: str, argv: Sequence[str]) -> Parser:
    """Return the parser for `argv`.

    If the first argument names an algorithm, the group `algo` has only the options of this algorithm. Otherwise
    --config or --resume determines the algorithm, and the group `algo` has the options of all algorithms.
    """
    entries, names = all_algorithms(), algorithm_names()
    algo = argv[0] if argv and (argv[0] in names or ":" in argv[0]) else None
    own = find_algorithm(algo).options if algo else AlgoOptions
    kinds: list[type[AlgoOptions]] = [own] if algo else [AlgoOptions, *(entry.options for entry in entries)]
    parser = Parser(prog="remuda train", usage="remuda train ALGO --env ENV [OPTIONS]", add_help=False)
    run = parser.add_section("run", "what to train, and where the results go")
    complete_with(
        run.add_argument("algo", nargs="?", help=f"algorithm: {', '.join(names)}, or package.module:Class"), names
    )
    complete_with(run.add_argument("--env", help="Gymnasium id, package:Id or package.module:factory"), list_ids)
    run.add_argument(
        "--steps",
        metavar="N",
        help="number of env steps, over all envs; the rollout that reaches it is the last (default: by preset)",
    )
    run.add_argument("--seed", metavar="N", help="seed of all random numbers (default: 0)")
    schemes = scheme_names()
    scheme = run.add_argument("--scheme", metavar="NAME", help=f"{', '.join(schemes)} (default: serial)")
    complete_with(scheme, schemes)
    run.add_argument(
        "--device",
        metavar="NAME",
        help="device of the learner and of central inference: cpu, cuda, cuda:1, mps or auto (default: cpu)",
    )
    run.add_argument("--out", type=Path, metavar="DIR", help="run directory (default: runs/ALGO-ENV-SEED-TIME)")
    run.add_argument("--resume", type=Path, metavar="RUN", help="continue the run in this directory")
    run.add_argument(
        "--config", type=Path, metavar="FILE", help="read options from YAML, such as a run's config.yaml"
    )
    run.add_argument(
        "--profile",
        action="store_true",
        help="trace a few rounds of this process, or of rank 0, and write them to RUN/profile",
    )
    run.add_argument("--quiet", action="store_true", help="print the result only")

    def is_shown(kind: type, group: str, name: str) -> bool:
        return algo is None or is_used_by(own, kind, group, name)

    title = _title(own) if algo else "the algorithm; its options depend on ALGO"
    add_group(parser, "algo", title, *kinds, is_shown=partial(is_shown, own, "algo"))
    # Version 0.1 had these options; config/legacy.py converts them and logs a warning.
    for former in ("--algo.variant", "--scheme.device"):
        parser.add_argument(former, help=argparse.SUPPRESS)
    for other in entries:
        parser.elsewhere |= {f"--algo.{item.name}": f"{other.name}, not of {algo}" for item in fields(other.options)}
    for group, kind in KINDS.items():
        add_group(parser, group, _title(kind), kind, is_shown=partial(is_shown, kind, group))
        for old in RENAMED.get(group, ()):
            parser.add_argument(f"--{group}.{old}", nargs="?", const="true", help=argparse.SUPPRESS)
    add_help(parser, algo)
    return parser


def _title(kind: type) -> str:
    """Return the first line of a class's docstring as a title: without a period, and starting in lower case."""
    sentence = (kind.__doc__ or "").strip().splitlines()[0].rstrip(".")
    return sentence if sentence[:2].isupper() else sentence[:1].lower() + sentence[1:]


def list_ids() -> list[str]:
    """Return the ids of all registered envs. Calling this imports Gymnasium."""
    from remuda.envs.catalog import list_envs

    return [str(row[0]) for row in list_envs("")]


def run(command: str, argv: Sequence[str]) -> int:
    if argv and not argv[0].startswith("-"):
        find_algorithm(argv[0])  # so that an unknown algorithm is reported before unknown options
    found = make_parser(command, argv).parse(argv)

    # The imports are here so that --help and errors about misspelled options do not wait for torch.
    from remuda.config.resolve import resolve_config, resume_config
    from remuda.machine import keep_memory
    from remuda.runs.directory import RunDirectory
    from remuda.runs.train import exhaust, train

    settings = {name: getattr(found, name) for name in SETTINGS}
    settings = {name: value for name, value in settings.items() if value is not None}
    groups = {name: values for name, values in given(found, ("algo", *KINDS)).items() if values}
    if found.resume is not None:
        if found.config is not None or found.out is not None:
            raise ConfigError("--resume continues in the run's own directory: leave out --config and --out.")
        found.resume = RunDirectory.open(found.resume).path  # follow links now, because runs/latest may change
        setup = resume_config(found.resume, settings, groups)
    else:
        setup = resolve_config(settings, groups, found.config)
    keep_memory()
    resume = found.resume is not None
    training = train(*setup, out=found.resume or found.out, resume=resume, quiet=found.quiet, profile=found.profile)
    result = exhaust(training)
    evaluation, signal = result["eval"], result["signal"]
    if evaluation is not None:
        mean, std, count = evaluation["mean_reward"], evaluation["std_reward"], evaluation["episodes"]
        print(f"evaluation: mean return {mean:.2f} ± {std:.2f} over {count} greedy episodes")
    print(f"{result['status']}: {result['steps']:,} steps, {result['updates']:,} updates, "
          f"{result['steps_per_second']:,.0f} steps/s -> {result['path']}")  # fmt: skip
    return 128 + signal if signal is not None else 0
