"""Two torchrun processes (agents), as on two machines: failures, signals and restarts of one reach the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import all_gone, children_of, wait_for
from test_ranks import END_SECONDS, step_of

PPO = ["-m", "remuda", "train", "ppo", "--env", "CartPole-v1", "--scheme", "replicas", "--sampler.envs", "4"]
PPO += ["--algo.n_steps", "32", "--algo.batch_size", "64", "--eval.episodes", "0", "--checkpoint.every", "1000"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Agents:
    """The torchrun processes of one run."""

    def __init__(self, folder: Path, ranks_each: int, *command: str, is_static: bool = False) -> None:
        """If `is_static`, agents do not know of each other: only the store of the first connects their ranks."""
        self._folder, self._command, port = folder, command, free_port()
        self._options = ["--nnodes", "2", "--nproc-per-node", str(ranks_each), "--max-restarts", "1"]
        dynamic = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
        self._options += ["--master-addr", "127.0.0.1", "--master-port", str(port)] if is_static else dynamic
        self.processes: list[psutil.Popen] = []

    def start(self, *more: str) -> psutil.Popen:
        log = (self._folder / f"agent-{len(self.processes)}.txt").open("w")
        command = [sys.executable, "-m", "torch.distributed.run", *self._options, *more, *self._command]
        with log:
            process = psutil.Popen(command, cwd=self._folder, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def printed(self, agent: int) -> str:
        return (self._folder / f"agent-{agent}.txt").read_text()

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of all ranks, by rank."""
        children = [child for agent in self.processes for child in children_of(agent)]
        found = {}
        for child in children:
            with contextlib.suppress(psutil.Error, KeyError):  # a process that is just being started
                if "remuda" in child.cmdline() or "script.py" in child.cmdline():
                    found[int(child.environ()["RANK"])] = child
        return dict(sorted(found.items()))

    def agent_of(self, rank: int) -> int:
        parent = self.ranks()[rank].ppid()
        return [process.pid for process in self.processes].index(parent)

    def await_checkpoint(self, path: Path, after: int = 0) -> None:
        wait_for(lambda: step_of(path) > after, 120)


@contextlib.contextmanager
def agents(folder: Path, ranks_each: int, *command: str, is_static: bool = False) -> Iterator[Agents]:
    found = Agents(folder, ranks_each, *command, is_static=is_static)
    try:
        yield found
    finally:
        for process in [*found.ranks().values(), *found.processes]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in found.processes:
            process.wait()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda number: number.name)
def test_all_ranks_end_soon_after_the_host_of_their_store_is_lost(tmp_path, number):
    """The torchrun process that started rank 0 keeps the store. Stopped, it does not even close connections."""
    path = tmp_path / "run"
    command = [*PPO, "--steps", "50_000_000", "--scheme.exchange", "gloo", "--out", str(path)]
    with agents(tmp_path, 1, *command) as run:
        run.start(), run.start()
        run.await_checkpoint(path)
        ranks, host = list(run.ranks().values()), run.agent_of(0)
        since = time.monotonic()
        run.processes[host].send_signal(number)
        wait_for(lambda: all_gone(ranks), END_SECONDS)
        print(f"gone after {time.monotonic() - since:.1f} s")
        error = json.loads((path / "result.json").read_text())["error"]
        assert "has had no answer from the store of the run" in error or "torchrun, which started" in error


@pytest.mark.long
def test_ranks_end_with_torchrun_if_they_need_its_store_no_more(tmp_path):
    command = [*PPO, "--steps", "50_000_000", "--out", str(tmp_path / "run")]
    with agents(tmp_path, 1, *command) as run:
        run.start(), run.start()
        run.await_checkpoint(tmp_path / "run")
        ranks = list(run.ranks().values())
        run.processes[run.agent_of(0)].kill()
        wait_for(lambda: all_gone(ranks), END_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("exchange", ["auto", "gloo"])
def test_signal_to_one_torchrun_stops_all_ranks_with_a_checkpoint(tmp_path, rank, exchange):
    path = tmp_path / "run"
    command = [*PPO, "--steps", "50_000_000", "--out", str(path), "--scheme.exchange", exchange]
    with agents(tmp_path, 2, *command) as run:
        run.start(), run.start()
        run.await_checkpoint(path)
        ranks, agent = run.ranks(), run.agent_of(rank)
        since = time.monotonic()
        run.processes[agent].terminate()
        wait_for(lambda: all_gone(ranks.values()), END_SECONDS)
        print(f"gone after {time.monotonic() - since:.1f} s")
        result = json.loads((path / "result.json").read_text())
        assert result["status"] == "stopped by SIGTERM"
        assert result["steps"] == step_of(path)
        assert "SIGKILL" not in run.printed(agent)


@pytest.mark.long
def test_agents_that_count_restarts_differently_start_the_ranks_again(tmp_path):
    """A second agent is lost with its rank, and another one takes its place, which has restarted nothing."""
    path = tmp_path / "run"
    with agents(tmp_path, 1, *PPO, "--steps", "60_000", "--out", str(path), is_static=True) as run:
        first, lost = run.start("--node-rank", "0"), run.start("--node-rank", "1")
        run.await_checkpoint(path)
        ranks = run.ranks()
        lost.kill(), ranks[1].kill()
        lost.wait()
        wait_for(lambda: all_gone(ranks.values()), END_SECONDS)
        before = step_of(path)
        other = run.start("--node-rank", "1")
        assert first.wait(200) == other.wait(60) == 0, run.printed(0)
        assert json.loads((path / "result.json").read_text())["status"] == "complete"
        assert before < 60_000
        assert (path / "log.txt").read_text().count("resumed from step-") == 1


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_failure_of_a_rank_before_it_joins_ends_the_others(tmp_path, rank):
    """The others wait for it, and their torchrun does not know that it has failed."""
    (tmp_path / "script.py").write_text(
        "import os, sys, time, remuda\n"
        f"wrong = int(os.environ['RANK']) == {rank}\n"
        "if wrong:\n"
        "    time.sleep(3)\n"
        "remuda.train('ppo', 'CartPole-v1', steps=10_000, out='run', eval={'episodes': 0}, sampler={'envs': 6},\n"
        "    algo={'n_steps': 32, 'batch_size': 96}, scheme={'name': 'replicas', 'ranks': 3 if wrong else 2})\n"
    )
    with agents(tmp_path, 1, "script.py", is_static=True) as run:
        run.start("--node-rank", "0"), run.start("--node-rank", "1")
        wait_for(lambda: len(run.ranks()) == 2, 60)
        waiting, failing = run.agent_of(1 - rank), run.agent_of(rank)
        wait_for(lambda: "scheme.ranks=3, but torchrun started 2 processes" in run.printed(failing), 60)
        since = time.monotonic()
        sentence = ": scheme.ranks=3, but torchrun started 2 processes: leave it out."
        wait_for(lambda: f"ConfigError: rank {rank} (pid " in run.printed(waiting), END_SECONDS)
        print(f"noticed after {time.monotonic() - since:.1f} s")
        assert sentence in run.printed(waiting)


@pytest.mark.long
def test_a_second_run_in_one_process_is_refused_at_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import remuda\n"
        "options = dict(env='CartPole-v1', steps=512, sampler={'envs': 4}, algo={'n_steps': 32, 'batch_size': 64},\n"
        "    eval={'episodes': 0}, scheme='replicas')\n"
        "remuda.train('ppo', out='first', **options)\n"
        "remuda.train('ppo', out='second', **options)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    start = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, env={**os.environ})
    assert "this process has already trained a run, with which the other ranks of torchrun have ended" in done.stderr
    assert time.monotonic() - start < 60
    assert json.loads((tmp_path / "first/result.json").read_text())["status"] == "complete"
    assert not (tmp_path / "second").exists()
