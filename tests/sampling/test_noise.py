"""Tests that noise is a function of seed, env and row only."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch

from remuda.sampling.noise import Noise

KINDS: list[Literal["uniform", "normal"]] = ["uniform", "normal"]


@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_an_env_does_not_depend_on_the_other_envs(kind: Literal["uniform", "normal"]) -> None:
    together = Noise(3, range(8), ((kind, 2),)).rows(64, 16)
    assert together.shape == (16, 8, 2)
    assert together.dtype == torch.float32
    for env in range(8):
        assert torch.equal(Noise(3, [env], ((kind, 2),)).rows(64, 16)[:, 0], together[:, env])
    assert torch.equal(Noise(3, [5, 2], ((kind, 2),)).rows(64, 16), together[:, [5, 2]])


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_calls_return_the_same_noise(kind: Literal["uniform", "normal"]) -> None:
    noise = Noise(3, range(2), ((kind, 1),))
    first = noise.rows(0, 32)
    noise.rows(32, 32)
    assert torch.equal(noise.rows(0, 32), first)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_differs_between_seeds_envs_and_rollouts(kind: Literal["uniform", "normal"]) -> None:
    blocks = [
        Noise(seed, [env], ((kind, 1),)).rows(first, 64).flatten()
        for seed, env, first in itertools.product((0, 1, 2**63 - 1), (0, 1, 2, 1000), (0, 64, 128, 10**9))
    ]
    # Blocks do not overlap even when shifted: almost all numbers are distinct.
    numbers = torch.cat(blocks)
    assert len(numbers.unique()) > 0.999 * len(numbers)
    together = torch.stack(blocks)
    together = (together - together.mean(1, keepdim=True)) / together.std(1, keepdim=True)
    correlation = together @ together.T / 63 - torch.eye(len(blocks))
    assert (
        correlation.abs().max() < 0.55
    )  # 64 numbers have a standard deviation of 1/8, and there are hundreds of pairs


@pytest.mark.parametrize("kind", KINDS)
def test_wide_blocks_of_consecutive_rollouts_do_not_overlap(kind: Literal["uniform", "normal"]) -> None:
    noise = Noise(0, [0], ((kind, 64),))
    numbers = torch.cat([noise.rows(first, 8).flatten() for first in range(0, 64, 8)])
    assert len(numbers.unique()) > 0.999 * len(numbers)


def test_uniform_noise_is_uniform_and_below_1() -> None:
    numbers = Noise(0, range(10), (("uniform", 3),)).rows(0, 2000).flatten()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    shares = torch.histc(numbers, 20, 0, 1) / len(numbers)
    assert (shares - 0.05).abs().max() < 0.005


def test_normal_noise_is_standard_normal_and_independent() -> None:
    numbers = Noise(0, range(10), (("normal", 3),)).rows(0, 2000)
    flat = numbers.flatten()
    assert abs(flat.mean()) < 0.02
    assert abs(flat.std() - 1) < 0.02
    assert abs((flat.abs() < 1).float().mean() - 0.6827) < 0.01
    columns = numbers.reshape(2000, 30)
    assert (torch.corrcoef(columns.T) - torch.eye(30)).abs().max() < 0.12
