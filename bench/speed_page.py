"""Write docs/speed.md from the results of `make bench`.

.venv/bin/python bench/speed_page.py          # reads the JSON files in docs/speed
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from remuda.cli.bench import table

ROOT = Path(__file__).parents[1]
HEAD = """\
# How fast

This page is written by `bench/speed_page.py` from the files in [speed/](speed/), which `make peers` and `make bench`
made. All of it was measured on a virtual machine of two cores that others were using too: its speed drifts by a
factor of two within minutes, so contenders take turns and what counts are ratios within a turn and CPU seconds; steps
per second say little. Envs in workers: [envs.md](envs.md#how-fast).

## Whole runs of PPO

Equal settings, only real steps counted, start-up and warm-up left out (`remuda bench ppo`; `remuda/bench/job.py` has
the settings, `bench/peers/` the other side). Envs are Gymnasium's own, in Python, for all; but on Pong `remuda` and
the CleanRL-style loop step ale-py's vector env in C++, and Stable-Baselines3 its `AtariWrapper`s in subprocesses,
which is what the second table compares with our single envs in Python. Others are run in the way that was fastest for
them here: envs in their own process and one thread of torch, but for Sample Factory (subprocesses) and Pong (two
threads of torch). What could not be made equal: RLlib normalises advantages over the rollout and not each minibatch,
and learns one minibatch more in each round; Sample Factory samples while it learns, so that its policy lags behind,
and clips ratios to 1 / (1 + c) below; Tianshou computes values and log-probabilities after each rollout once more; a
CleanRL-style loop takes truncation for termination; Stable-Baselines3 moves statistics of observations with every
step and we with every rollout; constants of Adam, initial weights and versions of Gymnasium and numpy are those of
each library.
"""
TABLES = {
    "ppo-cartpole": "CartPole-v1",
    "ppo-pong": "ALE/Pong-v5",
    "ppo-pong-single": "ALE/Pong-v5, single envs in Python",
    "ppo-halfcheetah": "HalfCheetah-v5",
}


def main() -> None:
    found: dict[str, Any] = {
        path.stem: json.loads(path.read_text()) for path in (ROOT / "docs" / "speed").glob("*.json")
    }
    parts = [HEAD]
    for name, title in TABLES.items():
        job = found[name]
        steps = {turn["count"] for turns in job["slices"].values() for turn in turns}
        parts.append(f"### {title}\n\n{settings(job['env'])}; slices of {min(steps):,} steps or more.\n")
        parts.append(table(job) + "\n")
    parts.append(time_to(found["time-to"]))
    parts.append(checkpoints(found["checkpoints"]))
    parts.append(start_up(found["start-up"]))
    if "actor-learner" in found:
        parts.append(actor_learner(found["actor-learner"]))
    if "slow-env" in found:
        parts.append(slow_env(found["slow-env"]))
    parts.append(value_families(found))
    parts += samplers_beside(found)
    (ROOT / "docs" / "speed.md").write_text("\n".join(parts))


def settings(env: str) -> str:
    from remuda.bench.job import complete

    job = complete(env, {})
    net = "Nature's convolutional net" if job["net"] == "nature" else "two 64x64 tanh nets"
    batches = f"{job['epochs']} epochs of {job['minibatches']} minibatches"
    return f"{job['envs']} envs x {job['n_steps']} steps, {batches}, {net}"


def time_to(report: dict[str, Any]) -> str:
    lines = [
        "## Wall-clock time to a good agent\n",
        "From the start of the process to a mean of the goal over the last 20 training episodes: our preset against",
        "Stable-Baselines3 with the settings of its zoo, five seeds in turns (`bench/time_to.py`).\n",
        "| | goal | ours, seconds: median (all) | SB3's zoo | ratio of medians | env steps, medians |",
        "|---|---|---|---|---|---|",
    ]
    for env, row in report.items():
        sides = {name: [turn[0] for turn in turns] for name, turns in row["seconds and steps"].items()}
        steps = [statistics.median(turn[1] for turn in turns) for turns in row["seconds and steps"].values()]
        shown = [
            f"{statistics.median(side):.1f} ({', '.join(f'{second:.1f}' for second in side)})"
            for side in sides.values()
        ]
        ratio = statistics.median(sides["zoo"]) / statistics.median(sides["ours"])
        cells = [env, f"{row['goal']:g}", *shown, f"{ratio:.2f}", f"{steps[0]:,.0f}; {steps[1]:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def checkpoints(report: dict[str, Any]) -> str:
    middle, low, high = report["ratio"]
    turns = report["slices"]["one"]
    seconds = statistics.median(turn["seconds"] for turn in turns)
    rate = f"{middle:.3f} (95 % interval {low:.3f} to {high:.3f}, {len(turns)} turns)"
    a_minute, most = (100 * (1 - ratio) * seconds / 60 for ratio in (middle, low))
    return (
        "## Checkpoints\n\n"
        f"A run with {turns[0]['parameters']:,.0f} parameters that writes one checkpoint in {seconds:.0f} seconds\n"
        f"has {rate} of the rate of one that writes none: with one a minute\n"
        f"it loses {a_minute:.1f} % (at most {most:.1f} %) of its rate (`bench/checkpoints.py`).\n"
    )


def start_up(report: dict[str, list[float]]) -> str:
    first, helped = (
        f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} times)"
        for seconds in (report["first update"], report["help"])
    )
    return (
        "## Start-up\n\n"
        f"`remuda train` to the first update on CartPole-v1 with two workers: {first};\n"
        f"`remuda --help`: {helped} (`bench/start_up.py`).\n"
    )


def actor_learner(report: dict[str, Any]) -> str:
    lines = [
        "## Actors and learners\n",
        f"Whole training on {report['env']} with Nature's net, each step learned from once, {report['cores']} cores;",
        "others are run in the first of the ways that `bench/actor_learner.py` lists, with their own wrappers around",
        "single games.",
        f"Medians of {report['rounds']} turns of {report['seconds']:g} seconds (`bench/actor_learner.py`).\n",
        "| | env steps/s | CPU ms per step | remuda is ... times as fast (95 % interval) | how |",
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
        "\n".join(lines) + f"\n\nA step's CPU milliseconds if nothing else were done, on one core: {costs}.\n"
        f"All cores would allow {alone['steps_per_second']:,.0f} steps/s, of which `remuda` reaches {shares[0]};\n"
        f"with all cores at it at once {crowded['steps_per_second']:,.0f}, of which it reaches {shares[1]}.\n"
    )


def slow_env(report: dict[str, Any]) -> str:
    shares = [f"{with_interval(*each['share'])} with act={act}" for act, each in report["acting"].items()]
    return (
        f"Of {report['envs']} envs, each in a worker of its own, one is {report['slower']} times as slow: the rest\n"
        f"keep {' and '.join(shares)} of the rate that they have\nwithout it (`bench/slow_env.py`).\n"
    )


def value_families(found: dict[str, Any]) -> str:
    """Return the section with one row for each measurement."""
    lines = [
        "## Algorithms with a replay\n",
        "Ratios of rates, medians of turns with 95 % intervals. `products` are the matrix products of an update",
        "of SAC and nothing else (`bench/updates.py`, `bench/replay.py`, `bench/end_to_end.py`).\n",
        "| what | beside | ratio | CPU seconds of each, ours; theirs |",
        "|---|---|---|---|",
    ]
    updates = {name: report for name, report in sorted(found.items()) if "cpu_seconds_per_update" in report}
    for report in updates.values():
        what = f"update of {report['algo'].upper()}, batch {report['batch']:,}, {report['threads']} threads"
        for other, ratio in report["ratios"].items():
            peer = other.removeprefix("remuda / ")
            cpu = report["cpu_seconds_per_update"]
            lines.append(f"| {what} | {peer} | {with_interval(*ratio)} | {cpu['remuda']:.2g}; {cpu[peer]:.2g} |")
    for kind, figure in found.get("replay", {"figures": {}})["figures"].items():
        wall, medians = figure["wall"], figure["cpu"]["medians"]
        peer = next(name for name in medians if name != "ours")
        cpu = f"{1e-6 * medians['ours']:.2g}; {1e-6 * medians[peer]:.2g}"
        lines.append(f"| replay, {kind} | {peer} | {with_interval(wall['ratio'], *wall['interval'])} | {cpu} |")
    if (whole := found.get("sac-end-to-end")) is not None:
        each = {name: contender["cpu_seconds_per_step"] for name, contender in whole["contenders"].items()}
        for other, ratio in whole["ratios"].items():
            peer = other.removeprefix("remuda / ")
            cpu = f"{each['remuda']:.2g}; {each[peer]:.2g}" if peer in each else "-"
            what = f"step and update of SAC on {whole['env']}, {whole['threads']} threads"
            lines.append(f"| {what} | {peer} | {with_interval(*ratio)} | {cpu} |")
    return (
        "\n".join(lines)
        + "\n"
        + (replay_checkpoint(found["replay-checkpoint"]) if "replay-checkpoint" in found else "")
    )


def replay_checkpoint(report: dict[str, Any]) -> str:
    """Return the section with rates relative to those of dd in the same turn."""

    def share(side: str, mine: str, other: str) -> str:
        pairs = zip(report[side][mine], report[side][other], strict=True)
        return f"{statistics.median(a / b for a, b in pairs):.2f}"

    write, read, same = report["write"], report["read"], "dd write, the ring's bytes"
    memory = max(*write["first: memory / ring"], *read["read: memory / ring"])
    bytes_again = statistics.median(write["second: bytes / what is new"])
    return (
        f"\nA ring of {report['rows']:,} stacks of 84x84 frames, {write['bytes'] / 1e9:.1f} GB, in a checkpoint and\n"
        f"back (`bench/replay_checkpoint.py`, medians of {len(write['first'])} turns): written at\n"
        f"{share('write', 'first', 'dd write, zeros')} of the rate of `dd conv=fsync` of zeros, "
        f"{share('write', 'first', same)} of the same bytes,\n"
        f"{share('write', 'first', f'{same}, direct')} with `oflag=direct`; "
        f"read at {share('read', 'read', 'dd read')} of plain `dd`,\n"
        f"{share('read', 'read', 'dd read, direct')} with `iflag=direct` to /dev/null, which keeps nothing. "
        f"A second checkpoint wrote {bytes_again:.2f} of the\n"
        f"bytes of what was new. Memory was at most {memory:.3f} of the ring.\n"
    )


def samplers_beside(found: dict[str, Any]) -> list[str]:
    """Return the section about a learner and samplers that write to its replay."""
    lines: list[str] = []
    feeds = [found[name] for name in ("feed-256", "feed-8192") if name in found]
    if feeds:
        lines += [
            "Rows sampled and rows learned from in a second, at once: SAC, a learner with one thread and a sampler.",
            "`aside`: samplers write to memory that nobody reads, so that the machine is as busy and nothing is",
            "received; `ring`: straight into the replay, as `--scheme async` does; `queue`: pickled, through a pipe.",
            "What the learner keeps is beside `aside` (`bench/replay_writers.py`).\n",
            "| env, batch | how | sampled/s | learned from/s | updates that the learner keeps |",
            "|---|---|---|---|---|",
        ]
    for report in feeds:
        for kind, sampled in report["sampled_per_second"].items():
            learned = report["update_frames_per_second"][kind]
            kept = with_interval(*report["updates_kept_beside_aside"][kind])
            what = f"{report['env']}, {report['batch']:,}"
            rows = (
                f"{sampled:,.0f}" if kind in ("ring", "queue") else "-"
            )  # rows that are not received are not counted
            lines.append(f"| {what} | {kind} | {rows} | {learned:,.0f} | {kept} |")
    if (report := found.get("cpu-shares")) is not None:
        lines += [
            f"\nThe same with all, half and a quarter of {report['cores']} cores (batch {report['batch']},",
            "`bench/cpu_shares.py`).\n",
            "| env | share of the CPU | sampled/s | learned from/s |",
            "|---|---|---|---|",
        ]
        for env, shares in report["shares"].items():
            for share, each in shares.items():
                rates = f"{each['sampled_per_second']:,.0f} | {each['update_frames_per_second']:,.0f}"
                lines.append(f"| {env} | {100 * float(share):.0f} % | {rates} |")
    if (report := found.get("async-replay")) is not None:
        lines += [
            f"\nSAC on {report['env']}, batch {report['batch']}, weights published after every",
            f"{report['publish_every']} updates (`bench/async_replay.py`).\n",
            "| `replay.ratio` | rows learned from for every step | median age of acting weights, in publications |",
            "|---|---|---|",
        ]
        for each in report["ratios"]:
            ratio = "none" if each["ratio"] is None else f"{each['ratio']:g}"
            lines.append(f"| {ratio} | {each['measured']:.3f} | {each['median_age_in_intervals']:.2f} |")
        watched = report["evaluator"]
        lines.append(
            f"\nWith an evaluator that may take {watched['share']:g} of a core (`--eval.cpu_fraction`) training on "
            f"{report['watched']} keeps\n{with_interval(*watched['kept'])} of its rate."
        )
    if (report := found.get("time-to-3000")) is not None:
        lines += time_to_3000(report["HalfCheetah-v5"])
    return ["## A learner and samplers beside it\n", *lines, ""] if lines else []


def time_to_3000(report: dict[str, Any]) -> list[str]:
    seconds = {name: [turn[0] for turn in turns] for name, turns in report["seconds and steps"].items()}
    lines = [
        f"\nSeconds from the start of the process until SAC has a mean of {report['goal']:,.0f} over its last 10",
        "training episodes on HalfCheetah-v5; seeds in turns, each run with the machine to itself",
        "(`bench/time_to.py --env HalfCheetah-v5`). `serial` and `sb3` are our preset and Stable-Baselines3's own",
        "settings, which are the same: an update from 256 rows after every step, a learning rate of 3e-4. A sampler",
        "beside the learner has time for many more steps, which bear smaller batches and a rate of 1e-3: `async` has",
        "32 steps for every update from 64 rows. So that settings are not mistaken for schemes, `serial, same` and",
        "`sb3, same` have those of `async`, and `serial, 12 steps` has what was the quickest of three that were",
        "tried for one process: 12 steps for every update from 128 rows, with 1e-3. The learner of `async` has one",
        "thread of torch, all others have two. `serial` and `sb3` took turns with each other on another day than",
        "the rest. Settings were chosen on seeds 11 and 12, not evenly: for `async` four were tried in five runs,",
        "after others had only tied with `serial`; for `serial` three, in a run each; for SB3 none.\n",
        "| | seconds: median (all seeds) | env steps, median | SB3's seconds over its own |",
        "|---|---|---|---|",
    ]
    for name, side in seconds.items():
        steps = statistics.median(turn[1] for turn in report["seconds and steps"][name])
        every = ", ".join(f"{each:.0f}" for each in side)
        times = statistics.median(seconds["sb3"]) / statistics.median(side)
        lines.append(f"| {name} | {statistics.median(side):.0f} ({every}) | {steps:,.0f} | {times:.2f} |")
    return lines


def with_interval(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
