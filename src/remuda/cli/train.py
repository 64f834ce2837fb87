"""`remuda train`: options to a configuration, the run, its last words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from remuda.cli.options import Parser, add_group, given
from remuda.config.algo_base import AlgoOptions
from remuda.config.run_config import KINDS
from remuda.errors import ConfigError
from remuda.registry import algorithm_names, all_algorithms, find_algorithm, scheme_names

DESCRIPTION = """\
Train an agent. Values that you do not set come from a preset for the algorithm and the env.

  remuda train ppo --env CartPole-v1 --steps 200_000 --seed 1
  remuda train ppo --env Pendulum-v1 --scheme parallel --algo.learning_rate 'linear(1e-3, 0)'
  remuda train ppo --env mypackage.envs:make --envs.kwargs '{"size": 8}' --agent.net mypackage.nets:Net
  remuda train --config runs/latest/config.yaml --seed 2      the same run with another seed
  remuda train --resume runs/latest                           go on where a run was stopped
"""


def make_parser(algo: str | None) -> Parser:
    # Without a name the algorithm is that of --config or --resume: every option of any may follow.
    entries = all_algorithms()
    kinds = [AlgoOptions, *(entry.options for entry in entries)] if algo is None else [find_algorithm(algo).options]
    parser = Parser(prog="remuda train", description=DESCRIPTION)
    parser.add_argument("algo", nargs="?", help=f"algorithm: {', '.join(algorithm_names())}, or package.module:Class")
    parser.add_argument("--env", help="Gymnasium id, package:Id, or package.module:factory")
    parser.add_argument(
        "--steps",
        help="real environment steps of the run, which ends with the rollout that reaches them (set by the preset)",
    )
    parser.add_argument("--seed", help="seed of everything random (0)")
    parser.add_argument("--scheme", help=f"how to run: {', '.join(scheme_names())} (serial)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory (runs/ALGO-ENV-SEED-TIME)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML settings, such as a run's config.yaml")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run")
    parser.add_argument("--profile", action="store_true", help="trace a few rounds into RUN/profile")
    parser.add_argument("--quiet", action="store_true", help="print only the result")
    add_group(parser, "algo", *kinds)
    for other in entries:
        parser.elsewhere |= {f"--algo.{item.name}": f"{other.name}, not of {algo}" for item in fields(other.options)}
    for group, kind in KINDS.items():
        add_group(parser, group, kind)
    return parser


def run(command: str, argv: Sequence[str]) -> int:
    words = [word for word in argv if not word.startswith("-")]
    algo = argv[0] if argv and argv[0] in words else None
    found = make_parser(algo).parse(argv)

    # Only now, so that --help and mistyped options answer at once.
    from remuda.config.resolve import resolve_config, resume_config
    from remuda.runs.directory import RunDirectory
    from remuda.runs.train import train

    settings = {name: getattr(found, name) for name in ("algo", "env", "steps", "seed", "scheme")}
    settings = {name: value for name, value in settings.items() if value is not None}
    groups = {name: values for name, values in given(found, ("algo", *KINDS)).items() if values}
    if found.resume is not None:
        if found.config is not None or found.out is not None:
            raise ConfigError("--resume goes on in the run's own directory: leave out --config and --out.")
        found.resume = RunDirectory.open(found.resume).path  # a link such as runs/latest may move meanwhile
        setup = resume_config(found.resume, settings, groups)
    else:
        setup = resolve_config(settings, groups, found.config)
    result = train(
        *setup,
        out=found.resume or found.out,
        resume=found.resume is not None,
        quiet=found.quiet,
        profile=found.profile,
    )
    evaluation, signal = result["eval"], result["signal"]
    if evaluation is not None:
        mean, std, count = evaluation["mean_reward"], evaluation["std_reward"], evaluation["episodes"]
        print(f"evaluation: mean return {mean:.2f} ± {std:.2f} over {count} greedy episodes")
    print(f"{result['status']}: {result['steps']:,} steps, {result['updates']:,} updates, "
          f"{result['steps_per_second']:,.0f} steps/s -> {result['path']}")  # fmt: skip
    return 128 + signal if signal is not None else 0
