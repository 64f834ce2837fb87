"""Pictures of envs where there is no screen."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remuda.errors import EnvSpecError
from remuda.runs import video as film


@pytest.mark.parametrize(
    ("libraries", "given", "chosen"),
    [
        ({"EGL", "OpenGL", "OSMesa"}, {}, "egl"),
        ({"EGL", "OSMesa"}, {}, "osmesa"),  # MuJoCo would look for both halves of the former, and fail
        ({"OSMesa"}, {}, "osmesa"),
        (set(), {}, None),
        ({"EGL", "OpenGL"}, {"DISPLAY": ":0"}, None),
        ({"EGL", "OpenGL"}, {"MUJOCO_GL": "glfw"}, "glfw"),
    ],
)
def test_mujoco_draws_by_what_is_there_unless_somebody_has_chosen(
    libraries: set[str], given: dict[str, str], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(film, "find_library", lambda name: name if name in libraries else None)
    monkeypatch.setattr(film, "sys", SimpleNamespace(platform="linux"))
    film.draw_without_screen()
    assert os.environ.get("MUJOCO_GL") == chosen
    assert os.environ["SDL_VIDEODRIVER"] == "dummy"
    for name in ("MUJOCO_GL", "SDL_VIDEODRIVER"):
        os.environ.pop(name, None)


def test_what_cannot_be_drawn_is_named() -> None:
    def fail() -> Any:
        raise RuntimeError("no platform library")

    for render, reason in ((fail, "RuntimeError: no platform library"), (lambda: None, "returned a NoneType")):
        with pytest.raises(EnvSpecError, match=rf"Hopper-v5 cannot be drawn here .*{reason}.*MUJOCO_GL"):
            film.draw(SimpleNamespace(render=render, spec=SimpleNamespace(id="Hopper-v5")))
    assert film.draw(SimpleNamespace(render=lambda: np.zeros((2, 2, 3)), spec=None)).shape == (2, 2, 3)
