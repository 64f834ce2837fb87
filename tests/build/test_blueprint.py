"""Test that blueprints, which are JSON, build the same envs and the same agent as the run itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from remuda.build.algorithm import make_algorithm
from remuda.build.blueprint import Role, build, make_async_blueprints, make_blueprints
from remuda.build.envs import agent_view
from remuda.build.nets import find_net
from remuda.config.resolve import resolve_config
from remuda.errors import EnvSpecError


def blueprints(algo: str, env: str, workers: int, **groups: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return the run's own agent, and its blueprints after conversion to JSON and back."""
    config, spec, info = resolve_config({"algo": algo, "env": env, "seed": 3}, {"sampler": {"envs": 6}, **groups})
    seen = agent_view(config, info)
    own: Any = make_algorithm(config, seen, find_net(config.agent))
    return own.agent, json.loads(json.dumps(make_blueprints(config, spec, seen, workers, None)))


@pytest.mark.parametrize(
    ("algo", "env", "groups"),
    [
        ("a2c", "CartPole-v1", {}),
        ("dqn", "CartPole-v1", {"agent": {"prev_action": True}}),
        ("sac", "Pendulum-v1", {}),
    ],
)
def test_every_role_builds_its_parts_of_the_run(algo: str, env: str, groups: dict[str, Any]) -> None:
    own, plans = blueprints(algo, env, 2, **groups)
    assert [(plan["first"], plan["last"]) for plan in plans] == [(0, 3), (3, 6)]
    roles: tuple[Role, ...] = ("agent", "envs", "sampler")
    for role in roles:
        built = build(plans[1], role)
        assert (built.envs is None) is (role == "agent")
        assert (built.agent is None) is (role == "envs")
        assert (built.exploration is None) is (role != "sampler")
        if built.agent is not None:
            mine = built.agent.state_dict()
            assert mine.keys() == own.state_dict().keys()
            assert all(torch.equal(value, mine[name]) for name, value in own.state_dict().items())
        if built.envs is not None:
            assert built.envs.num_envs == 3
            built.envs.close()


def test_a_worker_with_different_spaces_is_refused() -> None:
    _, plans = blueprints("a2c", "CartPole-v1", 1)
    plans[0]["spaces"]["observation"] = "box float32[7]"
    with pytest.raises(
        EnvSpecError, match=r"observation is box float32\[4\] in a worker, and box float32\[7\] where"
    ):
        build(plans[0], "envs")


def test_an_inference_process_has_all_envs_in_groups() -> None:
    groups = {"sampler": {"envs": 6, "inference": "central"}}
    settings = {"algo": "impala", "env": "CartPole-v1", "scheme": "async"}
    config, spec, info = resolve_config(settings, {**groups, "algo": {"batch_size": 6}})
    (plan,) = make_async_blueprints(config, spec, info, 3)
    assert (plan["first"], plan["last"], plan["groups"]) == (0, 6, 3)
