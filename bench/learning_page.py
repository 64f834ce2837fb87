"""Write docs/results.md and its plots from the records in docs/results (see bench/learning.py)."""

import json

import numpy as np
from learning_jobs import EPISODES, HOW_PRESETS_WERE_CHOSEN, JOBS, PEERS, RECORDS, ROOT, Job, Peer
from page_text import wrap_paragraphs

from remuda.runs.plots import plot_curves

IMAGES = ROOT / "docs" / "images"
COMPARED = RECORDS / "compared.json"  # results of comparisons, including runs whose curves were not kept
WINDOW = 20  # games; some goals compare the last games of a run with the first ones


def write_page() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    records = {job.name: read_records(job) for job in JOBS}
    for job in JOBS:
        curves = [record["curve"] for record in records[job.name].values() if record.get("curve")]
        if curves:
            drawn = [(np.array(curve["steps"]), np.array(curve["returns"])) for curve in curves]
            plot_curves({job.algo: drawn}, IMAGES / f"{job.name}.png", title=job.env)
    compared = json.loads(COMPARED.read_text())
    for peer in PEERS:
        theirs = read_records(peer)
        ours = complete(records[peer.job])
        with_curves = [record for record in ours.values() if record.get("curve")]
        if len(theirs) == len(with_curves) == len(peer.seeds):
            compared[peer.name] = compare(peer, ours, theirs)
            if peer.mark is not None:
                sides = {peer.job: ours, peer.name: theirs}
                times = {name: seconds_to(peer.mark, side) for name, side in sides.items()}
                compared[peer.name]["seconds_to_mark"] = times
    COMPARED.write_text(json.dumps(compared, indent=1) + "\n")
    (ROOT / "docs" / "results.md").write_text(page(records, compared))


def read_records(job: Job | Peer) -> dict[int, dict]:
    return {seed: json.loads(job.record(seed).read_text()) for seed in job.seeds if job.record(seed).exists()}


def complete(records: dict[int, dict]) -> dict[int, dict]:
    return {seed: record for seed, record in records.items() if record["status"] == "complete"}


def on_grid(records: dict[int, dict], grid: np.ndarray, along: str) -> np.ndarray:
    return np.stack([np.interp(grid, found["curve"][along], found["curve"]["returns"]) for found in records.values()])


def seconds_to(mark: float, records: dict[int, dict]) -> list[float | None]:
    """Return for each seed the seconds until its curve first reached the return `mark`, or None."""
    curves = [record["curve"] for record in records.values()]
    return [
        next((t for t, value in zip(curve["seconds"], curve["returns"], strict=True) if value >= mark), None)
        for curve in curves
    ]


def compare(peer: Peer, ours: dict[int, dict], theirs: dict[int, dict]) -> dict:
    """Plot bands from the lowest to the highest seed over steps and seconds, and return a comparison of the bands."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    both = {"Remuda": ours, "Stable-Baselines3": theirs}
    shortest = min(record["curve"]["seconds"][-1] for found in both.values() for record in found.values())
    grids = {
        "steps": np.linspace(peer.steps * 0.02, peer.steps * 0.98, 100),
        "seconds": np.linspace(0, shortest, 100),
    }
    for axes, (along, grid) in zip(figure.subplots(1, 2, sharey=True), grids.items(), strict=True):
        for (label, found), color in zip(both.items(), ("tab:blue", "tab:orange"), strict=True):
            y = on_grid(found, grid, along)
            axes.plot(grid, y.mean(0), color=color, label=f"{label}, mean of {len(y)} seeds")
            axes.fill_between(grid, y.min(0), y.max(0), color=color, alpha=0.2, lw=0, label="lowest to highest")
        axes.set(xlabel="environment steps" if along == "steps" else "seconds since the start")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    window = peer.settings.get("stats_window_size", 100)
    figure.axes[0].set(
        ylabel=f"mean return of the last {window} episodes", title=f"{peer.algo.upper()} on {peer.env}"
    )
    figure.savefig(IMAGES / f"{peer.name}.png", dpi=90)
    mine, their = (on_grid(found, grids["steps"], "steps") for found in (ours, theirs))
    meet = (mine.min(0) <= their.max(0)) & (their.min(0) <= mine.max(0))
    return {
        "share_of_run_where_bands_overlap": float(meet.mean()),
        "area_under_curve": {"remuda": float(mine.mean()), "sb3": float(their.mean())},
        "seconds": {
            "remuda": float(np.mean([60 * record["minutes"] for record in ours.values()])),
            "sb3": float(np.mean([record["seconds"] for record in theirs.values()])),
        },
        "final": {
            "remuda": [record["eval"]["mean_reward"] for record in ours.values()],
            "sb3": [float(np.mean(record["eval"])) for record in theirs.values()],
        },
    }


def page(records: dict[str, dict], compared: dict) -> str:
    lines = [
        "# Results",
        "",
        "```",
        "remuda train ppo --env LunarLander-v3 --steps 1_000_000 --seed 1      # one of the runs below",
        "```",
        "",
        "Every run uses the default preset, except for what its command sets. A return is the mean over",
        f"{EPISODES} greedy",
        "episodes of the final weights, with episode seeds fixed beforehand (`eval.seed`). `bench/learning.py",
        "run` trains",
        "what is missing, and `bench/learning.py report` writes this page from the records in [results/](results/).",
        "",
        "Times come from a shared machine with two cores and say little. Records of earlier versions are kept:",
        "random numbers",
        "have a domain for each purpose since then, so the same seed gives other numbers now.",
        "",
        "| algorithm | env | steps | goal | return by seed | mean |",
        "|---|---|---|---|---|---|",
        *(row(job, records[job.name]) for job in JOBS),
        "",
        "## How the presets were chosen",
        "",
        *HOW_PRESETS_WERE_CHOSEN,
        "",
        "## Curves and commands",
        "",
    ]
    for job in JOBS:
        lines += [f"### {job.name}", "", "```", *(job.command(seed) for seed in job.seeds), "```", ""]
        found = records[job.name]
        if not found:
            lines += ["Not run yet.", ""]
            continue
        minutes = ", ".join(f"{record['minutes']:.0f}" for record in found.values())
        lines += [
            f"Minutes by seed, including pauses and with other processes running: {minutes}.",
            *remarks(job, found),
        ]
        lines += ["", f"![{job.name}](images/{job.name}.png)", ""]
    lines += [
        "## Comparison with Stable-Baselines3",
        "",
        "Both libraries use the same settings, the same number of seeds and one thread (`bench/sb3_run.py` runs",
        "the other",
        "side). Do not compare the times of PPO: other work ran beside it, and runs were suspended at times.",
        "Both sides of SAC",
        "ran at the same time, each on its own core; tests shared the core of Remuda's seeds 1 and 2, and kept",
        "the other core",
        "busy for half of SB3's seed 3. [Speed](speed.md) has alternating measurements.",
        "",
        "| algorithm, env | bands of seeds overlap for | mean of the curve, Remuda / SB3 | final, Remuda | SB3 |",
        "|---|---|---|---|---|",
    ]
    for peer in (peer for peer in PEERS if peer.name in compared):
        found = compared[peer.name]
        area, final = found["area_under_curve"], found["final"]
        ours, theirs = (", ".join(f"{value:.1f}" for value in final[side]) for side in ("remuda", "sb3"))
        lines.append(
            f"| {peer.algo}, {peer.env} | {100 * found['share_of_run_where_bands_overlap']:.0f} % of the run "
            f"| {area['remuda']:.1f} / {area['sb3']:.1f} | {ours} | {theirs} |"
        )
    for peer in (peer for peer in PEERS if peer.name in compared):
        lines += ["", f"![{peer.name}](images/{peer.name}.png)"]
        if peer.mark is not None:
            lines += ["", *marks(peer, compared[peer.name]["seconds_to_mark"])]
    return wrap_paragraphs("\n".join(lines))


def marks(peer: Peer, times: dict[str, list[float | None]]) -> list[str]:
    window = peer.settings.get("stats_window_size", 100)
    lines = [
        f"Seconds until the mean return of the last {window} training episodes reached {peer.mark:,.0f}:",
        "",
        "| | by seed | mean |",
        "|---|---|---|",
    ]
    for name, seconds in times.items():
        shown = ", ".join("never" if t is None else f"{t:.0f}" for t in seconds)
        reached = [t for t in seconds if t is not None]
        mean = f"{np.mean(reached):.0f}" if len(reached) == len(seconds) else "-"
        lines.append(f"| {name} | {shown} | {mean} |")
    return lines


def row(job: Job, found: dict[int, dict]) -> str:
    means = [record["eval"]["mean_reward"] for record in complete(found).values()]
    by_seed = ", ".join(f"{value:.4g}" for value in means)
    by_seed += " (the other seeds are not run yet)" if 0 < len(means) < len(job.seeds) else ""
    name = f"{job.algo} `{' '.join(job.options)}`" if job.options else job.algo
    mean = f"**{np.mean(means):.4g}**" if means else "-"
    return "| " + " | ".join([name, job.env, f"{job.steps:,}", job.goal, by_seed or so_far(found), mean]) + " |"


def so_far(found: dict[int, dict]) -> str:
    """Return the last training returns of a job whose runs have not ended."""
    ends = [
        f"{record['curve']['returns'][-1]:.4g} in the last training episodes at {record['steps']:,.0f} steps"
        for record in found.values()
    ]
    return f"not finished: {'; '.join(ends)}" if ends else "not run yet"


def remarks(job: Job, found: dict[int, dict]) -> list[str]:
    """Return sentences on the first and last games, and on memory, for jobs whose curve is a mean over few games."""
    if f"--log.window {WINDOW}" not in job.options:
        return []
    lines = []
    for record in found.values():
        curve = record["curve"]
        first = next((i for i, games in enumerate(curve["episodes"]) if games >= WINDOW), -1)
        lines.append(
            f"Mean of the first {WINDOW} games {curve['returns'][first]:.1f} (at {curve['steps'][first]:,.0f} "
            f"steps), of the last {curve['returns'][-1]:.1f}."
        )
        if size := record.get("replay_bytes"):
            lines.append(f"The replay takes {size / 1e9:.2f} GB, {size / record['steps']:,.0f} bytes per step.")
        if record["peak_memory"]:
            lines.append(f"Peak memory of the process: {record['peak_memory'] / 1e9:.2f} GB.")
    return lines
