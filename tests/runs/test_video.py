"""Test rendering of envs without a display."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remuda.errors import EnvSpecError
from remuda.runs import video


@pytest.mark.parametrize(
    ("libraries", "given", "chosen"),
    [
        ({"EGL", "OpenGL", "OSMesa"}, {}, "egl"),
        ({"EGL", "OSMesa"}, {}, "osmesa"),  # MuJoCo needs both libraries for EGL
        ({"OSMesa"}, {}, "osmesa"),
        (set(), {}, None),
        ({"EGL", "OpenGL"}, {"DISPLAY": ":0"}, None),
        ({"EGL", "OpenGL"}, {"MUJOCO_GL": "glfw"}, "glfw"),
    ],
)
def test_mujoco_renders_with_the_installed_library_unless_the_user_chose_one(
    libraries: set[str], given: dict[str, str], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(video, "find_library", lambda name: name if name in libraries else None)
    monkeypatch.setattr(video, "sys", SimpleNamespace(platform="linux"))
    video.use_headless_rendering()
    assert os.environ.get("MUJOCO_GL") == chosen
    assert os.environ["SDL_VIDEODRIVER"] == "dummy"
    for name in ("MUJOCO_GL", "SDL_VIDEODRIVER"):
        os.environ.pop(name, None)


def test_an_env_that_cannot_be_rendered_is_named() -> None:
    def fail() -> Any:
        raise RuntimeError("no platform library")

    for render, reason in ((fail, "RuntimeError: no platform library"), (lambda: None, "returned a NoneType")):
        with pytest.raises(EnvSpecError, match=rf"Hopper-v5 cannot be rendered here .*{reason}.*MUJOCO_GL"):
            video.render_frame(SimpleNamespace(render=render, spec=SimpleNamespace(id="Hopper-v5")))
    assert video.render_frame(SimpleNamespace(render=lambda: np.zeros((2, 2, 3)), spec=None)).shape == (2, 2, 3)
