"""Restore the registries of algorithms, schemes and env backends at the end of a test."""

from __future__ import annotations

import pytest

from remuda import registry


def forget_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove everything that is registered from now on when `monkeypatch` is undone."""
    for each in (registry._algorithms, registry._schemes, registry._env_backends):
        each.loaded()
        monkeypatch.setattr(each, "_entries", dict(each._entries))
