"""Compare what two commits learn, bit by bit: a safety net for changes that must not alter any result.

    .venv/bin/python bench/fingerprints.py --base COMMIT                     # all cases, up to 40 minutes
    .venv/bin/python bench/fingerprints.py --base COMMIT --only ppo/cartpole --out fingerprints.json

COMMIT is checked out in a temporary worktree with a virtual environment of its own, unless `--base-python` names an
interpreter that already has the dependencies. The two trees are this checkout and that of COMMIT. Both run the same
short trainings (bench/fingerprint_job.py) on this machine; no hashes are stored, because they may differ between
processors. A fingerprint is the sha256 of the dtype, shape and bytes of parameters, optimizers and all other tensors
of the learner after `--rounds` rounds. A second fingerprint is taken of the same run, stopped and resumed half-way.
Runs under `async` are never the same twice. For them, both trees play the same recorded sequences of events on a
shared replay, and all counts are compared (bench/row_accounting.py).

The exit code is 1 if anything differs or could not be compared.
"""

import argparse
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
EQUAL, DIFFERENT, ONLY_BASE, ONLY_NEW, FAILED = "equal", "different", "only in base", "only in new", "failed in both"
CASE_SECONDS = 300.0  # time limit of a case; a case that exceeds it has failed, and its process is replaced
ROWS_PREFIX = "rows/"  # prefix of the names of row-accounting cases


@dataclass
class Tree:
    """A checkout, the Python interpreter that runs it, and its results by case."""

    name: str
    path: Path
    python: Path
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return environment variables for the tree's processes, which import its package and use one thread."""
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        inherited = {name: value for name, value in os.environ.items() if name != "REMUDA_MAX_STEPS"}
        return {**inherited, **one_thread, "PYTHONPATH": os.pathsep.join((str(self.path / "src"), str(BENCH)))}


def run(command: Sequence[Any], cwd: Path = ROOT) -> str:
    """Run a command and return its output; exit with that output if the command fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def checked_out(commit: str, python: Path | None) -> Iterator[Tree]:
    """Yield a temporary worktree of a commit, with an interpreter, and remove the worktree afterwards."""
    with tempfile.TemporaryDirectory(prefix="fingerprints-") as folder:
        path = Path(folder) / "tree"
        run(["git", "worktree", "add", "--detach", path, commit])
        try:
            yield Tree("base", path, python or install(path))
        finally:
            run(["git", "worktree", "remove", "--force", path])


def install(path: Path) -> Path:
    """Make a virtual environment in a tree with the extras that its Makefile names; return the interpreter."""
    print("installing the dependencies of the base tree ...", flush=True)
    found = re.search(r"--editable '?\.\[([\w,-]+)\]", (path / "Makefile").read_text())
    python = path / ".venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
    run([sys.executable, "-m", "venv", path / ".venv"])
    run([*pip, "torch"], cwd=path)
    run([*pip, "--editable", f".[{found[1]}]" if found else "."], cwd=path)
    return python


# --- running ----------------------------------------------------------------------------------------------------


class Job:
    """A process that runs on a tree, reads names of cases, and answers each with one line of JSON."""

    def __init__(self, tree: Tree, script: str, names: Sequence[str], arguments: Sequence[str], folder: Path) -> None:
        command = [str(tree.python), str(BENCH / script), *arguments]
        self.stderr = folder / f"stderr-{tree.name}.txt"
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=tree.environment(),
                cwd=folder,
                text=True,
            )
        assert self.process.stdin is not None
        self.process.stdin.write("\n".join(names))
        self.process.stdin.close()
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self) -> dict[str, Any]:
        """Return the next answer; raise RuntimeError if the process takes too long or has ended."""
        try:
            line = self._lines.get(timeout=CASE_SECONDS)
        except queue.Empty:
            raise RuntimeError(f"no answer within {CASE_SECONDS:g} s") from None
        if not line:
            tail = self.stderr.read_text(errors="replace").strip().splitlines()[-5:]
            raise RuntimeError(f"the process ended with code {self.process.wait()}: " + " | ".join(tail))
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def run_tree(tree: Tree, script: str, names: Sequence[str], arguments: Sequence[str], report: Any) -> None:
    """Run all cases in one process. If it dies or hangs, the case has failed, and a new process runs the rest."""
    left = list(names)
    for attempt in itertools.count():
        with tempfile.TemporaryDirectory(prefix="fingerprints-") as folder:
            job = Job(tree, script, left, [*arguments, str(Path(folder) / f"runs-{attempt}")], Path(folder))
            try:
                package = Path(job.answer()["package"])
                if tree.path / "src" not in package.parents:
                    raise SystemExit(f"{tree.name}: remuda was imported from {package}, not from {tree.path}.")
                while left:
                    found = job.answer()
                    left.remove(found["case"])
                    report(tree, found["case"], found)
                return
            except RuntimeError as error:
                report(tree, left[0], {"error": str(error)})
                del left[0]
            finally:
                job.close()
        if not left:
            return


def run_both(trees: Sequence[Tree], script: str, names: Sequence[str], arguments: Sequence[str]) -> None:
    """Run the cases in both trees at the same time, and print the comparison of each case once both are done."""
    lock, done, started = threading.Lock(), itertools.count(1), time.monotonic()

    def report(tree: Tree, name: str, found: dict[str, Any]) -> None:
        with lock:
            tree.results[name] = found
            if all(name in each.results for each in trees):
                state = status(*(each.results[name] for each in trees))
                passed = f"{time.monotonic() - started:.0f} s"
                print(f"[{next(done)}/{len(names)}, {passed}] {name}: {state}", flush=True)

    failures: list[BaseException] = []

    def work(tree: Tree) -> None:
        try:
            run_tree(tree, script, names, arguments, report)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(tree,), daemon=True) for tree in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# --- comparing --------------------------------------------------------------------------------------------------


def measured(result: dict[str, Any]) -> dict[str, Any]:
    """Return those parts of a result that must be equal in both trees."""
    return {name: value for name, value in result.items() if name not in ("seconds", "traceback")}


def status(base: dict[str, Any], new: dict[str, Any]) -> str:
    if "error" in base or "error" in new:
        return FAILED if "error" in base and "error" in new else ONLY_NEW if "error" in base else ONLY_BASE
    return EQUAL if measured(base) == measured(new) else DIFFERENT


def differences(base: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield one line for each value that differs, with the path to it."""
    if isinstance(base, dict) and isinstance(new, dict):
        for name in [*base, *(name for name in new if name not in base)]:
            yield from differences(base.get(name), new.get(name), f"{path}.{name}" if path else name)
    elif isinstance(base, list) and isinstance(new, list):
        for index, (left, right) in enumerate(itertools.zip_longest(base, new)):
            if left != right:  # later differences follow from the first
                yield from differences(left, right, f"{path}[{index}]")
                return
    elif base != new:
        yield f"{path}: {shortened(base)} in base, {shortened(new)} in new"


def shortened(value: Any) -> str:
    """Return the value as text; hashes are abbreviated."""
    text = str(value)
    if re.fullmatch(r"[0-9a-f]{64}", text):
        return text[:12]
    return text if len(text) <= 60 else f"{text[:57]}..."


def inexact_resumes(tree: Tree) -> list[str]:
    """Return the cases whose resumed run has other fingerprints than the uninterrupted one."""
    return [
        name
        for name, found in tree.results.items()
        if "whole" in found and "resumed" in found and found["whole"] != found["resumed"]
    ]


def summarize(base: Tree, new: Tree) -> dict[str, Any]:
    """Print a table of results and all differences, and return both for the output file."""
    states = {name: status(base.results[name], new.results[name]) for name in base.results}
    kinds = [EQUAL, DIFFERENT, ONLY_BASE, ONLY_NEW, FAILED]
    table: dict[str, Counter[str]] = {}
    for name, state in states.items():
        table.setdefault(name.split("/")[0], Counter())[state] += 1
    print("\n" + "".join(f"{title:>15}" for title in ("", *kinds)))
    for title, counts in table.items():
        print(f"{title:>15}" + "".join(f"{counts[kind] or '':>15}" for kind in kinds))
    seen: dict[str, str] = {}  # {error: first case with this error}
    for name, state in states.items():
        if state == EQUAL:
            continue
        print(f"\n{name}: {state}")
        for tree in (base, new):
            if (error := tree.results[name].get("error")) is not None:
                first = seen.setdefault(f"{tree.name}: {error}", name)
                print(f"  {tree.name}: " + (error if first == name else f"the same error as in {first}"))
        if state == DIFFERENT:
            for line in differences(measured(base.results[name]), measured(new.results[name])):
                print(f"  {line}")
    for tree in (base, new):
        for name in inexact_resumes(tree):
            print(f"\n{name}: in {tree.name} the resumed run does not end as the uninterrupted one")
    counts = Counter(states.values())
    print(f"\n{len(states)} cases: " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind]))
    return {"states": states, **{tree.name: tree.results for tree in (base, new)}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="commit to compare the working tree with")
    parser.add_argument("--base-python", type=Path, help="interpreter for it; by default a new environment is made")
    parser.add_argument("--out", type=Path, help="file for all results, as JSON")
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each run (default: 20)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    options = parser.parse_args()
    # Only the names of the cases are used here; other processes run the cases.
    from fingerprint_job import CASES
    from row_accounting import SEQUENCES

    runs = [name for name in CASES if options.only in name]
    rows = [name for name in (f"{ROWS_PREFIX}{name}" for name in SEQUENCES) if options.only in name]
    if options.list:
        print(*runs, *rows, sep="\n")
        return 0
    if not options.base or not runs + rows:
        parser.error("give --base COMMIT" if not options.base else f"no case contains {options.only!r}: see --list")
    commit = run(["git", "rev-parse", f"{options.base}^{{commit}}"]).strip()
    # The path is made absolute but not resolved, because the python of a virtual environment is a link out of it.
    given = options.base_python and Path(os.path.abspath(options.base_python))
    started = time.monotonic()
    new = Tree("new", ROOT, Path(sys.executable))
    with checked_out(commit, given) as base:
        if rows:
            run_both((base, new), "row_accounting.py", rows, ["--job"])
        if runs:
            run_both((base, new), "fingerprint_job.py", runs, [str(options.rounds)])
        found = summarize(base, new)
    print(f"{time.monotonic() - started:.0f} s")
    if options.out:
        options.out.write_text(json.dumps({"commit": commit, "rounds": options.rounds, **found}, indent=1) + "\n")
    return int(any(state != EQUAL for state in found["states"].values()))


if __name__ == "__main__":
    sys.exit(main())
