"""What the runners of other libraries share: the job, the clock and the result.

Every script is run as `.venv-X/bin/python bench/peers/X.py --job JOB.json --out OUT.json`. Its two further options
try another configuration than the one taken for the fastest, so that the choice can be checked.
"""

import argparse
import json
import sys
import time

import psutil

ATARI = "ALE/Pong-v5"  # of impala_*.py: 84x84, four frames stacked and skipped, no sticky actions
WARM_UP = 1_000  # steps that they learn from before the first slice


def arguments(doc, places=("this process",)):
    """The parsed command line and the job."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", required=True, help="JSON file with the settings")
    parser.add_argument("--out", required=True, help="JSON file for the result")
    parser.add_argument("--envs-in", choices=places, help="where environments live; default: what is fastest")
    parser.add_argument("--threads", type=int, help="threads of torch; default: what is fastest")
    given = parser.parse_args()
    with open(given.job) as file:
        return given, json.load(file)


def refuse(job, **supported):
    """Stop at settings that a script does not implement, rather than measure something else."""
    for name, values in supported.items():
        if job[name] not in values:
            raise SystemExit(f"{name} = {job[name]!r}: this script only does {values}")


def cpu_seconds():
    """User and system time of this process and all its descendants.

    A child that ended moves into its parent's children_* times once it is waited for, so the sum never falls.
    """
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Meter:
    """Counts rounds (rollout + update): first those of the warm-up, then those that are timed.

    Call `round_ended` with the steps done so far, first with 0 before the first round; it says when to stop.
    """

    def __init__(self, job):
        self.warm_up, self.wanted = job["warm_up"], job["steps"]
        self.start = None
        self.steps = self.seconds = self.cpu = None

    def round_ended(self, steps):
        if self.steps is not None:
            return True
        if self.start is None:
            if steps >= self.warm_up:
                self.start = (steps, time.perf_counter(), cpu_seconds())
            return False
        if steps - self.start[0] < self.wanted:
            return False
        self.seconds = time.perf_counter() - self.start[1]  # before the slower walk through the processes
        self.cpu = cpu_seconds() - self.start[2]
        self.steps = steps - self.start[0]
        return True


def write(given, meter, library, version, envs_in, notes):
    result = {
        "library": library,
        "version": version,
        "steps": int(meter.steps),
        "seconds": meter.seconds,
        "cpu_seconds": meter.cpu,
        "envs_in": envs_in,
        "note": "; ".join(notes),
    }
    with open(given.out, "w") as file:
        json.dump(result, file, indent=1)
    print(
        f"{library} {version}: {meter.steps / meter.seconds:.0f} steps/s, {meter.cpu:.1f} s of CPU, {result['note']}"
    )


class Turns:
    """Slices of a library that has the loop itself; speaks as `remuda.bench.turns.serve` does, from inside a run.

    Call `round_ended` with the steps so far after every update: where a slice is over it answers and waits for the
    next one, whose length is a line on stdin. It says when to stop.
    """

    def __init__(self, warm_up, about):
        self.warm_up, self.about = warm_up, about
        self.begin = self.end = 0.0
        self.before = None

    def round_ended(self, steps):
        now = time.perf_counter()
        if now < self.end or steps < self.warm_up:
            return False
        if self.before is None:
            print("ready", flush=True)
        else:
            answer = {"steps": int(steps - self.before), "seconds": now - self.begin, **self.about}
            print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        self.before, self.begin = steps, time.perf_counter()
        self.end = self.begin + float(line or 0)
        return not line
