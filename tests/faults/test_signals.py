"""A run that is stopped leaves a checkpoint to resume from, and nothing in the process table or /dev/shm."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import prestarted
import psutil
import pytest
from processes import all_gone, wait_for

from remuda.cli import main
from remuda.learning.checkpoint import load_newest
from remuda.runs.signals import STOPPING

TESTS = Path(__file__).parents[1]


def start(path: Path, *arguments: str, env: str = "CartPole-v1", algo: str = "ppo") -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "remuda",
        "train",
        algo,
        "--env",
        env,
        "--out",
        str(path),
        "--steps",
        "5_000_000",
    ]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return prestarted.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def has_trained(path: Path) -> bool:
    metrics = path / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def stop(process: subprocess.Popen, number: signal.Signals) -> tuple[str, str]:
    """Send the signal, and return the output of the process."""
    process.send_signal(number)
    return process.communicate(timeout=60)


def family(process: subprocess.Popen) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


@pytest.mark.parametrize(
    ("scheme", "number"),
    [
        ("serial", signal.SIGINT),
        ("parallel", signal.SIGTERM),
        pytest.param("serial", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("parallel", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_one_signal_leaves_a_resumable_checkpoint(tmp_path, scheme, number):
    path, shared_before = tmp_path / "run", set(os.listdir("/dev/shm"))
    process = start(path, "--scheme", scheme, "--log.every", "256", "--checkpoint.every", "0")
    wait_for(lambda: has_trained(path))
    members = family(process)
    assert len(members) > (2 if scheme == "parallel" else 0)
    out, err = stop(process, number)
    assert process.returncode == 128 + number, err
    assert err == f"{number.name}: {STOPPING}\n"
    assert f"remuda train --resume {path}" in out
    wait_for(lambda: all_gone(members), 2)
    assert set(os.listdir("/dev/shm")) == shared_before
    result = json.loads((path / "result.json").read_text())
    assert result["status"] == f"stopped by {number.name}"
    found = load_newest(path / "checkpoints")
    assert found.step == result["steps"] > 0

    # The run can be resumed from there, with a smaller budget of steps.
    assert (
        main(["train", "--resume", str(path), "--steps", str(found.step + 600), "--quiet", "--eval.episodes", "0"])
        == 0
    )
    after = json.loads((path / "result.json").read_text())
    assert after["status"] == "complete"
    assert after["updates"] > result["updates"]
    steps = [json.loads(line)["time/total_timesteps"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)), "the log must not repeat steps"


def test_signal_to_all_processes_keeps_workers_until_the_run_stops_them(tmp_path):
    """timeout, systemd and Slurm signal all processes: the run must still be able to save the states of its envs."""
    path = tmp_path / "run"
    process = start(path, "--scheme", "parallel", "--log.every", "256", "--checkpoint.every", "0")
    wait_for(lambda: has_trained(path))
    members = family(process)
    for member in reversed(members):
        member.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "lost" not in out + err + (path / "log.txt").read_text()
    assert "sampler" in load_newest(path / "checkpoints").blobs
    wait_for(lambda: all_gone(members), 2)


def test_processes_started_by_an_env_can_be_terminated():
    """SIGTERM ends both a fork of a worker and another program that it started."""
    script = """
import multiprocessing, os, signal, subprocess, time
from remuda.processes.fork_server import stay_when_terminated
stay_when_terminated()
os.kill(os.getpid(), signal.SIGTERM)
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
forked.start()
other = subprocess.Popen(["sleep", "60"])
for each in (forked, other):
    each.terminate()
forked.join(10)
print(forked.exitcode, other.wait(10))
"""
    done = prestarted.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["-15", "-15"], done.stderr


def interrupt(process: subprocess.Popen, path: Path) -> None:
    """Send SIGINT, which must be acknowledged before the run stops and saves."""
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == f"SIGINT: {STOPPING}\n"
    assert not (path / "result.json").exists()
    assert process.poll() is None


def test_signal_during_a_slow_rollout_keeps_the_last_complete_round(tmp_path):
    """The signal interrupts a rollout: the checkpoint holds the end of the round before it, with its env states."""
    path = tmp_path / "run"
    arguments = ["--sampler.envs", "2", "--algo.n_steps", "40", "--algo.batch_size", "40", "--checkpoint.every", "0"]
    arguments += ["--log.every", "1"]
    process = start(path, *arguments, "--envs.kwargs", '{"seconds": 0.02}', env="own_things:slow_saveable")
    wait_for(lambda: has_trained(path))
    interrupt(process, path)
    process.communicate(timeout=30)
    assert process.returncode == 130
    found = load_newest(path / "checkpoints")
    assert found.progress["rounds"] == 1
    assert found.progress["inexact"] is None
    assert "sampler" in found.blobs


@pytest.mark.parametrize("how", ["sleep", pytest.param("loop", marks=pytest.mark.long)])
def test_signal_while_a_local_env_hangs_names_it_and_keeps_the_last_round(tmp_path, how):
    path = tmp_path / "run"
    arguments = ["--sampler.envs", "2", "--algo.n_steps", "16", "--algo.batch_size", "32", "--log.every", "1"]
    kwargs = json.dumps({"after": 200, "how": how})
    process = start(path, *arguments, "--envs.kwargs", kwargs, env="own_things:hanging")
    wait_for(lambda: has_trained(path))
    wait_for(lambda: is_still(path))
    interrupt(process, path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "own_things:hanging: an env did not return from its call after a stop signal" in out
    assert "own_things.py:" in out, "the output must name the file and the line"
    assert load_newest(path / "checkpoints").progress["rounds"] > 1


def is_still(path: Path) -> bool:
    """Return whether no metrics were written for a second."""
    before = (path / "metrics.jsonl").stat().st_size
    time.sleep(1.0)
    return (path / "metrics.jsonl").stat().st_size == before


def test_a_signal_while_a_worker_hangs_does_not_wait_for_its_time_limit(tmp_path):
    path = tmp_path / "run"
    arguments = ["--envs.kwargs", '{"seconds": 1000}', "--scheme", "parallel", "--envs.step_timeout", "900"]
    process = start(path, *arguments, env="own_things:slow_later")
    wait_for(lambda: has_begun(path))
    members = family(process)
    time.sleep(1.0)
    _, err = stop(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM, err
    wait_for(lambda: all_gone(members), 2)


def test_a_signal_while_workers_build_their_envs_leaves_nothing(tmp_path):
    path = tmp_path / "run"
    process = start(path, "--scheme", "parallel", "--sampler.envs", "8", env="own_things:slow_to_build")
    wait_for(lambda: (path / "log.txt").exists() and (path / "log.txt").stat().st_size > 0)
    members = family(process)
    time.sleep(0.5)
    _, err = stop(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1] == "remuda: stopped by SIGTERM before training began: nothing was kept."
    assert not path.exists()
    wait_for(lambda: all_gone(members), 2)


def test_signal_during_a_long_round_of_updates_keeps_the_updates_made(tmp_path):
    """A minute of updates ends early: the round is saved with the reason why a resumed run is not bit-equal."""
    path = tmp_path / "run"
    arguments = ["--algo.n_steps", "512", "--algo.batch_size", "64", "--algo.n_epochs", "200"]
    process = start(path, *arguments, "--agent.hidden", "512,512")
    wait_for(lambda: has_begun(path))
    time.sleep(2.0)
    _, err = stop(process, signal.SIGINT)
    assert process.returncode == 130, err
    found = load_newest(path / "checkpoints")
    assert found.progress["rounds"] == 1
    assert "stopped before all of its updates were made" in found.progress["inexact"]


def test_full_disk_loses_checkpoints_and_metrics_but_does_not_stop_training(tmp_path):
    """The limit of 30 kB per file is smaller than a checkpoint and smaller than the metrics of the run."""
    path = tmp_path / "run"
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); "
    limited += "from remuda.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", limited, "train", "ppo", "--env", "CartPole-v1", "--steps", "6000"]
    command += ["--out", str(path), "--checkpoint.every", "1000", "--log.every", "256", "--eval.episodes", "2"]
    done = prestarted.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "what was learned could not be saved after 6," in done.stderr, "the error must report the failed save"
    assert "warning: no checkpoint was written" in done.stdout
    assert "make room" in done.stdout
    assert json.loads((path / "result.json").read_text())["status"] == "failed"
    assert list((path / "checkpoints").iterdir()) == [], "no partial checkpoint may remain"
    for line in (path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def has_begun(path: Path) -> bool:
    """Return whether the log has its first line, which is written when the first rollout begins."""
    return (path / "log.txt").exists() and "begins" in (path / "log.txt").read_text()


def test_killed_worker_is_replaced_logged_and_counted(tmp_path):
    path = tmp_path / "run"
    process = start(path, "--scheme", "parallel", "--log.every", "256")
    wait_for(lambda: has_trained(path))
    workers = [p for p in family(process)[1:] if not p.children()]
    workers[0].kill()
    lines = len((path / "metrics.jsonl").read_text().splitlines())
    wait_for(lambda: len((path / "metrics.jsonl").read_text().splitlines()) > lines + 3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    last = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rollout/restarts"] == 4, "half of the eight envs lived in that worker"
    assert "warning: " in out
    assert "warning: " in (path / "log.txt").read_text()


@pytest.mark.parametrize("scheme", ["serial", "parallel"])
def test_two_signals_stop_at_once(tmp_path, scheme):
    """The round does not end by itself, so a single signal would end the run after 5 s and save what was learned."""
    path = tmp_path / "run"
    arguments = ["--scheme", scheme, "--sampler.envs", "2", "--algo.n_steps", "16", "--algo.batch_size", "32"]
    arguments += ["--log.every", "1", "--checkpoint.every", "0", "--envs.step_timeout", "900"]
    process = start(path, *arguments, "--envs.kwargs", '{"after": 200, "how": "sleep"}', env="own_things:hanging")
    wait_for(lambda: has_trained(path))
    wait_for(lambda: is_still(path))
    members = family(process)
    interrupt(process, path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "remuda: stopped at once; nothing was saved after the last checkpoint\n"
    assert not any(path.glob("checkpoints/step-*"))
    wait_for(lambda: all_gone(members), 2)


def test_ctrl_c_sent_to_the_process_group_stops_the_run_gracefully(tmp_path):
    """A terminal sends Ctrl-C to every process of the group; workers must ignore it."""
    path = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "remuda", "train", "ppo", "--env", "CartPole-v1", "--scheme", "parallel"]
    process = prestarted.Popen(
        [*command, "--out", str(path), "--steps", "5_000_000", "--log.every", "256"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    wait_for(lambda: has_trained(path))
    members = family(process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == f"SIGINT: {STOPPING}\n", "workers must print nothing"
    assert load_newest(path / "checkpoints").step > 0
    assert json.loads((path / "result.json").read_text())["status"] == "stopped by SIGINT"
    wait_for(lambda: all_gone(members), 2)


def test_kill_9_leaves_no_orphan(tmp_path):
    path, shared_before = tmp_path / "run", set(os.listdir("/dev/shm"))
    process = start(path, "--scheme", "parallel", "--log.every", "256", "--checkpoint.every", "256")
    wait_for(lambda: has_trained(path) and (path / "checkpoints/latest").exists())
    members = family(process)
    process.kill()
    process.communicate(timeout=10)
    wait_for(lambda: all_gone(members), 2)
    assert set(os.listdir("/dev/shm")) == shared_before
    step = load_newest(path / "checkpoints").step
    assert main(["train", "--resume", str(path), "--steps", str(step + 300), "--quiet", "--eval.episodes", "0"]) == 0


def test_run_in_a_thread_works_without_signal_handlers(tmp_path):
    import threading

    import remuda

    results = []

    def work():
        run = remuda.train("ppo", "CartPole-v1", steps=300, out=tmp_path / "run", quiet=True, eval={"episodes": 0})
        results.append(run.result["status"])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert results == ["complete"]


def test_signal_handlers_of_the_caller_are_restored(tmp_path):
    import remuda

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    remuda.train("ppo", "CartPole-v1", steps=300, out=tmp_path / "run", quiet=True, eval={"episodes": 0})
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
