"""Cases of bench/fingerprints.py, and the script that runs them on one tree (a checkout of the repository).

    python bench/fingerprint_job.py ROUNDS DIRECTORY < names-of-cases      # one line of JSON for each case

This file runs on trees whose modules, classes and options have different names, so it uses only public functions,
`remuda.train` and `remuda.resume`, and the learner that is passed to callbacks. Names that differ between trees are
in the tables OPTION_NAMES and ATTRIBUTES, which list alternatives to be tried in order.

Some cases turn off the fast path (hand-written gradients of small networks) by an option, `agent.quick=false` in 0.1.
If the option has another name in a tree, add the name to OPTION_NAMES.
"""

import hashlib
import itertools
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import remuda

# For each option of the cases, its (group, name) in the trees, newest first.
OPTION_NAMES: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("sampler", "inference"): [("sampler", "inference"), ("sampler", "act")],
    ("agent", "fast_path"): [("agent", "fast_path"), ("agent", "fast"), ("agent", "quick")],
}
# For each attribute of a learner, its paths in the trees. A pair of parentheses means a call.
ATTRIBUTES: dict[str, list[str]] = {
    "parameter groups": ["parameters", "parameter_groups", "parameter_groups()", "algorithm.groups()"],
    "optimizers": ["optimizers"],
    "updates": ["version", "clock.version"],
}
STOP_AT = 0.5  # fraction of the rounds after which the second run is stopped and resumed


# --- cases ------------------------------------------------------------------------------------------------------

Options = Mapping[str, Mapping[str, Any]]

ENVS: dict[str, tuple[str, str]] = {  # {name in cases: (env, kind of its actions)}
    "cartpole": ("CartPole-v1", "discrete"),
    "pendulum": ("Pendulum-v1", "box"),
    "dict": ("fingerprint_env:make", "discrete"),
    "dict-box": ("fingerprint_env:make", "box"),
    "minatar": ("MinAtar/Breakout-v1", "discrete"),
}
FORMS: dict[str, tuple[str, Options]] = {
    "serial": ("serial", {}),
    "parallel": ("parallel", {"sampler": {"workers": 2, "inference": "central"}}),
    "workers": ("parallel", {"sampler": {"workers": 2, "inference": "workers"}}),
}
COMMON: Options = {
    "sampler": {"envs": 4, "decorrelate": 3},
    "eval": {"episodes": 0},
    "log": {"tensorboard": False},
    "checkpoint": {"every": 0},
    "agent": {"hidden": (16, 16)},
}
ON_POLICY_ROWS, REPLAY_ROWS = 8, 4  # rows of each env in one round
ROLLOUT: Options = {"algo": {"n_steps": ON_POLICY_ROWS}}
REPLAY: Options = {
    "algo": {"train_freq": REPLAY_ROWS, "batch_size": 16, "learning_starts": 48},
    "replay": {"capacity": 200, "ratio": 4.0},  # so small that rows are overwritten
}
TARGETS: Options = {"algo": {"target_update_interval": 5}}
BOTH, DISCRETE, BOX = ("discrete", "box"), ("discrete",), ("box",)
ALGORITHMS: dict[str, tuple[tuple[str, ...], list[Options]]] = {  # {name: (kinds of actions, options)}
    "ppo": (BOTH, [ROLLOUT, {"algo": {"batch_size": 16, "n_epochs": 2}}]),
    "a2c": (BOTH, [ROLLOUT]),
    "impala": (BOTH, [ROLLOUT, {"algo": {"batch_size": 2}}]),
    "appo": (BOTH, [ROLLOUT, {"algo": {"batch_size": 2, "n_epochs": 2}}]),
    "dqn": (DISCRETE, [REPLAY, TARGETS]),
    "rainbow": (DISCRETE, [REPLAY, TARGETS]),
    "r2d1": (DISCRETE, [REPLAY, TARGETS]),
    "ddpg": (BOX, [REPLAY]),
    "td3": (BOX, [REPLAY, {"replay": {"prioritized": True, "n_step": 3}}]),
    "sac": (BOX, [REPLAY]),
}
MEMORY: Options = {"agent": {"core": "lstm", "core_size": 8}}
SEQUENCES: Options = {"algo": {"batch_size": 4}, "replay": {"sequence": 8, "burn_in": 4, "n_step": 2}}
HAS_FAST_PATH = {  # the fast path is for feed-forward agents with vector observations
    "cartpole": ("ppo", "a2c", "impala", "appo"),
    "pendulum": ("ppo", "a2c", "impala", "appo", "sac"),
}


@dataclass(frozen=True)
class Case:
    """One training run: its name, and the arguments of `remuda.train`."""

    name: str
    algo: str
    env: str
    scheme: str
    rows: int  # rows of all envs in one round
    groups: dict[str, dict[str, Any]]


def merged(parts: Iterable[Options]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for group, values in part.items():
            found[group] = {**found.get(group, {}), **values}
    return found


def make_cases() -> Iterator[Case]:
    """Yield all combinations of algorithm, env, scheme, memory and fast path that make sense."""
    for algo, (kinds, own) in ALGORITHMS.items():
        has_replay = REPLAY in own
        for label, (env, kind) in ENVS.items():
            if kind not in kinds or (label == "dict-box" and "discrete" in kinds):
                continue
            for form, memory in itertools.product(FORMS, ("feedforward", "recurrent")):
                if algo == "r2d1" and memory == "feedforward":
                    continue
                scheme, of_form = FORMS[form]
                parts: list[Options] = [COMMON, *own, of_form]
                if memory == "recurrent":
                    parts += [MEMORY, SEQUENCES] if has_replay else [MEMORY]
                if label.startswith("dict"):
                    parts += [{"envs": {"kwargs": {"is_continuous": kind == "box"}}}]
                rows = merged(parts)["sampler"]["envs"] * (REPLAY_ROWS if has_replay else ON_POLICY_ROWS)
                name = f"{algo}/{label}/{form}/{memory}"
                yield Case(name, algo, env, scheme, rows, merged(parts))
                if memory == "feedforward" and algo in HAS_FAST_PATH.get(label, ()):
                    parts += [{"agent": {"fast_path": False}}]
                    yield Case(f"{name}/fast-path-off", algo, env, scheme, rows, merged(parts))


CASES: dict[str, Case] = {case.name: case for case in make_cases()}


# --- fingerprints -----------------------------------------------------------------------------------------------


def arrays_in(tree: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yield every tensor and array in nested dataclasses, dicts, lists and tuples, in the order of their items."""
    if isinstance(tree, torch.Tensor):
        yield np.ascontiguousarray(tree.detach().cpu().numpy())
    elif isinstance(tree, np.ndarray):
        yield np.ascontiguousarray(tree)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for item in fields(tree):
            yield from arrays_in(getattr(tree, item.name))
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from arrays_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from arrays_in(value)


def sha256_of(array: np.ndarray[Any, Any]) -> str:
    """Return the hash of an array's dtype, shape and bytes."""
    return hashlib.sha256(f"{array.dtype.str}{array.shape}".encode() + array.tobytes()).hexdigest()


def joined(hashes: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def find_attribute(thing: Any, what: str, paths: Iterable[str]) -> Any:
    """Return the value of the first of these dotted paths that exists in `thing`."""
    for path in paths:
        found = thing
        for name in path.split("."):
            found = getattr(found, name.removesuffix("()"), None)
            if found is None:
                break
            found = found() if name.endswith("()") else found
        if found is not None and not (callable(found) and not isinstance(found, Mapping)):
            return found
    raise LookupError(f"{type(thing).__name__} has no {what} under the names {list(paths)}: add the new name.")


def fingerprint(learner: Any) -> dict[str, str]:
    """Return the hashes of a learner's parameters, of its optimizers, and of all other tensors of its state.

    Parameters are hashed in the order of their groups. The tensors of one optimizer, and those of target networks and
    running statistics, are sorted by their hashes, because their order in a state dict depends on names.
    """
    groups, optimizers = (
        find_attribute(learner, what, ATTRIBUTES[what]) for what in ("parameter groups", "optimizers")
    )
    parameters = [sha256_of(array) for array in arrays_in(groups)]
    moments = [
        joined(sorted(sha256_of(array) for array in arrays_in(each.state_dict()))) for each in optimizers.values()
    ]
    known = {
        *parameters,
        *(sha256_of(array) for each in optimizers.values() for array in arrays_in(each.state_dict())),
    }
    rest = sorted({sha256_of(array) for array in arrays_in(learner.state_dict())} - known)
    return {"parameters": joined(parameters), "optimizers": joined(moments), "other": joined(rest)}


# --- runs -------------------------------------------------------------------------------------------------------


class Stop:
    """Callback that stops a run after some rounds and keeps the fingerprint of what the run has learned."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.is_started, self.found = rounds, False, dict[str, Any]()

    def __call__(self, round: Any) -> bool:
        self.is_started = True
        if round.progress.rounds < self.rounds:
            return False
        updates = find_attribute(round.learner, "updates", ATTRIBUTES["updates"])
        counts = {"rounds": round.progress.rounds, "steps": round.progress.steps, "updates": int(updates)}
        self.found = {**fingerprint(round.learner), **counts, "episodes": round.progress.episodes}
        return True

    def result(self) -> dict[str, Any]:
        if not self.found:
            raise RuntimeError(f"the run ended before round {self.rounds}.")
        return self.found


_accepted: dict[tuple[str, str], tuple[str, str]] = {}  # names that this tree has accepted


def spellings(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[Any, Any]]]:
    """Yield the option groups with each combination of alternative names, and the alternatives in use."""
    used = [key for key in OPTION_NAMES if key[1] in groups.get(key[0], {})]
    for chosen in itertools.product(*([_accepted[key]] if key in _accepted else OPTION_NAMES[key] for key in used)):
        named = {group: dict(values) for group, values in groups.items()}
        for (group, option), (new_group, new_option) in zip(used, chosen, strict=True):
            value = named[group].pop(option)
            named.setdefault(new_group, {})[new_option] = value
        yield named, dict(zip(used, chosen, strict=True))


def start(case: Case, rounds: int, seed: int, out: Path, stop: Stop) -> None:
    """Train until the callback `stop` ends the run, with the option names that this tree accepts."""
    refusals = []
    for number, (groups, chosen) in enumerate(spellings(case.groups)):
        try:
            # Reset rows do not count as steps, so this number of steps takes at least `rounds` rounds.
            steps = case.rows * rounds + 100
            remuda.train(
                case.algo,
                case.env,
                steps=steps,
                seed=seed,
                scheme=case.scheme,
                out=out / str(number),
                callbacks=[stop],
                quiet=True,
                **groups,
            )
        except remuda.RemudaError as error:
            if stop.is_started:
                raise
            refusals.append(str(error))
            continue
        _accepted.update(chosen)
        (out / str(number)).rename(out / "run")
        return
    raise RuntimeError("no spelling of the options was accepted: " + " | ".join(refusals))


def run_case(case: Case, rounds: int, directory: Path, seed: int = 3) -> dict[str, Any]:
    """Return the fingerprints of an uninterrupted run, and of the same run stopped and resumed half-way."""
    whole, first, second = Stop(rounds), Stop(max(1, int(rounds * STOP_AT))), Stop(rounds)
    start(case, rounds, seed, directory / "whole", whole)
    start(case, rounds, seed, directory / "resumed", first)
    remuda.resume(directory / "resumed" / "run", callbacks=[second], quiet=True)
    return {"whole": whole.result(), "resumed": second.result()}


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `work` and its duration, or its error, so that the other cases still run."""
    started = time.perf_counter()
    try:
        found = work()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {**found, "seconds": round(time.perf_counter() - started, 2)}


def main() -> None:
    rounds, directory = int(sys.argv[1]), Path(sys.argv[2])
    out = sys.stdout
    sys.stdout = sys.stderr  # output of runs and envs must not mix with the lines of JSON
    torch.set_num_threads(1)
    print(json.dumps({"package": str(Path(remuda.__file__).parent)}), file=out, flush=True)
    for name in sys.stdin.read().split():
        folder = directory / name.replace("/", "-")
        folder.mkdir(parents=True)
        found = attempt(lambda name=name, folder=folder: run_case(CASES[name], rounds, folder))  # type: ignore[misc]
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps({"case": name, **found}), file=out, flush=True)


if __name__ == "__main__":
    main()
