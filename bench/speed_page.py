"""Write docs/speed.md, and the table of speeds in README.md, from the files in docs/speed.

.venv/bin/python bench/speed_page.py          # after `make bench`, which writes these files
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from page_text import with_interval, wrap_paragraphs
from speed_of_schemes import actor_learner, ranks_and_exchange, side_by_side, slow_env

from remuda.cli.bench import table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- speed: written by bench/speed_page.py -->", "<!-- end of speed -->"
HEAD = """\
# Speed

```
make peers && make bench          # hours; nothing else should run
remuda bench ppo --env CartPole-v1
# no-run: they measure for minutes and for hours
```

`bench/speed_page.py` writes this page from the files in [speed/](speed/), which `make bench` writes.

How to read it: all figures come from one virtual machine with two cores that other users share. Its speed drifts by a
factor of two within minutes. So contenders run in alternating slices, and the figures that count are ratios within a
round of slices, with their 95 % intervals, and CPU seconds. Absolute steps per second say little. The speed of envs
in worker processes is in [envs.md](envs.md#how-fast).

## Whole runs of PPO

`remuda bench ppo` gives every library the same settings (`remuda/bench/job.py`; the other side is in `bench/peers/`).
Only real steps are counted, and start-up and warm-up are left out.

- **Envs.** All libraries step Gymnasium's own envs in Python, except on Pong. There, `remuda` and the CleanRL-style
  loop step ale-py's vector env in C++, and Stable-Baselines3 steps its `AtariWrapper` envs in subprocesses. The
  second table of Pong compares these with our single envs in Python.
- **Processes.** Each library runs in the way that was fastest for it here: envs in its own process and one torch
  thread. Exceptions are Sample Factory (subprocesses) and Pong (two torch threads).
- **Differences that remain.** RLlib normalizes advantages over the rollout instead of each minibatch, and learns from
  one more minibatch per round. Sample Factory samples while it learns, so its policy lags, and it clips ratios at
  1 / (1 + c) from below. Tianshou recomputes values and log-probabilities after each rollout. A CleanRL-style loop
  treats truncation as termination. Stable-Baselines3 updates observation statistics at every step, Remuda once per
  rollout. Adam's constants, initial weights and the versions of Gymnasium and NumPy are those of each library.
"""
TABLES = {
    "ppo-cartpole": "CartPole-v1",
    "ppo-pong": "ALE/Pong-v5",
    "ppo-pong-single": "ALE/Pong-v5, single envs in Python",
    "ppo-halfcheetah": "HalfCheetah-v5",
}
UPDATES = {"update-cartpole": "CartPole-v1", "update-halfcheetah": "HalfCheetah-v5"}

PEERS = {
    "sb3": "Stable-Baselines3",
    "cleanrl": "CleanRL-style loop",
    "sample-factory": "Sample Factory",
    "tianshou": "Tianshou",
    "rllib": "RLlib",
}


def main() -> None:
    found = read_reports()
    (ROOT / "docs" / "speed.md").write_text(page(found))
    README.write_text(with_table(README.read_text(), readme_table(found)))


def read_reports() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs" / "speed").glob("*.json")}


def with_table(readme: str, table: str) -> str:
    """Return the README with the text between the markers BEGIN and END replaced by the table."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table}{END}{rest.split(END)[1]}"


def readme_table(found: dict[str, Any]) -> str:
    """Return a table that shows how many times as fast Remuda is as each library, with one row per task."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for name, title in (("ppo-cartpole", "CartPole-v1"), ("ppo-halfcheetah", "HalfCheetah-v5"), ("ppo-pong", "Pong")):
        contenders = found[name]["contenders"].items()
        ratios[f"PPO, {title}"] = {peer: [row["first_is_times"], *row["interval"]] for peer, row in contenders}
    for name, title in (("actor-learner", "IMPALA, Pong"), ("sac-end-to-end", "SAC, HalfCheetah-v5")):
        pairs = found[name]["ratios"].items()
        ratios[title] = {
            pair.removeprefix("remuda / ").removesuffix("-style"): ratio
            for pair, ratio in pairs
            if pair.startswith("remuda / ")
        }
    lines = [f"| Remuda is ... times as fast as | {' | '.join(PEERS.values())} |", "|---|" + "---|" * len(PEERS)]
    for title, row in ratios.items():
        cells = [
            f"**{row[peer][0]:.1f}** ({row[peer][1]:.1f}–{row[peer][2]:.1f})" if peer in row else "" for peer in PEERS
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    goal = found["time-to"]["CartPole-v1"]["seconds and steps"]
    ours, theirs = (statistics.median(turn[0] for turn in goal[side]) for side in ("ours", "zoo"))
    return (
        "\n".join(lines)
        + f"\n\nFrom the start of the process to a mean return of 475 on CartPole-v1: {ours:.1f} s, and "
        + f"{theirs:.1f} s for\n"
        + "Stable-Baselines3 with the settings of its zoo (medians of five seeds).\n"
    )


def page(found: dict[str, Any]) -> str:
    parts = [HEAD]
    for name, title in TABLES.items():
        job = found[name]
        steps = {turn["count"] for turns in job["slices"].values() for turn in turns}
        parts.append(f"### {title}\n\n{settings(job['env'])}; slices of {min(steps):,} steps or more.\n")
        parts.append(table(job) + "\n")
    parts.append(updates_of_ppo(found))
    parts.append(time_to(found["time-to"]))
    parts.append(checkpoints(found["checkpoints"]))
    parts.append(start_up(found["start-up"]))
    if "actor-learner" in found:
        parts.append(actor_learner(found["actor-learner"]))
    if "slow-env" in found:
        parts.append(slow_env(found["slow-env"]))
    parts += ranks_and_exchange(found)
    parts += side_by_side(found["side-by-side"]) if "side-by-side" in found else []
    parts.append(value_families(found))
    parts += samplers_beside(found)
    return wrap_paragraphs("\n".join(parts))


def updates_of_ppo(found: dict[str, Any]) -> str:
    """Return the section on updates with hand-written gradients, autograd and torch.compile."""
    parts = [
        "## Updates alone\n\n"
        "`remuda bench update` makes updates of PPO from the same minibatches, without sampling: with the "
        "hand-written gradients of `fast/` on one torch thread and on two, with autograd, and with "
        "`torch.compile`.\n"
    ]
    for name, title in UPDATES.items():
        if name in found:
            parts.append(f"### {title}\n\n{table(found[name])}\n")
    return "\n".join(parts)


def settings(env: str) -> str:
    from remuda.bench.job import complete

    job = complete(env, {})
    net = "Nature's convolutional net" if job["net"] == "nature" else "two 64x64 tanh nets"
    batches = f"{job['epochs']} epochs of {job['minibatches']} minibatches"
    return f"{job['envs']} envs x {job['n_steps']} steps, {batches}, {net}"


def time_to(report: dict[str, Any]) -> str:
    lines = [
        "## Wall-clock time to a good agent\n",
        "Seconds from the start of the process until the mean return of the last 20 training episodes reaches",
        "the goal.",
        "Remuda runs its preset, Stable-Baselines3 the settings of its zoo, with five seeds each, alternating",
        "(`bench/time_to.py`).\n",
        "| env | goal | Remuda: median (all seeds) | SB3's zoo | ratio of medians | env steps, medians |",
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
        f"A run with {turns[0]['parameters']:,.0f} parameters that writes one checkpoint every {seconds:.0f} "
        "seconds keeps\n"
        f"{rate} of the rate of a run that writes none. One checkpoint\n"
        f"a minute therefore costs {a_minute:.1f} % (at most {most:.1f} %) of the rate (`bench/checkpoints.py`).\n"
    )


def start_up(report: dict[str, list[float]]) -> str:
    first, helped = (
        f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} times)"
        for seconds in (report["first update"], report["help"])
    )
    return (
        "## Start-up\n\n"
        f"`remuda train` reaches its first update on CartPole-v1 with two workers after {first}.\n"
        f"`remuda --help` takes {helped} (`bench/start_up.py`).\n"
    )


def value_families(found: dict[str, Any]) -> str:
    """Return the section on algorithms with a replay: a table with rows for each report that exists."""
    lines = [
        "## Algorithms with a replay\n",
        "Ratios of rates: medians over rounds of slices, with 95 % intervals. `products` are only the matrix",
        "products of",
        "one SAC update, a lower bound of its cost (`bench/updates.py`, `bench/replay.py`, `bench/end_to_end.py`).\n",
        "| measured | compared with | Remuda is ... times as fast | CPU seconds each: Remuda; other |",
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
    """Return a paragraph that compares the rates of writing and reading a ring with those of dd."""

    def share(side: str, mine: str, other: str) -> str:
        pairs = zip(report[side][mine], report[side][other], strict=True)
        return f"{statistics.median(a / b for a, b in pairs):.2f}"

    write, read, same = report["write"], report["read"], "dd write, the ring's bytes"
    memory = max(*write["first: memory / ring"], *read["read: memory / ring"])
    bytes_again = statistics.median(write["second: bytes / what is new"])
    return (
        f"\nA checkpoint of a ring of {report['rows']:,} stacks of 84x84 frames, {write['bytes'] / 1e9:.1f} GB, "
        "compared with `dd`\n"
        f"(`bench/replay_checkpoint.py`, medians of {len(write['first'])} rounds):\n\n"
        "| | compared with | ratio of rates |\n|---|---|---|\n"
        f"| write | `dd conv=fsync` of zeros | {share('write', 'first', 'dd write, zeros')} |\n"
        f"| write | the same, of the ring's bytes | {share('write', 'first', same)} |\n"
        f"| write | the same, with `oflag=direct` | {share('write', 'first', f'{same}, direct')} |\n"
        f"| read | `dd` | {share('read', 'read', 'dd read')} |\n"
        "| read | `dd iflag=direct` to /dev/null, which stores nothing | "
        f"{share('read', 'read', 'dd read, direct')} |\n\n"
        f"A second checkpoint writes {bytes_again:.2f} times the bytes of the new rows. Peak memory is "
        f"{memory:.3f} times the\n"
        "size of the ring.\n"
    )


def samplers_beside(found: dict[str, Any]) -> list[str]:
    """Return the section on a learner whose replay is written by other processes."""
    lines: list[str] = []
    writers = [found[name] for name in ("replay-writers-256", "replay-writers-8192") if name in found]
    if writers:
        lines += [
            "Rows sampled and rows learned from per second, at the same time, by SAC with one learner thread and one",
            "sampler process (`bench/replay_writers.py`). In `alone` the learner runs without a sampler. In",
            "`aside` the",
            "sampler writes to memory that no process reads: the machine is as busy, but the learner receives",
            "nothing.",
            "In `ring` it writes into the replay, as under `--scheme async`. In `queue` it sends pickled rows",
            "through a",
            "pipe. The last column is the rate of updates relative to `aside`.\n",
            "| env, batch | rows go to | sampled/s | learned from/s | updates relative to `aside` |",
            "|---|---|---|---|---|",
        ]
    for report in writers:
        for kind, sampled in report["sampled_per_second"].items():
            learned = report["update_frames_per_second"][kind]
            kept = with_interval(*report["updates_kept_beside_aside"][kind])
            what = f"{report['env']}, {report['batch']:,}"
            rows = f"{sampled:,.0f}" if kind in ("ring", "queue") else "-"  # in the others, no rows arrive
            lines.append(f"| {what} | {kind} | {rows} | {learned:,.0f} | {kept} |")
    if (report := found.get("cpu-shares")) is not None:
        lines += [
            f"\nThe same with all, half and a quarter of the CPU time of {report['cores']} cores, batch",
            f"{report['batch']}",
            "(`bench/cpu_shares.py`).\n",
            "| env | share of the CPU | sampled/s | learned from/s |",
            "|---|---|---|---|",
        ]
        for env, shares in report["shares"].items():
            for share, each in shares.items():
                rates = f"{each['sampled_per_second']:,.0f} | {each['update_frames_per_second']:,.0f}"
                lines.append(f"| {env} | {100 * float(share):.0f} % | {rates} |")
    if (report := found.get("async-replay")) is not None:
        lines += [
            f"\nSAC on {report['env']} with batch {report['batch']}; the learner publishes weights every",
            f"{report['publish_every']} updates (`bench/async_replay.py`).\n",
            "| `replay.ratio` | rows learned from per step | median age of the sampler's weights, in publications |",
            "|---|---|---|",
        ]
        for each in report["ratios"]:
            ratio = "none" if each["ratio"] is None else f"{each['ratio']:g}"
            lines.append(f"| {ratio} | {each['measured']:.3f} | {each['median_age_in_intervals']:.2f} |")
        watched = report["evaluator"]
        lines.append(
            f"\nWith an evaluator that uses {watched['share']:g} of a core (`--eval.cpu_fraction`), training on "
            f"{report['watched']} keeps\n{with_interval(*watched['kept'])} of its rate."
        )
    if (report := found.get("time-to-3000")) is not None:
        lines += time_to_3000(report["HalfCheetah-v5"])
    return ["## A learner and samplers beside it\n", *lines, ""] if lines else []


def time_to_3000(report: dict[str, Any]) -> list[str]:
    seconds = {name: [turn[0] for turn in turns] for name, turns in report["seconds and steps"].items()}
    lines = [
        f"\n### SAC on HalfCheetah-v5: seconds to a return of {report['goal']:,.0f}\n",
        "Seconds from the start of the process until the mean return of the last 10 training episodes reaches",
        "the goal.",
        "Seeds alternate, and each run has the machine to itself (`bench/time_to.py --env HalfCheetah-v5`).\n",
        "| run | settings |",
        "|---|---|",
        (
            "| `serial`, `sb3` | our preset and Stable-Baselines3's defaults, which are equal: one update from 256 "
            "rows per step, learning rate 3e-4 |"
        ),
        (
            "| `async` | 32 steps per update from 64 rows, learning rate 1e-3; one learner thread, where all other "
            "runs use two |"
        ),
        "| `serial, same`, `sb3, same` | the settings of `async`, so that settings are not mistaken for schemes |",
        (
            "| `serial, 12 steps` | 12 steps per update from 128 rows, learning rate 1e-3: the fastest of three "
            "settings tried for one process |"
        ),
        "",
        "`serial` and `sb3` alternated with each other on another day than the rest. Settings were chosen on",
        "seeds 11 and",
        "12, with unequal effort: four settings in five runs for `async`, after others had only tied with",
        "`serial`; three",
        "settings in one run each for `serial`; none for SB3.\n",
        "| run | seconds: median (all seeds) | env steps, median | times as fast as `sb3` |",
        "|---|---|---|---|",
    ]
    for name, side in seconds.items():
        steps = statistics.median(turn[1] for turn in report["seconds and steps"][name])
        every = ", ".join(f"{each:.0f}" for each in side)
        times = statistics.median(seconds["sb3"]) / statistics.median(side)
        lines.append(f"| {name} | {statistics.median(side):.0f} ({every}) | {steps:,.0f} | {times:.2f} |")
    return lines


if __name__ == "__main__":
    main()
