"""Test keyed random numbers: every purpose has streams of its own, and only one module makes them."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rollouts import discrete

import remuda
from remuda.algorithms.off_policy import OffPolicy
from remuda.core import Clock, derive_seed
from remuda.randomness import Purpose, keyed_generator
from remuda.replay import RolloutBuffer
from remuda.replay.priorities import DrawNumbers
from remuda.sampling.exploration import RandomActions
from remuda.sampling.noise import Noise

SEED, COUNT = 3, 64


def bits(numbers: Any) -> set[int]:
    """Return the first 24 bits of uniform numbers, which is the precision of float32."""
    return set((np.asarray(numbers, np.float64).reshape(-1) * 2**24).astype(np.int64).tolist())


def uniform_draws() -> dict[str, set[int]]:
    """Return the first numbers drawn for each purpose, with keys that are as similar as possible."""
    minibatches = RolloutBuffer(1, 4, SEED)
    order = np.random.Generator(np.random.Philox(key=[SEED, 0]))  # the stream of (seed, env 0, row 0)
    assert minibatches._order(0, 1000).tolist() != order.permutation(1000).tolist()
    chosen = RandomActions(discrete(2**24), SEED, [0]).rows(0, COUNT)
    return {
        "exploration": bits(Noise(SEED, [0], [("uniform", 1)]).rows(0, COUNT)),
        "random actions": set(chosen.reshape(-1).tolist()),
        "replay": bits(DrawNumbers(SEED, COUNT, is_stratified=False).of(0)),
        "prioritized replay": bits(DrawNumbers(SEED, COUNT, is_stratified=True).of(0) - np.arange(COUNT)),
        "another attempt": bits(DrawNumbers(SEED, COUNT, is_stratified=False).of(0, 1)),
    }


def test_no_two_purposes_share_numbers() -> None:
    drawn = uniform_draws()
    for (name, mine), (other, theirs) in combinations(drawn.items(), 2):
        is_same_purpose = {name, other} == {"replay", "prioritized replay"}  # a run uses only one of them
        assert is_same_purpose or not mine & theirs, (name, other)


def test_streams_differ_in_every_argument() -> None:
    arguments = [(p, s, k, n) for p in Purpose for s in (0, 1, 2**63 - 1) for k in (0, 1, 2**40) for n in (0, 1)]
    raw = [keyed_generator(*each).bit_generator.random_raw(64).tolist() for each in arguments]  # type: ignore[attr-defined]
    assert len({number for stream in raw for number in stream}) == 64 * len(arguments)


def test_parts_of_a_run_have_streams_of_their_own() -> None:
    """Part 0 has the stream of an undivided run."""
    arguments = [(purpose, key, position) for purpose in Purpose for key in (0, 1) for position in (0, 1)]
    seen = set()
    for purpose, key, position in arguments:
        streams = [keyed_generator(purpose, SEED, key, position, part) for part in (0, 1, 2, 3, 2**40)]
        raw = [stream.bit_generator.random_raw(64).tolist() for stream in streams]  # type: ignore[attr-defined]
        undivided = keyed_generator(purpose, SEED, key, position).bit_generator.random_raw(64)  # type: ignore[attr-defined]
        assert raw[0] == undivided.tolist()
        seen |= {number for stream in raw for number in stream}
    assert len(seen) == 64 * 5 * len(arguments)


def test_replays_of_different_parts_draw_different_numbers() -> None:
    def drawn(part: int) -> list[Any]:
        numbers = DrawNumbers(SEED, COUNT, is_stratified=False, part=part)
        minibatches = RolloutBuffer(1, 4, SEED)
        minibatches.set_part(part, 3)
        return [numbers.of(0).tolist(), numbers.of(0, 1).tolist(), minibatches._order(0, 100).tolist()]

    first, second = drawn(0), drawn(1)
    undivided = DrawNumbers(SEED, COUNT, is_stratified=False)
    assert first[:2] == [undivided.of(0).tolist(), undivided.of(0, 1).tolist()]
    assert first[2] == RolloutBuffer(1, 4, SEED)._order(0, 100).tolist()
    assert all(mine != theirs for mine, theirs in zip(first, second, strict=True))


def test_noise_in_losses_and_envs_use_different_seeds() -> None:
    class Nothing(torch.nn.Module):
        inputs = None

    of_losses = {OffPolicy(Nothing(), SEED, 1.0, 1).generator(Clock(k)).initial_seed() for k in range(200)}
    of_envs = {derive_seed(SEED, k) for k in range(200)} | {derive_seed(SEED, k, 0) for k in range(200)}
    assert len(of_losses) == 200
    assert not of_losses & of_envs


def test_only_one_module_makes_keyed_generators() -> None:
    package = Path(remuda.__file__).parent
    users = [path.name for path in package.rglob("*.py") if re.search(r"Philox\(", path.read_text())]
    assert users == ["randomness.py"]
