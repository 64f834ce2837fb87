"""Test runs whose env and net are defined in a script or a notebook, and how they are resumed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import prestarted
import pytest
from notebook import Notebook

import remuda
from remuda.build.nets import describe_net
from remuda.cli import main
from remuda.config.resolve import resolve_config
from remuda.errors import CheckpointError, ConfigError

HERE = Path(__file__).parents[2]
DEFINITIONS = """
import math
import sys

import gymnasium
import numpy as np
import remuda
import torch
from torch import nn

LENGTH = 5
WIDTHS = {"first": 16}

def spaces(count):
    return gymnasium.spaces.Box(-1, 1, (count,)), gymnasium.spaces.Discrete(2)

class BaseEnv(gymnasium.Env):
    def __init__(self):
        self.observation_space, self.action_space = spaces(LENGTH)

class MyEnv(BaseEnv):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(LENGTH, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full(LENGTH, 0.1, np.float32), float(action), self.count == LENGTH, False, {}

class BaseNet(nn.Module):
    def forward(self, obs):
        return torch.tanh(self.body(obs))

class MyNet(BaseNet):
    def __init__(self, shape):
        super().__init__()
        self.body = nn.Linear(math.prod(shape), WIDTHS["first"])
"""
# The script has no guard, so a worker that loaded it as a module would train again.
TRAINING = """
print("the body runs")
for scheme in sys.argv[2:]:
    name, algo, evaluation = "ppo", {"n_steps": 4, "batch_size": 8}, {"episodes": 1}
    sampler = {"envs": 2, "workers": 2, "decorrelate": 0, "inference": "workers"}
    if scheme == "async":           # the inference process has env workers of its own, and there is an evaluator
        name, algo, evaluation["cpu_fraction"], sampler["inference"] = "dqn", {"learning_starts": 8}, 0.1, "central"
    run = remuda.train(name, MyEnv, net=MyNet, steps=40, scheme=scheme, out=f"{sys.argv[1]}/{scheme}", quiet=True,
                       algo=algo, eval=evaluation, sampler=sampler, log={"tensorboard": False})
    assert run.result["status"] == "complete", run.result
    print(scheme, run.result["eval"]["mean_length"])
"""
STOPPING = """
run = remuda.train("ppo", MyEnv, net=MyNet, steps=40, out=sys.argv[1], callbacks=lambda round: True, quiet=True,
                   sampler={"envs": 2, "decorrelate": 0}, algo={"n_steps": 4, "batch_size": 8},
                   log={"tensorboard": False}, eval={"episodes": 0})
print(run.result["status"])
run = remuda.resume(sys.argv[1], env=MyEnv, net=MyNet, quiet=True)
print(run.result["status"], remuda.load(sys.argv[1], net=MyNet).act(np.zeros(LENGTH))[0] in (0, 1))
"""


def execute(
    path: Path, text: str, *arguments: str, run: Callable[..., Any] = prestarted.run
) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    return run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(HERE / "src"), "PATH": "", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        cwd=path.parent,
    )


@pytest.mark.parametrize(("scheme", "run"), [("parallel", subprocess.run), ("async", prestarted.run)])
def test_a_script_without_a_guard_trains_in_workers(tmp_path: Path, scheme: str, run: Callable[..., Any]) -> None:
    """One run is in a new interpreter with a new fork server, as for users."""
    done = execute(tmp_path / "script.py", DEFINITIONS + TRAINING, str(tmp_path), scheme, run=run)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"the body runs\n{scheme} 5.0\n"


def test_log_and_errors_name_the_call_that_resumes_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    done = execute(tmp_path / "script.py", DEFINITIONS + STOPPING, str(run))
    assert done.stdout == "stopped by callback\ncomplete True\n", done.stderr
    again, log = f'("{run}", env=MyEnv, net=MyNet)', (run / "log.txt").read_text()
    assert f"continue with: remuda.resume{again} from Python\n" in log
    assert "train --resume" not in log
    for command, call in {
        ("train", "--resume", str(run)): f"remuda.resume{again}.",
        ("train", "ppo", "--env", "CartPole-v1", "--out", str(run)): f"with remuda.resume{again} from Python, or",
        ("eval", str(run)): f"remuda.Run{again}.evaluate().",
        ("record", str(run)): f"remuda.Run{again}.record().",
    }.items():
        assert main(list(command)) == 2
        said = capsys.readouterr().err.strip()
        assert call in said, said
        assert "\n" not in said
    with pytest.raises(CheckpointError) as caught:
        remuda.load(run)
    assert str(caught.value) == (
        f'run {run} was made with net=<MyNet>, which has no import path: from Python, use remuda.load("{run}", '
        "net=MyNet)."
    )


def test_cells_of_a_notebook_train_in_workers(tmp_path: Path) -> None:
    with closing(Notebook()) as cell:
        for text in DEFINITIONS.replace("\nclass ", "\n#CELL\nclass ").split("#CELL"):
            made = cell(text)
        run = remuda.train(
            "ppo", made["MyEnv"], net=made["MyNet"], steps=40, scheme="parallel", out=tmp_path / "run", quiet=True,
            algo={"n_steps": 4, "batch_size": 8}, log={"tensorboard": False}, eval={"episodes": 1},
            sampler={"envs": 2, "workers": 2, "inference": "workers"},
        )  # fmt: skip
        assert run.result["eval"]["mean_length"] == 5


def test_a_net_that_holds_an_object_is_refused_in_one_sentence() -> None:
    with closing(Notebook()) as cell:
        cell(DEFINITIONS)
        made = cell("RNG = np.random.default_rng(0)\ndef make_net(shape): return MyNet(shape, RNG)")
        config, _, _ = resolve_config(
            {"algo": "ppo", "env": "CartPole-v1", "scheme": "parallel"}, {"agent": {"net": "<make_net>"}}
        )
        with pytest.raises(ConfigError) as caught:
            describe_net(config, made["make_net"])
    assert str(caught.value) == (
        "agent.net=<make_net> cannot be used in other processes, as it refers to something that has no source text "
        "(RNG is an object of type Generator): define it in a module file, e.g. nets.py, and pass net=nets.make_net, "
        "or use sampler.inference=central."
    )
