"""Envs by id: MiniGrid, MinAtar, MuJoCo and old Atari ids, and the error if a package is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import prestarted
import pytest

from remuda.envs import EnvSpec, make_envs, probe, resolve
from remuda.envs.catalog import list_envs
from remuda.errors import EnvSpecError


@pytest.fixture
def _hidden_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that none of the families is installed."""
    registered = dict(gymnasium.registry)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("ale_py", "minatar", "minigrid", "mujoco"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "gymnasium.envs.mujoco.mujoco_rendering", raising=False)
    for name, known in registered.items():
        if str(known.entry_point).partition(".")[0] in ("ale_py", "minatar", "minigrid"):
            del gymnasium.registry[name]
    for package in ("ale_py", "minatar", "minigrid", "mujoco"):
        monkeypatch.setitem(sys.modules, package, None)
    yield
    gymnasium.registry.update(registered)


@pytest.mark.usefixtures("_hidden_packages")
@pytest.mark.parametrize(
    ("env", "package", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("PongNoFrameskip-v4", "ale_py", "atari"),
        ("MinAtar/Breakout-v1", "minatar", "minatar"),
        ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid"),
        ("BabyAI-GoToRedBall-v0", "minigrid", "minigrid"),
    ],
)
def test_missing_package_of_an_id_is_named_with_its_extra(env: str, package: str, extra: str) -> None:
    with pytest.raises(EnvSpecError) as caught:
        resolve(env)
    assert str(caught.value) == f"{env} needs the package {package}: pip install 'remuda[{extra}]'."


def test_mujoco_warnings_are_logged_once_and_leave_no_file(tmp_path: Path) -> None:
    code = """
import logging, mujoco
from remuda.envs import resolve
logging.basicConfig(level=logging.WARNING, format="%(name)s %(message)s")
envs = [resolve("HalfCheetah-v5").build() for _ in range(2)]
for time in ("0.1", "2.5"):
    mujoco.get_mju_user_warning()(f"Nan, Inf or huge value in QACC at DOF 0. Time = {time}.")
mujoco.get_mju_user_warning()("Pre-allocated constraint buffer is full.")
"""
    done = prestarted.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == [
        "remuda.envs MuJoCo: Nan, Inf or huge value in QACC at DOF 0. Time = 0.1.",
        "remuda.envs MuJoCo: Pre-allocated constraint buffer is full.",
    ]
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name", "extra"), [("mujoco", "HalfCheetah-v5", "mujoco"), ("Box2D", "LunarLander-v3", "box2d")]
)
def test_missing_package_at_build_is_named_with_its_extra(module: str, name: str, extra: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from remuda.envs import resolve; resolve({name!r}).build()"
    done = prestarted.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert f"EnvSpecError: {name} needs a package" in last
    assert f"pip install 'remuda[{extra}]'" in last


@pytest.mark.usefixtures("_hidden_packages")
def test_old_atari_id_without_the_package_is_unknown() -> None:
    with pytest.raises(EnvSpecError, match="Pong-v4 is not a registered"):
        resolve("Pong-v4")
    assert not any(name.startswith("ALE/") for name, _, _ in list_envs())


@pytest.mark.parametrize("env", ["MiniGrid-Empty-5x5-v0", "BabyAI-GoToRedBall-v0"])
@pytest.mark.parametrize("workers", [0, 1])
def test_minigrid_observations_have_image_and_direction_without_mission(env: str, workers: int) -> None:
    spec = resolve(env)
    assert EnvSpec.from_json(spec.to_json()) == spec
    with make_envs(spec, 2, workers) as envs:
        leaves = dict(envs.observation.leaves())
        assert set(leaves) == {"direction", "image"}
        assert (leaves["image"].shape, leaves["image"].dtype) == ((7, 7, 3), "uint8")
        assert leaves["image"].high is not None
        assert leaves["image"].high.max() == 10
        assert leaves["direction"].n == 4
        envs.reset(seed=3)
        seen = 0
        for _ in range(20):
            slot, step = envs.recv()
            seen = max(seen, int(step.obs.image.max()))
            envs.send(slot, np.array([0, 2]))
        assert 0 < seen <= 10


def test_minigrid_with_another_view_keeps_its_shape() -> None:
    env = resolve("MiniGrid-Empty-5x5-v0", {"agent_view_size": 5}).build()
    assert env.observation_space["image"].shape == (5, 5, 3)
    obs, _ = env.reset(seed=1)
    assert env.observation_space.contains(obs)


@pytest.mark.parametrize(
    ("env", "shape", "action"),
    [("MinAtar/Breakout-v1", (10, 10, 4), "discrete"), ("Hopper-v5", (11,), "box")],
)
def test_other_families_are_found_by_id(env: str, shape: tuple[int, ...], action: str) -> None:
    info = probe(resolve(env))
    assert (info.observation.shape, info.action.kind) == (shape, action)


def test_catalog_lists_every_family() -> None:
    listed = {name: maker for name, _, maker in list_envs()}
    assert listed["Remuda/Mock-v0"] == "remuda.envs.mock"
    for name in ("ALE/Pong-v5", "MinAtar/Breakout-v1", "MiniGrid-Empty-5x5-v0", "BabyAI-GoToRedBall-v0"):
        assert name in listed
    assert [name for name, _, _ in list_envs("remuda/mock")] == ["Remuda/Mock-v0"]
