"""Tests of networks compiled by torch: the same run except for rounding, and an error without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import remuda
from remuda.errors import ConfigError
from remuda.learning.checkpoint import load_newest


def trained(out: Path, **agent: Any) -> dict[str, torch.Tensor]:
    algo = {"n_steps": 32, "n_epochs": 1}
    remuda.train(
        "ppo", env="CartPole-v1", steps=256, seed=1, algo=algo, agent=agent, out=out, eval={"episodes": 0}, quiet=True
    )
    found: dict[str, torch.Tensor] = load_newest(out / "checkpoints").learner["algorithm"]
    return found


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning"
)  # torch.compile uses parts of torch.jit, which is deprecated
@pytest.mark.parametrize("core", [None, "lstm"])
def test_compiled_run_equals_the_eager_run(tmp_path: Path, core: str | None) -> None:
    eager = trained(tmp_path / "eager", fast_path=False, core=core)
    torch._dynamo.reset()  # otherwise graphs compiled by another test would be reused
    torch._dynamo.utils.counters.clear()
    compiled = trained(tmp_path / "compiled", compile=True, core=core)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert eager.keys() == compiled.keys()
    for name, value in eager.items():
        torch.testing.assert_close(torch.as_tensor(compiled[name]), torch.as_tensor(value), rtol=1e-3, atol=1e-4)


def test_missing_compiler_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler: install g\\+\\+, or leave it out"):
        trained(tmp_path / "run", compile=True)
