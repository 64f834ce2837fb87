"""Test the advice on how to resume a run."""

from typing import Any

import pytest

from remuda.runs.advice import as_written, resume_advice


@pytest.mark.parametrize(
    ("env", "net", "advice"),
    [
        ("CartPole-v1", "mlp", "remuda train --resume runs/x"),
        ("my_code:make", "my_code:Net", "remuda train --resume runs/x"),
        ("<MyEnv>", "mlp", 'remuda.resume("runs/x", env=MyEnv) from Python'),
        ("CartPole-v1", "<MyNet>", 'remuda.resume("runs/x", net=MyNet) from Python'),
        ("<Outer.make>", "<<lambda>>", 'remuda.resume("runs/x", env=Outer.make, net=...) from Python'),
        ("<main.<locals>.make>", "mlp", 'remuda.resume("runs/x", env=...) from Python'),
    ],
)
def test_advice_is_a_command_or_a_call(env: str, net: str, advice: str) -> None:
    assert resume_advice("runs/x", {"env": env, "options": {"agent": {"net": net}}}) == advice


@pytest.mark.parametrize("config", [{}, {"env": None, "options": 3}, {"options": {"agent": []}}])
def test_advice_for_a_damaged_configuration_is_the_command(config: dict[str, Any]) -> None:
    assert resume_advice("runs/x", config) == "remuda train --resume runs/x"


def test_a_callable_without_a_name_is_replaced_by_a_placeholder() -> None:
    assert as_written("<<lambda>>", "Net") == "Net"
