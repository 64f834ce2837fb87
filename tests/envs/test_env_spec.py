"""All forms in which an env can be given, how workers get it, and the errors for everything else."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import counting
import gymnasium
import numpy as np
import prestarted
import pytest

from remuda.envs import EnvSpec, LocalEnvs, PooledEnvs, examine, probe, resolve
from remuda.errors import EnvSpecError


def refused(env: Any, kwargs: dict[str, Any] | None = None, build: bool = True) -> str:
    use = EnvSpec.build if build else EnvSpec.to_json
    with pytest.raises(EnvSpecError) as caught:
        use(resolve(env, kwargs))
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))
    return text


@pytest.mark.parametrize(
    ("env", "kwargs", "kind"),
    [
        ("CartPole-v1", {}, "CartPoleEnv"),
        ("gymnasium:CartPole-v1", {}, "CartPoleEnv"),
        ("counting:make", {"lengths": [7]}, "CountingEnv"),
        ("counting:CountingEnv", {"lengths": [7]}, "CountingEnv"),
        (counting.make, {"lengths": [7]}, "CountingEnv"),
        (counting.CountingEnv, {"lengths": [7]}, "CountingEnv"),
        (counting.Outer.make, {"lengths": [7]}, "CountingEnv"),
        (functools.partial(counting.make, lengths=[7]), {}, "CountingEnv"),
        (functools.partial(functools.partial(counting.make, lengths=[9]), lengths=[7]), {}, "CountingEnv"),
    ],
)
def test_every_form_of_env_is_built_directly_and_from_json(env: Any, kwargs: dict[str, Any], kind: str) -> None:
    spec = resolve(env, kwargs)
    for each in (spec, EnvSpec.from_json(spec.to_json())):
        built = each.build()
        assert type(built.unwrapped).__name__ == kind
        if kind == "CountingEnv":
            assert built.unwrapped.lengths == [7]
        assert each.label == spec.label
        built.close()


def test_labels_of_ids_paths_and_partials() -> None:
    assert resolve("CartPole-v1").label == "CartPole-v1"
    assert resolve("counting:make").label == "counting:make"
    assert resolve(functools.partial(counting.make)).label == "make"


def test_extra_arguments_are_passed_to_the_env() -> None:
    env = resolve("counting:make", {"lengths": [2]}).build(render_mode="rgb_array")
    assert env.render_mode == "rgb_array"


@pytest.mark.parametrize(
    ("env", "kwargs", "parts"),
    [
        ("CartPole-v9", {}, ["CartPole-v9 is not", "did you mean", "CartPole-v1"]),
        ("CarPole-v1", {}, ["did you mean", "CartPole-v1"]),
        ("FrozenLake-v0", {}, ["retired", "FrozenLake-v1"]),
        ("no id at all", {}, ["is not a registered"]),
        ("", {}, ["is not an env"]),
        (3, {}, ["env=3 is not an env"]),
        ("nosuchmodule.sub:make", {}, ["module nosuchmodule.sub was not found", "PYTHONPATH"]),
        ("counting:nothing", {}, ["counting has no nothing", "did you mean make_nothing"]),
        ("counting:make_nothing", {}, ["builtins.str, not a gymnasium.Env"]),
        ("counting:make_failing", {}, ["OSError: no display"]),
        ("counting:make", {"size": 3}, ["size=3", "change envs.kwargs"]),
        ("counting:make_failing", {"size": 3}, ["unexpected keyword argument 'size'"]),
        ("CartPole-v1", {"size": 3}, ["size=3", "unexpected keyword argument"]),
    ],
)
def test_errors_while_building_are_one_sentence(env: Any, kwargs: dict[str, Any], parts: list[str]) -> None:
    text = refused(env, kwargs)
    for part in parts:
        assert part in text


def test_module_that_fails_to_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfway.py").write_text("import nosuchdependency\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "needs nosuchdependency" in refused("halfway:make")
    assert "ZeroDivisionError" in refused("broken:make")


def test_definitions_that_workers_cannot_find_are_refused() -> None:
    def local() -> gymnasium.Env[Any, Any]:
        return counting.make()

    remedy = "scheme=serial"
    assert remedy in refused(lambda: counting.make(), build=False)
    assert remedy in refused(local, build=False)
    assert remedy in refused(counting.Outer().bound, build=False)
    assert "by keyword" in refused(functools.partial(counting.make, [3]), build=False)
    assert "lengths=(7,)" in refused(counting.make, {"lengths": (7,)}, build=False)
    assert "once=<object" in refused(counting.make, {"once": object()}, build=False)
    LocalEnvs(resolve(local), 1).close()  # a local function works in this process


class TextEnv(counting.CountingEnv):
    def __init__(self, which: str = "observation") -> None:
        super().__init__()
        setattr(self, f"{which}_space", gymnasium.spaces.Text(8))


@pytest.mark.parametrize("which", ["observation", "action"])
def test_unsupported_spaces_are_refused(which: str) -> None:
    spec = resolve(TextEnv, {"which": which})
    for build in (lambda: LocalEnvs(spec, 1), lambda: probe(spec)):
        with pytest.raises(EnvSpecError, match=rf"TextEnv has the {which} space Text.* are supported"):
            build()


def test_probe_takes_a_step_in_spaces_with_entries() -> None:
    action = {"dict": {"move": {"discrete": 3, "start": 1}, "force": {"box": [2], "low": 0.5, "high": 1.0}}}
    info = probe(resolve("Remuda/Mock-v0", {"observation": {"tuple": [{"box": [2]}]}, "action": action}))
    assert [path for path, _ in info.action.leaves()] == ["force", "move"]
    assert info.observation.kind == "tuple"


def test_probe_returns_properties_of_an_env() -> None:
    info = probe(resolve("CartPole-v1"))
    assert (info.label, info.max_episode_steps, info.fps) == ("CartPole-v1", 500, 50)
    assert (info.observation.shape, info.observation.dtype) == ((4,), "float32")
    assert (info.action.kind, info.action.n) == ("discrete", 2)
    assert "rgb_array" in info.render_modes
    pendulum = probe(resolve("Pendulum-v1")).action
    assert (pendulum.kind, pendulum.shape, pendulum.dtype) == ("box", (1,), "float32")
    assert pendulum.low is not None
    assert pendulum.low.tolist() == [-2.0]
    plain = probe(resolve("counting:make", {"action": "unbounded"}))
    assert plain.max_episode_steps is None
    assert plain.action.high is not None
    assert np.isinf(plain.action.high).all()
    with pytest.raises(
        EnvSpecError, match=r"raised RuntimeError: told to fail \(.*counting\.py:\d+, in misbehave\): fix the env"
    ):
        probe(resolve("counting:make", {"fault": "raise"}))


def test_ids_registered_by_the_program_are_built_in_workers() -> None:
    gymnasium.register("CountingForWorkers-v0", counting.CountingEnv, max_episode_steps=2, kwargs={"lengths": [9]})
    try:
        with PooledEnvs(resolve("CountingForWorkers-v0", {"ends": "terminate"}), 1, 1) as envs:
            envs.reset(1)
            for _ in range(2):
                envs.recv()
                envs.send(0, np.zeros(1, np.int64))
            _, step = envs.recv()
            assert bool(step.truncated[0])  # by the registered limit of 2 steps
    finally:
        del gymnasium.registry["CountingForWorkers-v0"]


SCRIPT = """
import sys
import counting, numpy
from remuda.envs import PooledEnvs, resolve

def make():
    return counting.make(lengths=[2])

def main():
    with PooledEnvs(resolve(make), 2, 2) as envs:
        envs.reset(1)
        slot, step = envs.recv()
        print("rows", step.obs.shape)

"""

OBJECT = "import queue\nlengths = queue.LifoQueue()\nfor _ in range(9):\n    lengths.put([2])\n\n"


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    here = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{here / 'src'}:{here / 'tests'}", "PATH": ""}
    return prestarted.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=30, env=environment, check=False
    )


def test_function_of_the_main_script_is_built_in_workers(tmp_path: Path) -> None:
    done = run_script(tmp_path / "guarded.py", SCRIPT + "if __name__ == '__main__':\n    main()\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "rows (2, 3)\n", "")


def test_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    done = run_script(tmp_path / "unguarded.py", SCRIPT + "print('once')\nmain()\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\nrows (2, 3)\n", "")


def test_script_whose_env_uses_an_object_is_imported_by_workers(tmp_path: Path) -> None:
    """The object has no source text, so every worker creates it again by importing the script."""
    text = SCRIPT.replace("lengths=[2]", "lengths=lengths.get()").replace("def make", OBJECT + "def make")
    done = run_script(tmp_path / "guarded.py", text + "if __name__ == '__main__':\n    main()\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "rows (2, 3)\n", "")


@pytest.mark.parametrize("call", ["main()", "sys.exit(main())", "1 / 0 if __name__ != '__main__' else main()"])
def test_script_that_is_imported_by_workers_needs_a_guard(tmp_path: Path, call: str) -> None:
    text = SCRIPT.replace("lengths=[2]", "lengths=lengths.get()").replace("def make", OBJECT + "def make")
    done = run_script(tmp_path / "unguarded.py", text + call)
    assert done.returncode == 1
    first = next(line for line in done.stderr.splitlines() if line.startswith("remuda.errors.EnvSpecError"))
    assert first.endswith("under if __name__ == '__main__':")


def test_function_typed_into_an_interpreter_is_refused() -> None:
    code = "from remuda.envs import resolve\ndef make(): pass\nresolve(make).to_json()"
    here = Path(__file__).parents[2]
    done = prestarted.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PYTHONPATH": str(here / "src"), "PATH": ""},
        check=False,
    )
    assert "make cannot be used in worker processes, as" in done.stderr
    assert "the source of make is not kept" in done.stderr


def test_examine_measures_a_correct_env() -> None:
    report = examine(resolve("CartPole-v1"), seconds=0.2)
    assert report.steps_per_second > 0
    assert report.reset_seconds > 0
    assert report.mean_episode_length is not None
    assert 8 < report.mean_episode_length < 60
    assert report.saw_termination
    assert not report.saw_truncation
    assert report.is_repeatable is True
    assert report.problems == []
    assert "Discrete(2)" in report.action


@pytest.mark.parametrize(
    ("env", "kwargs", "part"),
    [
        ("counting:make_failing", {}, "no display"),
        ("counting:make", {"fault": "raise"}, "told to fail"),
        ("counting:make", {"fault": "shape", "at": 1}, "observation has shape (5,)"),
        ("counting:make", {"fault": "sys.exit", "at": 3}, "SystemExit"),
        (TextEnv, {}, "are supported"),
        ("counting:make", {"fault": "nan", "at": 1}, "observation is nan at [1]"),
    ],
)
def test_examine_reports_problems_and_never_raises(env: Any, kwargs: dict[str, Any], part: str) -> None:
    report = examine(resolve(env, kwargs), seconds=0.05)
    assert any(part in problem for problem in report.problems)
