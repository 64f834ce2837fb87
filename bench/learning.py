"""Train the runs of docs/results.md that are missing, keep a record of each, and write the page.

    .venv/bin/python bench/learning.py run                   # hours on two cores; resumable
    .venv/bin/python bench/learning.py run --only dqn-pong   # the jobs are in bench/learning_jobs.py
    .venv/bin/python bench/learning.py report                # docs/results.md and its plots, from docs/results

Runs are written to runs/results. Each leaves a record of some kilobytes in docs/results: its settings, its curve, and
the returns of 100 greedy episodes with the final weights, whose seeds are fixed beforehand by eval.seed. A run that
has a complete record is not repeated. The comparison with Stable-Baselines3 needs `make peers`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from learning_jobs import EPISODES, JOBS, PEERS, ROOT, RUNS, Job, Peer
from learning_page import write_page

from remuda.config.resolve import resolve_config
from remuda.config.run_config import to_dict

POINTS = 150  # largest number of points in the curve of a record
COLUMNS = {
    "steps": "time/total_timesteps",
    "returns": "rollout/ep_rew_mean",
    "episodes": "rollout/episodes",
    "seconds": "time/time_elapsed",
}


def run_all(only: list[str]) -> None:
    RUNS.mkdir(parents=True, exist_ok=True)
    for job in JOBS:
        for seed in job.seeds if not only or job.name in only else ():
            run_job(job, seed)
    for peer in PEERS:
        for seed in peer.seeds if not only or peer.name in only else ():
            run_peer(peer, seed)


def run_job(job: Job, seed: int) -> None:
    path = job.path(seed)
    if job.record(seed).exists() and json.loads(job.record(seed).read_text())["status"] == "complete":
        if changed := what_changed(job, seed, json.loads(job.record(seed).read_text()).get("options", {})):
            raise SystemExit(f"{job.record(seed)} is of another {changed}: remove it to run {job.name} anew.")
        return
    if (path / "config.yaml").exists() and (changed := what_changed(job, seed, options_of(path))):
        raise SystemExit(f"{path} was made with another {changed}: move it away to run {job.name} anew.")
    if (path / "checkpoints" / "latest").exists():
        arguments = ["--resume", str(path)]
    else:
        shutil.rmtree(path, ignore_errors=True)
        arguments = [*job.command(seed).split()[2:], "--out", str(path), "--eval.episodes", str(EPISODES)]
    print(f"{job.name} seed {seed}", flush=True)
    child = subprocess.Popen([sys.executable, "-m", "remuda", "train", *arguments, "--quiet"])
    try:
        _, status, used = os.wait4(child.pid, 0)
    except KeyboardInterrupt:
        child.wait(timeout=60)  # the child was interrupted too, and writes a checkpoint
        raise
    if status:
        raise SystemExit(f"{job.name} seed {seed} ended with status {os.waitstatus_to_exitcode(status)}")
    is_whole = arguments[0] != "--resume"  # after a resume, memory is known only for the last part
    keep(job, seed, used.ru_maxrss * 1024 if is_whole else None)


def options_of(path: Path) -> dict:
    """Return the groups of options that determine what a run learns."""
    options = yaml.safe_load((path / "config.yaml").read_text())["options"]
    return {group: options.get(group, {}) for group in ("algo", "replay", "sampler", "envs", "agent")}


def what_changed(job: Job, seed: int, options: dict) -> str:
    """Return the first option of a recorded run that its command would set differently now, or "" if none differs."""
    groups: dict[str, dict[str, str]] = {}
    short = {"algo": job.algo, "env": job.env, "steps": job.steps, "seed": seed}
    for name, value in (words.removeprefix("--").split(" ", 1) for words in job.options):
        group, _, field = name.partition(".")
        if field:
            groups.setdefault(group, {})[field] = value
        else:
            short[name] = value
    wanted = to_dict(resolve_config(short, groups)[0])["options"]
    for group, fields in options.items():
        for field, value in fields.items():
            now = plain(wanted[group].get(field, value))
            # `auto` may choose the recorded value, and 0 workers means one per core.
            if now not in (plain(value), "auto") and (field, now) != ("workers", "0.0"):
                return f"{group}.{field} ({value})"
    return ""


def plain(value: object) -> str:
    """Return a value as text in one form, because records hold some numbers as numbers and some as text."""
    try:
        return str(float(str(value)))
    except ValueError:
        return str(value).replace(" ", "")


def keep(job: Job, seed: int, memory: int | None = None) -> None:
    """Write the record of a run, whether or not the run has finished."""
    path = job.path(seed)
    found = json.loads((path / "result.json").read_text()) if (path / "result.json").exists() else {}
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line.get(COLUMNS["returns"]) is not None]
    lines = with_seconds_added_up(lines)
    chosen = thinned(lines)
    record = {
        "status": found.get("status", "running"),
        "steps": lines[-1][COLUMNS["steps"]],
        "updates": found.get("updates"),
        "minutes": round(lines[-1][COLUMNS["seconds"]] / 60, 1),
        "peak_memory": memory,
        "replay_bytes": sum(file.stat().st_size for file in (path / "checkpoints" / "replay").glob("*")),
        "options": options_of(path),
        "eval": found.get("eval"),
        "curve": {name: [round(line[column], 3) for line in chosen] for name, column in COLUMNS.items()},
    }
    write_record(job.record(seed), record)


def with_seconds_added_up(lines: list[dict]) -> list[dict]:
    """Return the lines with seconds accumulated over resumed parts of a run, each of which starts its clock at 0."""
    before, last, added = 0.0, 0.0, []
    for line in lines:
        seconds = line[COLUMNS["seconds"]]
        before, last = before + (last if seconds < last else 0.0), seconds
        added.append(line | {COLUMNS["seconds"]: before + seconds})
    return added


def thinned(values: list) -> list:
    """Return at most POINTS of the values, evenly spread and including the last."""
    step = -(-len(values) // POINTS)
    return values[::-1][::step][::-1]


def write_record(path: Path, record: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record) + "\n")


def run_peer(peer: Peer, seed: int) -> None:
    python = ROOT / ".venv-sb3" / "bin" / "python"
    if peer.record(seed).exists():
        if json.loads(peer.record(seed).read_text())["settings"] != peer.settings:
            raise SystemExit(f"{peer.record(seed)} is of other settings: remove it to run {peer.name} anew.")
        return
    if not python.exists():
        print(f"{peer.name}: no .venv-sb3, run `make peers` first", flush=True)
        return
    print(f"{peer.name} seed {seed}", flush=True)
    out = RUNS / f"{peer.name}-{seed}.json"
    settings = json.dumps(peer.settings)
    command = [python, ROOT / "bench" / "sb3_run.py", "--env", peer.env, "--seed", seed, "--steps", peer.steps]
    command += ["--algo", peer.algo, "--envs", peer.envs, "--settings", settings, "--out", out]
    subprocess.run([str(word) for word in command], check=True)
    found = json.loads(out.read_text())
    points = thinned(list(zip(found["steps"], found["returns"], found["seconds_at"], strict=True)))
    steps, returns, seconds = (list(column) for column in zip(*points, strict=True))
    curve = {"steps": steps, "returns": returns, "seconds": seconds}
    write_record(
        peer.record(seed),
        {"settings": found["settings"], "eval": found["eval"], "seconds": found["seconds"], "curve": curve},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "keep", "report"), help="keep: write the records of existing runs")
    parser.add_argument("--only", nargs="*", default=[], metavar="JOB", help="only these jobs")
    given = parser.parse_args()
    if given.what == "run":
        run_all(given.only)
    elif given.what == "keep":
        for job in JOBS:
            for seed in job.seeds:
                if (job.path(seed) / "metrics.jsonl").exists() and (not given.only or job.name in given.only):
                    keep(job, seed)
    else:
        write_page()
