"""Tests that agents with memory give the same outputs row by row and unrolled, also over resets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollouts import box, discrete, make_agent
from torch import Tensor, nn

from remuda.agents import Memory, PolicyAgent
from remuda.core import Space
from remuda.data import leaves, map_tree, resets, stack
from remuda.nets import GRUState, LSTMState, make_net

T, B, SIZE = 9, 4, 10
PAIR = Space("tuple", entries={"item0": discrete(3), "item1": box((2,))})
NESTED = Space("dict", entries={"gear": discrete(5), "place": box((2, 2))}, keys=("gear", "place"))
CORES = pytest.mark.parametrize("core", ["lstm", "gru"])
TRUNKS = pytest.mark.parametrize("shared", [False, True], ids=["two trunks", "one trunk"])


def recurrent(core: Any = "lstm", shared: bool = False, **options: Any) -> Any:
    agent = make_agent(core=core, core_size=SIZE, shared=shared, **options)
    for head in (agent.policy_head.linear, agent.value_head):
        nn.init.normal_(head.weight)  # so that every difference in memory changes the outputs
    return agent


def random_mask(seed: int = 0) -> Tensor:
    """Return a mask with reset rows in the middle, in the first row and in the last."""
    mask = torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) > 0.25
    mask[0, 1] = mask[T - 1, 2] = mask[4, 0] = False
    mask[:, 3] = True
    return mask


def step_by_step(agent: Any, obs: Any, state: Any, mask: Tensor, noise: Tensor) -> tuple[list[Any], list[Any], Any]:
    """Act as a sampler does, with the memory reset after every reset row."""
    actions, said, blank = [], [], agent.initial_state(B)
    for t in range(T):
        action, words, state = agent.act(map_tree(lambda x, t=t: x[t], obs), state, None, noise[t])
        actions.append(action)
        said.append(words)
        over = ~mask[t]
        state = map_tree(lambda new, old, over=over: torch.where(over.unsqueeze(-1), old, new), state, blank)
    return actions, said, state


def somewhere(agent: Any, seed: int = 1) -> Any:
    """Return a random state, as in the middle of an episode."""
    generator = torch.Generator().manual_seed(seed)
    return map_tree(lambda x: torch.randn(x.shape, generator=generator) * 0.5, agent.initial_state(B))


@CORES
@TRUNKS
@pytest.mark.parametrize("spaces", ["plain", "nested"])
def test_acting_row_by_row_equals_unrolling(core: Any, shared: bool, spaces: str) -> None:
    torch.manual_seed(2)
    if spaces == "plain":
        agent, obs = recurrent(core, shared), torch.randn(T, B, 3)
        noise = torch.rand(T, B, 1)
    else:
        agent = PolicyAgent(NESTED, PAIR, make_net, core=core, core_size=SIZE, shared=shared)
        nn.init.normal_(agent.policy_head.linear.weight)
        obs = agent.observation.tree(
            lambda _, leaf: torch.randint(leaf.n, (T, B)) if leaf.n else torch.randn(T, B, *leaf.shape)
        )
        noise = torch.cat([torch.rand(T, B, 1), torch.randn(T, B, 2)], -1)
    mask, start = random_mask(), somewhere(agent)
    with torch.no_grad():
        actions, said, end = step_by_step(agent, obs, start, mask, noise)
        outputs, last = agent.unroll(obs, start, resets(mask))
        chosen = map_tree(lambda *rows: torch.stack(rows), *actions)
        torch.testing.assert_close(
            outputs.distribution.log_prob(chosen), torch.stack([words.log_prob for words in said]), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(outputs.value, torch.stack([words.value for words in said]), atol=1e-5, rtol=1e-5)
    # Final states agree except where the last row was a reset row: unroll resets only before the next row.
    for (_, mine), (_, theirs) in zip(leaves(last), leaves(end), strict=True):
        torch.testing.assert_close(mine[mask[-1]], theirs[mask[-1]], atol=1e-5, rtol=0)


def test_missing_reset_changes_the_outputs() -> None:
    agent, obs, mask = recurrent(), torch.randn(T, B, 3), random_mask()
    start = somewhere(agent)
    right, wrong = (agent.unroll(obs, start, flags)[0].value for flags in (resets(mask), torch.zeros_like(mask)))
    assert (right - wrong).abs().max() > 1e-2
    assert torch.equal(right[:, 3], wrong[:, 3]), "the last env is never reset"


@CORES
@TRUNKS
def test_two_halves_of_a_sequence_equal_the_whole(core: Any, shared: bool) -> None:
    agent, obs, mask = recurrent(core, shared), torch.randn(T, B, 3), random_mask()
    mask[3] = True  # cutting after a reset row would lose the reset, see data.resets
    flags, start = resets(mask), somewhere(agent)
    with torch.no_grad():
        whole, end = agent.unroll(obs, start, flags)
        first, middle = agent.unroll(obs[:4], start, flags[:4])
        second, same = agent.unroll(obs[4:], middle, flags[4:])
    torch.testing.assert_close(torch.cat([first.value, second.value]), whole.value)
    for (_, mine), (_, theirs) in zip(leaves(same), leaves(end), strict=True):
        torch.testing.assert_close(mine, theirs)


@CORES
@TRUNKS
def test_state_holds_zero_memory_per_trunk(core: Any, shared: bool) -> None:
    agent = recurrent(core, shared)
    kind = LSTMState if core == "lstm" else GRUState
    state = agent.initial_state(B)
    assert isinstance(state, Memory)
    assert isinstance(state.policy, kind)
    assert state.value is None if shared else isinstance(state.value, kind)
    parts = dict(leaves(state))
    assert all(part.shape == (B, SIZE) and not part.any() for part in parts.values())
    assert len({part.data_ptr() for part in parts.values()}) == len(parts), "parts of the state do not share memory"
    _, _, following = agent.act(torch.randn(B, 3), state, None, torch.rand(B, 1))
    assert all(part.abs().sum(-1).all() for _, part in leaves(following))
    assert not any(part.any() for _, part in leaves(state)), "the given state is unchanged"
    assert [path for path, _ in leaves(following)] == list(parts)
    assert stack([map_tree(lambda x: x.detach().numpy(), following)] * 2) is not None


def test_memories_of_policy_and_value_are_independent() -> None:
    agent, obs = recurrent(), torch.randn(B, 3)
    state = somewhere(agent)
    changed = Memory(state.policy, map_tree(lambda x: x + 1, state.value))
    (_, before, _), (_, after, _) = (
        agent.act(obs, given, torch.zeros(B), torch.rand(B, 1)) for given in (state, changed)
    )
    assert torch.equal(before.log_prob, after.log_prob)
    assert not torch.equal(before.value, after.value)


@CORES
@TRUNKS
def test_computing_values_does_not_advance_the_memory(core: Any, shared: bool) -> None:
    agent, obs, state = recurrent(core, shared), torch.randn(B, 3), None
    state = somewhere(agent)
    kept = map_tree(lambda x: x.clone(), state)
    with torch.no_grad():
        values = [agent.value(obs, state) for _ in range(3)]
        _, said, _ = agent.act(obs, state, None, torch.rand(B, 1))
    assert all(torch.equal(value, values[0]) for value in values)
    torch.testing.assert_close(values[0], said.value)
    for (_, now), (_, before) in zip(leaves(state), leaves(kept), strict=True):
        assert torch.equal(now, before)


@TRUNKS
def test_agent_without_a_core_has_no_state(shared: bool) -> None:
    agent = make_agent(shared=shared)
    assert agent.is_recurrent is False
    assert agent.initial_state(B) is None
    _, _, state = agent.act(torch.randn(B, 3), None, None, torch.rand(B, 1))
    assert state is None
    outputs, state = agent.unroll(torch.randn(T, B, 3), None, torch.ones(T, B, dtype=torch.bool))
    assert state is None
    assert outputs.value.shape == (T, B)


@CORES
@TRUNKS
def test_gradients_do_not_cross_resets(core: Any, shared: bool) -> None:
    """Env 0 is reset before row 5, so later outputs do not depend on its earlier observations or initial state."""
    agent = recurrent(core, shared)
    obs = torch.randn(T, B, 3, requires_grad=True)
    start = map_tree(lambda x: x.requires_grad_(), somewhere(agent))
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[5, 0] = True
    outputs, _ = agent.unroll(obs, start, reset)
    said = outputs.value[5:].sum() + outputs.distribution.entropy()[5:].sum()
    wanted = [obs, *(leaf for _, leaf in leaves(start))]
    by_obs, *by_start = torch.autograd.grad(said, wanted)
    assert not by_obs[:5, 0].any()
    assert by_obs[5:, 0].any(-1).all()
    assert by_obs[:, 1:].any(-1).all(), "the other envs are not reset"
    for gradient in by_start:
        assert not gradient[0].any()
        assert gradient[1:].any(-1).all()


@CORES
def test_envs_do_not_mix(core: Any) -> None:
    agent, mask = recurrent(core), random_mask()
    obs, start = torch.randn(T, B, 3), somewhere(agent)
    with torch.no_grad():
        whole, _ = agent.unroll(obs, start, resets(mask))
        for b in range(B):
            own = map_tree(lambda x, b=b: x[b : b + 1], start)
            alone, _ = agent.unroll(obs[:, b : b + 1], own, resets(mask)[:, b : b + 1])
            torch.testing.assert_close(alone.value[:, 0], whole.value[:, b], atol=1e-5, rtol=1e-5)


def test_shared_trunk_has_one_core() -> None:
    shared, apart = recurrent(shared=True), recurrent()
    assert shared.value_trunk.core is shared.policy_trunk.core
    assert apart.value_trunk.core is not apart.policy_trunk.core
    sizes = [sum(parameter.numel() for parameter in agent.parameters()) for agent in (shared, apart)]
    assert sizes[1] - sizes[0] == sum(parameter.numel() for parameter in shared.policy_trunk.parameters())
    assert apart.policy_head.linear.in_features == apart.value_head.in_features == SIZE
