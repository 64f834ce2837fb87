"""Ranks that are killed, hang or raise: the run ends everywhere with one sentence, and continues with --resume."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import prestarted
import psutil
import pytest
from processes import all_gone, wait_for

import remuda
from remuda.cli import main
from remuda.errors import WorkerError
from remuda.learning.checkpoint import load_newest
from remuda.processes.fork_server import ForkFailed, ForkServer

TESTS = Path(__file__).parents[1]
END_SECONDS = 10  # after a fault, every rank must be gone within this time


def start(path: Path, *arguments: str, ranks: int = 2, env: str = "CartPole-v1", algo: str = "ppo"):
    """Start a run of several ranks that would take minutes."""
    command = [sys.executable, "-m", "remuda", "train", algo, "--env", env, "--out", str(path), "--quiet"]
    command += ["--scheme", "replicas", "--scheme.ranks", str(ranks), "--sampler.envs", "12", "--steps", "50_000_000"]
    command += {
        "ppo": ["--algo.n_steps", "32", "--algo.batch_size", "192", "--checkpoint.every", "2_000"],
        "sac": ["--algo.learning_starts", "100", "--algo.batch_size", "48", "--checkpoint.every", "200"],
    }[algo]
    command += ["--agent.hidden", "16,16", "--eval.episodes", "0", *arguments]
    return prestarted.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )


def await_checkpoint(process: subprocess.Popen, path: Path) -> None:
    """Wait until the run has saved something, or show why it ended before."""
    wait_for(lambda: any(path.glob("checkpoints/step-*")) or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()[1]


def rank_processes(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the processes of all ranks, rank 0 first."""
    leader = psutil.Process(process.pid)
    (server,) = [child for child in leader.children() if "remuda.build.ranks" in " ".join(child.cmdline())]
    return [leader, *sorted(server.children(), key=lambda rank: rank.pid)]


def await_end(process: subprocess.Popen, members: list[psutil.Process], since: float) -> tuple[str, float]:
    """Wait until all ranks are gone; return what rank 0 wrote to standard error, and the seconds since the fault."""
    _, error = process.communicate(timeout=120)
    wait_for(lambda: all_gone(members))
    return error, time.monotonic() - since


def resume(path: Path, steps: int) -> None:
    options = ["--steps", str(steps), "--quiet"]
    assert main(["train", "--resume", str(path), *options]) == 0
    assert json.loads((path / "result.json").read_text())["status"] == "complete"


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_a_killed_rank_ends_the_run_with_one_sentence(tmp_path, algo):
    path, shared = tmp_path / "run", set(os.listdir("/dev/shm"))
    env = "CartPole-v1" if algo == "ppo" else "Pendulum-v1"
    process = start(path, ranks=3, env=env, algo=algo)
    await_checkpoint(process, path)
    members = rank_processes(process)
    killed = members[2]
    killed.kill()
    error, _ = await_end(process, members, time.monotonic())
    assert process.returncode == 1
    (line,) = [line for line in error.splitlines() if line.startswith("remuda: ")]
    assert f"rank 2 (pid {killed.pid} on " in line
    assert "--resume" in line
    assert set(os.listdir("/dev/shm")) == shared
    resume(path, load_newest(path / "checkpoints").step + 50)


@pytest.mark.parametrize("exchange", ["auto", "gloo"])
def test_other_ranks_end_with_rank_0_and_leave_nothing(tmp_path, exchange, monkeypatch):
    """No file is left either, although rank 0 cannot clean up."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = start(tmp_path / "run", "--scheme.exchange", exchange, ranks=3)
    await_checkpoint(process, tmp_path / "run")
    members = rank_processes(process)
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: all_gone(members))
    assert not list(temporary.iterdir())


def test_a_refused_fork_gives_one_sentence(tmp_path, monkeypatch, capsys):
    def refuse(self, fds):
        raise ForkFailed("[Errno 11] Resource temporarily unavailable")

    monkeypatch.setattr(ForkServer, "fork", refuse)
    command = ["train", "ppo", "--env", "CartPole-v1", "--scheme", "replicas", "--scheme.ranks", "2"]
    assert main([*command, "--out", str(tmp_path / "run"), "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "remuda: rank 1 could not be started ([Errno 11] Resource temporarily unavailable): allow more"
    )
    assert "use fewer --scheme.ranks" in line
    assert not (tmp_path / "run").exists()


def test_the_traceback_of_another_rank_is_in_the_log_of_the_run(tmp_path):
    """The error of another rank arrives with its traceback as a note."""

    def fail(round):
        if round.progress.rounds == 3:
            error = WorkerError("rank 1 (pid 7 on node-1): KeyError: 'x'")
            error.add_note("Traceback of rank 1")
            raise error

    with pytest.raises(WorkerError):
        remuda.train("ppo", "CartPole-v1", steps=10_000, out=tmp_path / "run", callbacks=fail, quiet=True)
    assert "Traceback of rank 1" in (tmp_path / "run/log.txt").read_text()


def test_a_stopped_rank_is_named_and_killed(tmp_path):
    path = tmp_path / "run"
    process = start(path)
    await_checkpoint(process, path)
    members = rank_processes(process)
    members[1].suspend()
    error, _ = await_end(process, members, time.monotonic())
    assert process.returncode == 1
    assert f"rank 1 (pid {members[1].pid} on " in error
    assert "has given no sign of life" in error
    resume(path, load_newest(path / "checkpoints").step + 50)


def test_an_interrupt_leaves_a_checkpoint_that_resumes(tmp_path):
    path = tmp_path / "run"
    process = start(path)
    await_checkpoint(process, path)
    members = rank_processes(process)
    process.send_signal(signal.SIGINT)
    await_end(process, members, time.monotonic())
    assert process.returncode == 128 + signal.SIGINT
    found = load_newest(path / "checkpoints")
    assert found.step == json.loads((path / "result.json").read_text())["steps"]
    assert "sampler" in found.blobs, "the states of the envs of all ranks"
    resume(path, found.step + 50)


def test_an_env_that_raises_is_shown_with_file_and_line(tmp_path):
    path = tmp_path / "run"
    process = start(path, "--envs.kwargs", '{"fault": "raise"}', env="own_things:late")
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 2, error
    assert "own_things.py" in error
    log = (path / "log.txt").read_text()
    assert "the env is on strike" in log
    assert "Traceback" in log


@pytest.mark.long
@pytest.mark.parametrize(("algo", "steps"), [("ppo", 200_000), ("sac", 4_000)])
def test_a_run_interrupted_at_random_moments_equals_one_that_was_not(tmp_path, algo, steps):
    """Parameters, statistics and optimizer are compared by sha256 at the end."""
    options = {"env": "CartPole-v1" if algo == "ppo" else "Pendulum-v1", "algo": algo}
    path, draw, seen = tmp_path / "run", random.Random(algo), 0
    process = start(path, "--steps", str(steps), **options)
    for _ in range(3):
        wait_for_checkpoint(process, path, after=seen)
        time.sleep(draw.uniform(0.0, 1.0))
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=120)[1]
        assert process.returncode == 128 + signal.SIGINT, error
        assert seen < step_of(path) < steps
        seen = step_of(path)
        process = prestarted.Popen([sys.executable, "-m", "remuda", "train", "--resume", str(path), "--quiet"])
    whole = start(tmp_path / "whole", "--steps", str(steps), **options)
    whole.communicate(timeout=300)
    assert whole.returncode == process.wait(timeout=300) == 0
    saved = [(each / "checkpoints/latest/tensors.safetensors").read_bytes() for each in (path, tmp_path / "whole")]
    assert saved[0] == saved[1]


def wait_for_checkpoint(process: subprocess.Popen[str], path: Path, after: int) -> None:
    """Wait until a run has saved a checkpoint of a step above `after`, or has ended."""
    wait_for(lambda: process.poll() is not None or step_of(path) > after, 120)


def step_of(path: Path) -> int:
    """Return the step of a run's newest checkpoint, or 0 if there is none."""
    return max((int(found.name.split("-")[1]) for found in path.glob("checkpoints/step-*")), default=0)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_killed_at_random_moments_leave_runs_that_resume(tmp_path, rank):
    """A rank is killed at random moments (7 of each rank): all ranks are gone within 10 s, and the run resumes."""
    draw, longest = random.Random(rank), 0.0
    for attempt in range(7):
        path = tmp_path / f"run-{attempt}"
        process = start(path, ranks=3)
        await_checkpoint(process, path)
        members = rank_processes(process)
        time.sleep(draw.uniform(0.0, 2.0))
        since = time.monotonic()
        members[rank].kill()
        _, seconds = await_end(process, members, since)
        longest = max(longest, seconds)
        resume(path, load_newest(path / "checkpoints").step + 50)
    print(f"rank {rank}: all ranks were gone after {longest:.1f} s at most")
    assert longest < END_SECONDS


@pytest.mark.long
def test_torchrun_restarts_a_run_whose_ranks_are_killed(tmp_path):
    path = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "-m", "remuda", "train", "ppo", "--env", "CartPole-v1", "--steps", "300_000"]
    command += ["--scheme", "replicas", "--eval.episodes", "0", "--checkpoint.every", "10_000", "--out", str(path)]
    process = prestarted.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = 0
    for victim in (1, 0):
        await_checkpoint(process, path)
        wait_for(lambda seen=seen: load_newest(path / "checkpoints").step > seen, 120)
        ranks = sorted(psutil.Process(process.pid).children(), key=lambda rank: rank.environ()["RANK"])
        seen = load_newest(path / "checkpoints").step + 30_000
        ranks[victim].kill()
        time.sleep(5)
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    assert json.loads((path / "result.json").read_text())["status"] == "complete"
    assert (path / "log.txt").read_text().count("resumed from step-") == 2
