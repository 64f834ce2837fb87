"""What the runners of SAC share: the settings, and slices that are answered with steps, seconds and updates.

A runner is started by `bench/end_to_end.py` in the library's own interpreter. By hand, for a slice of two seconds:

    echo 2 | .venv-sb3/bin/python bench/peers/sac_sb3.py --threads 1
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

ENV = "HalfCheetah-v5"
BATCH, HIDDEN, RATE, TAU, GAMMA = 256, (256, 256), 3e-4, 0.005, 0.99
REPLAY = 1_000_000  # rows that it could hold
RANDOM = 1_000  # steps with random actions before the first update
WARM_UP = 100  # steps after these, each with its update, that are not timed either
CHUNK = 4  # steps between two looks at the clock


def arguments(doc, *flags):
    """The parsed command line; each flag has a name and says what it does."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    for name, what in flags:
        parser.add_argument(name, action="store_true", help=what)
    return parser.parse_args()


def require_mujoco():
    """Environments that were made before it was asked for lack it."""
    if importlib.util.find_spec("mujoco") is None:
        print("cannot: there is no MuJoCo here: run make peers.", flush=True)
        raise SystemExit(1)


def count_updates(optimizers):
    """How often torch's Adams have stepped, of which each keeps count itself; all must have done so equally often."""
    counts = {int(each.state[each.param_groups[0]["params"][0]]["step"]) for each in optimizers}
    if len(counts) > 1:
        raise SystemExit(f"not every optimizer stepped as often as the others: {sorted(counts)}")
    return counts.pop()


def take_turns(run, count_steps, optimizers, note):
    """Slices of so many seconds; `run(n)` does n env steps, each with its update."""
    sys.path.append(str(ROOT / "src"))  # remuda is not installed here, and this much of it needs numpy alone
    from remuda.bench.turns import serve

    def take(seconds):
        steps, updates = count_steps(), count_updates(optimizers)
        begin = now = time.perf_counter()
        while now < begin + seconds:
            run(CHUNK)
            now = time.perf_counter()
        return {
            "steps": count_steps() - steps,
            "seconds": now - begin,
            "updates": count_updates(optimizers) - updates,
            "note": note,
        }

    serve(take)
