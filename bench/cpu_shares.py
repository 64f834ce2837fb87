"""Measure SAC with asynchronous samplers on all, half and a quarter of the machine's CPU time.

    sudo .venv/bin/python bench/cpu_shares.py --out docs/speed/cpu-shares.json      # Pendulum-v1 and Walker2d-v5

This repeats an ablation of Spreeze, which measures what part of their rates the learner and the samplers keep with
less CPU time. The contender `ring` of bench/replay_writers.py, whose samplers write directly to the replay, runs with
all its children in a control group (cgroup) with a quota of CPU time. The script needs root, and Linux with the cpu
controller of cgroups, version 1 or 2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remuda.bench.turns import Contender, give_out
from remuda.machine import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARES = (1.0, 0.5, 0.25)
PERIOD = 100_000  # microseconds; the quota is the CPU time in each such period
WRITERS = Path(__file__).with_name("replay_writers.py")


@contextmanager
def control_group(share: float) -> Iterator[Path]:
    """Create a cgroup that may use `share` of all cores, and yield the file to which process ids are written."""
    quota = int(share * usable_cores() * PERIOD)
    old = Path("/sys/fs/cgroup/cpu")
    group = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"remuda-{os.getpid()}-{share:g}"
    try:
        group.mkdir()
    except OSError as error:
        sys.exit(f"{group} cannot be made ({error.strerror}): control groups need root and the cpu controller.")
    try:
        if old.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        yield group / "cgroup.procs"
    finally:
        with suppress(OSError):
            group.rmdir()


def measure(env: str, batch: int, rounds: int, seconds: float) -> dict[str, Any]:
    words = [sys.executable, WRITERS, "--env", env, "--batch", batch, "--serve", "ring"]
    command = " ".join(map(str, words))
    found: dict[float, dict[str, list[float]]] = {share: {"updates": [], "sampled": []} for share in SHARES}
    for share in SHARES:  # one after the other, because a stopped contender still counts in its cgroup
        with control_group(share) as members:
            contender = Contender([["sh", "-c", f"echo $$ > {members} && exec {command}"]])
            try:
                for turn in range(rounds + 1):
                    (result,), _ = contender.slice(seconds)
                    if turn:  # the first turn is a warm-up
                        found[share]["updates"].append(result["updates"])
                        found[share]["sampled"].append(result["sampled"])
            finally:
                contender.close()
    return {
        f"{share:g}": {
            "updates_per_second": statistics.median(rates["updates"]),
            "update_frames_per_second": batch * statistics.median(rates["updates"]),
            "sampled_per_second": statistics.median(rates["sampled"]),
        }
        for share, rates in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=["Pendulum-v1", "Walker2d-v5"], help="ids of the envs")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a slice")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    shares = {env: measure(env, given.batch, given.rounds, given.seconds) for env in given.envs}
    give_out({"batch": given.batch, "cores": usable_cores(), "shares": shares}, given.out)


if __name__ == "__main__":
    main()
