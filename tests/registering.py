"""Registries as a test finds them: what it registers is forgotten at its end."""

from __future__ import annotations

import pytest

from remuda import registry


def forget_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registries forget, when `monkeypatch` is undone, what is registered from now on."""
    for each in (registry._algorithms, registry._schemes, registry._env_backends):
        each.loaded()
        monkeypatch.setattr(each, "_entries", dict(each._entries))
