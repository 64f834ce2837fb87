"""The sections of docs/speed.md about schemes with several processes, for bench/speed_page.py."""

from __future__ import annotations

import statistics
from typing import Any

from page_text import with_interval


def actor_learner(report: dict[str, Any]) -> str:
    lines = [
        "## Actors and learners\n",
        f"Whole training on {report['env']} with the Nature net on {report['cores']} cores; every step is",
        "learned from once.",
        "`remuda` is IMPALA under `async`. The others are A2C of Stable-Baselines3, APPO of Sample Factory and",
        "IMPALA of",
        "RLlib, with their own wrappers around single games, each in the first of the ways that the script lists.",
        f"Medians of {report['rounds']} slices of {report['seconds']:g} seconds (`bench/actor_learner.py`).\n",
        "| | env steps/s | CPU ms per step | remuda is ... times as fast (95 % interval) | setup |",
        "|---|---|---|---|---|",
    ]
    for name, each in report["contenders"].items():
        ratio = report["ratios"].get(f"remuda / {name}")
        cells = [name, f"{each['steps_per_second']:,.0f}", f"{1000 * each['cpu_seconds_per_step']:.2f}"]
        cells += [with_interval(*ratio) if ratio else "", f"{each['note']}; steps {each['counts']}"]
        lines.append(f"| {' | '.join(cells)} |")
    alone, crowded = report["limit"].values()
    costs = ", ".join(f"{1000 * cost:.2f} for {part}" for part, cost in alone["cpu_seconds_per_step"].items())
    shares = [with_interval(*each["shares"]["remuda"]) for each in (alone, crowded)]
    return (
        "\n".join(lines) + f"\n\nEach part alone on one core costs these CPU milliseconds per step: {costs}.\n"
        f"At that cost all cores together allow {alone['steps_per_second']:,.0f} steps/s; `remuda` reaches "
        f"{shares[0]} of it.\n"
        f"With the parts running on all cores at once the limit is {crowded['steps_per_second']:,.0f} steps/s, "
        "and `remuda`\n"
        f"reaches {shares[1]} of it.\n"
    )


def slow_env(report: dict[str, Any]) -> str:
    shares = [f"{with_interval(*each['share'])} with `{where}`" for where, each in report["acting"].items()]
    return (
        f"A slow env does not slow the others: {report['envs']} envs run in a worker each, and one of them is "
        f"{report['slower']} times as\n"
        f"slow. The others keep these shares of their rate, by `sampler.inference`:\n"
        f"{', '.join(shares)} (`bench/slow_env.py`).\n"
    )


def ranks_and_exchange(found: dict[str, Any]) -> list[str]:
    """Return the section on the scheme `replicas`, if its reports exist."""
    lines = []
    if (report := found.get("exchange")) is not None:
        lines += [
            "### Exchanging gradients\n",
            f"Milliseconds in which {report['ranks']} ranks on this machine add vectors of",
            f"{report['parameters']:,} numbers, copying included (`bench/exchange.py`). `gloo all-reduce` does not",
            "add in the order of the ranks; shared memory is the default on one host.\n",
            "| way | ms (95 % interval) | CPU ms of a rank |",
            "|---|---|---|",
        ]
        for name, each in report["milliseconds"].items():
            lines.append(f"| {name} | {with_interval(*each)} | {report['cpu_milliseconds'][name]:.1f} |")
        lines.append("")
    if (report := found.get("ranks")) is not None:
        lines += [
            "### Slow envs\n",
            f"PPO with one env per rank that sleeps {1000 * report['env_seconds']:g} ms per step, so that two cores",
            "are enough for all ranks (`bench/ranks.py`). The share is the rate relative to that many times the",
            "rate of one rank.\n",
            "| ranks | steps/s, median | share of linear (95 % interval) |",
            "|---|---|---|",
        ]
        for index, ranks in enumerate(report["ranks"]):
            rate = statistics.median(turn[index] for turn in report["rates"])
            lines.append(f"| {ranks} | {rate:,.0f} | {with_interval(*report['share'][str(ranks)])} |")
        lines.append("")
    return ["## Replicas\n", *lines] if lines else []


def side_by_side(report: dict[str, Any]) -> list[str]:
    """Return the section on SAC's actor and critics in two threads."""
    lines = [
        "## Actor and critics side by side\n",
        "Updates of SAC with the sizes of HalfCheetah on two cores (`bench/side_by_side.py`). `in turn` computes one",
        "after the other. The ratio is relative to `in turn, 2 threads` with gradients of the same kind.\n",
        "| batch | way | updates/s | CPU ms per update | ratio (95 % interval) |",
        "|---|---|---|---|---|",
    ]
    for each in report["batches"]:
        for name, rate in each["updates_per_second"].items():
            cpu, ratio = 1000 * each["cpu_seconds_per_update"][name], with_interval(*each["ratios"][name])
            lines.append(f"| {each['batch']:,} | {name} | {rate:,.1f} | {cpu:.1f} | {ratio} |")
    return [*lines, ""]
