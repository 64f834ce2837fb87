"""Env steps per second of PPO on CartPole, whole runs: serial, parallel and, after `make peers`, Stable-Baselines3.

    make bench                       # or: .venv/bin/python bench/throughput.py --slices 5 --steps 40000

Slices alternate, because the machine's speed drifts; the median ratio to `serial` is what counts. Same settings for
all: 8 envs x 128 steps, 4 epochs x 4 minibatches, two 64x64 tanh nets, one thread. Start-up is left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "n_steps": 128,
    "batch_size": 256,
    "n_epochs": 4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "learning_rate": 3e-4,
}


def ours(scheme: str, steps: int, directory: Path) -> float:
    words = [sys.executable, "-m", "remuda", "train", "ppo", "--env", "CartPole-v1", "--scheme", scheme, "--quiet"]
    words += ["--steps", str(steps), "--out", str(directory / "run"), "--eval.episodes", "0", "--sampler.envs", "8"]
    words += [part for name, value in SETTINGS.items() for part in (f"--algo.{name}", str(value))]
    words += ["--algo.clip_range", "0.2", "--checkpoint.every", "0"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return json.loads((directory / "run" / "result.json").read_text())["steps_per_second"]


def sb3(steps: int, directory: Path) -> float:
    words = [ROOT / ".venv-sb3/bin/python", ROOT / "bench/sb3_run.py", "--env", "CartPole-v1", "--seed", 1]
    words += ["--steps", steps, "--settings", json.dumps(SETTINGS), "--out", directory / "out.json"]
    subprocess.run([str(word) for word in words], check=True)
    return json.loads((directory / "out.json").read_text())["steps_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "throughput.json")
    given = parser.parse_args()
    contestants = {
        "serial": lambda d: ours("serial", given.steps, d),
        "parallel": lambda d: ours("parallel", given.steps, d),
    }
    if (ROOT / ".venv-sb3/.installed").exists():
        contestants["stable-baselines3"] = lambda d: sb3(given.steps, d)
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(given.slices):
        for name, run in contestants.items():
            with tempfile.TemporaryDirectory() as directory:
                rates[name].append(run(Path(directory)))
    ratios = {
        name: statistics.median(rate / serial for rate, serial in zip(found, rates["serial"], strict=True))
        for name, found in rates.items()
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps({"steps": given.steps, "steps_per_second": rates, "ratio_to_serial": ratios}, indent=1)
    )
    print("| PPO, CartPole-v1 | steps/s, median | ratio to serial, median |\n|---|---|---|")
    for name, found in rates.items():
        print(f"| {name} | {statistics.median(found):,.0f} | {ratios[name]:.2f} |")
    print(f"-> {given.out}")


if __name__ == "__main__":
    main()
