"""Tests of the network inputs for every kind of observation."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from remuda.core import Space
from remuda.data import namedarraytuple
from remuda.nets import Inputs, Standardize


def box(shape: tuple[int, ...], dtype: str = "float32", low: Any = 0, high: Any = 1) -> Space:
    return Space("box", shape, dtype, np.full(shape, low, dtype), np.full(shape, high, dtype))


def nested() -> Space:
    inner = Space("tuple", entries={"item0": Space("discrete", (), "int64", n=3), "item1": box((), "float32", -9, 9)})
    return Space("dict", entries={"camera": box((4, 4, 3), "uint8", 0, 255), "body": box((2,)), "pair": inner})


def nested_rows(count: int) -> Any:
    pair = namedarraytuple("Entries", ("item0", "item1"))
    whole = namedarraytuple("Entries", ("camera", "body", "pair"))
    draw = torch.Generator().manual_seed(count)
    return whole(
        torch.randint(256, (count, 4, 4, 3), generator=draw, dtype=torch.uint8),
        torch.randn(count, 2, generator=draw),
        pair(torch.randint(3, (count,), generator=draw), 5 + torch.randn(count, generator=draw)),
    )


def test_discrete_becomes_one_hot() -> None:
    inputs = Inputs(Space("discrete", (), "int64", n=3), normalize=True)
    assert inputs.shapes == (3,)
    assert inputs(torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert not inputs.has_statistics


def test_multidiscrete_becomes_concatenated_one_hots() -> None:
    inputs = Inputs(Space("multidiscrete", (3,), "int64", sizes=np.array([2, 3, 1])), normalize=True)
    assert inputs.shapes == (6,)
    out = inputs(torch.tensor([[1, 2, 0], [0, 1, 0]]))
    assert out.dtype == torch.float32
    assert out.tolist() == [[0, 1, 0, 0, 1, 1], [1, 0, 0, 1, 0, 1]]


def test_multidiscrete_with_two_axes_is_flattened_in_row_order() -> None:
    sizes = np.array([[2, 3], [4, 2]])
    inputs = Inputs(Space("multidiscrete", (2, 2), "int32", sizes=sizes))
    rows = torch.tensor([[[1, 0], [3, 1]]], dtype=torch.int32)
    expected = torch.cat([F.one_hot(rows.long().flatten()[i], n) for i, n in enumerate(sizes.flatten().tolist())])
    assert inputs(rows).tolist() == [expected.tolist()]


def test_multibinary_becomes_flat_floats() -> None:
    inputs = Inputs(Space("multibinary", (2, 2), "int8"), normalize=True)
    assert inputs.shapes == (4,)
    assert inputs(torch.tensor([[[1, 0], [0, 1]]], dtype=torch.int8)).tolist() == [[1, 0, 0, 1]]


def test_pixels_are_exactly_divided_by_255() -> None:
    inputs = Inputs(box((1, 16, 16), "uint8", 0, 255), normalize=True)
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    assert torch.equal(inputs(pixels), pixels.float() / 255)
    assert not inputs.has_statistics


@pytest.mark.parametrize(
    ("dtype", "high", "value", "expected"),
    [
        ("bool", True, 1, 1.0),
        ("uint8", 10, 5, 0.5),
        ("uint8", 1, 1, 1.0),
        ("int64", 20, 5, 0.25),
        ("int32", np.iinfo(np.int32).max, 7, 7.0),  # the largest int32 counts as unbounded
        ("int64", np.iinfo(np.int64).max - 2, 7, 7.0),  # Gymnasium's replacement for an infinite bound
        ("uint16", 65535, 65535, 1.0),
    ],
)
def test_images_are_divided_by_their_bound(dtype: str, high: int, value: int, expected: float) -> None:
    inputs = Inputs(box((2, 2, 2), dtype, 0, high))
    rows = torch.full((3, 2, 2, 2), value, dtype=getattr(torch, dtype))
    out = inputs(rows)
    assert out.dtype == torch.float32
    assert out.unique().tolist() == [expected]


def test_pixels_with_a_bound_per_channel() -> None:
    high = np.array([[[10, 5, 1]]], np.uint8)
    inputs = Inputs(Space("box", (1, 1, 3), "uint8", np.zeros_like(high), high))
    assert inputs(torch.tensor([[[[5, 5, 1]]]], dtype=torch.uint8)).flatten().tolist() == [0.5, 1, 1]


@pytest.mark.parametrize("space", [box((3,)), box(()), box((2, 3)), box((2, 3, 4)), box((3,), "int32", 0, 9)])
def test_other_boxes_are_standardized_with_normalize(space: Space) -> None:
    rows = (5 * torch.rand(20, *space.shape) + 3).to(getattr(torch, space.dtype))
    plain, inputs, by_hand = Inputs(space), Inputs(space, normalize=True), Standardize(space.shape)
    assert torch.equal(plain(rows), rows.float())
    assert not plain.has_statistics
    assert inputs.has_statistics
    assert inputs.shapes == space.shape
    plain.update(rows)
    inputs.update(rows)
    by_hand.update(rows.float())
    assert torch.equal(plain(rows), rows.float())
    assert torch.equal(inputs(rows), by_hand(rows.float()))
    assert not torch.equal(inputs(rows), rows.float())


def test_nested_space_keeps_its_tree() -> None:
    inputs, rows = Inputs(nested(), normalize=True), nested_rows(50)
    assert inputs.shapes == {"camera": (4, 4, 3), "body": (2,), "pair.item0": (3,), "pair.item1": ()}
    inputs.update(rows)
    out = inputs(rows)
    assert type(out) is type(rows)
    assert type(out.pair) is type(rows.pair)
    assert torch.equal(out.camera, rows.camera.float() / 255)
    assert torch.equal(out.pair.item0, F.one_hot(rows.pair.item0, 3).float())
    for leaf in (out.body, out.pair.item1):
        torch.testing.assert_close(leaf.mean(0), torch.zeros(leaf.shape[1:]), atol=1e-4, rtol=0)
        torch.testing.assert_close(leaf.std(0, unbiased=False), torch.ones(leaf.shape[1:]), atol=1e-4, rtol=0)


def test_statistics_are_in_the_state_dict_exactly_once() -> None:
    inputs, other, rows = Inputs(nested(), normalize=True), Inputs(nested(), normalize=True), nested_rows(9)
    inputs.update(rows)
    other.load_state_dict(inputs.state_dict())
    assert torch.equal(other(rows).body, inputs(rows).body)
    assert torch.equal(other(rows).pair.item1, inputs(rows).pair.item1)
    assert len(Inputs(box((3,)), normalize=True).state_dict()) == len(Standardize((3,)).state_dict())


def test_copy_has_its_own_statistics() -> None:
    inputs, rows = Inputs(nested(), normalize=True), nested_rows(9)
    before, twin = inputs(rows), copy.deepcopy(inputs)
    twin.update(rows)
    assert torch.equal(inputs(rows).body, before.body)
    assert not torch.equal(twin(rows).body, before.body)
    fresh = Inputs(nested(), normalize=True)
    fresh.load_state_dict(twin.state_dict())  # the copy uses the statistics in its state dict
    assert torch.equal(fresh(rows).body, twin(rows).body)


def test_observations_of_another_structure_are_refused() -> None:
    with pytest.raises(ValueError, match="trees differ"):
        Inputs(nested())(namedarraytuple("Entries", ("camera", "body"))(torch.zeros(1), torch.zeros(1)))


def test_center_subtracts_the_mean_of_each_image() -> None:
    inputs = Inputs(box((2, 2, 3), "uint8", 0, 255), center=True)
    grey, drawn = torch.full((2, 2, 3), 87, dtype=torch.uint8), torch.zeros(2, 2, 3, dtype=torch.uint8)
    drawn[0, 0, 0] = 255
    out = inputs(torch.stack([grey, drawn]))
    assert out[0].abs().max() < 1e-6
    assert out[1].flatten().tolist() == pytest.approx([1 - 1 / 12] + [-1 / 12] * 11)
    plain = box((3,))
    assert torch.equal(Inputs(plain, center=True)(torch.ones(2, 3)), torch.ones(2, 3))  # only images are centered


def test_statistics_of_version_0_1_can_be_loaded() -> None:
    """Version 0.1 stored them under `standardise`."""
    saved = Inputs(box((3,)), normalize=True)
    saved.update(5 + 2 * torch.randn(50, 3))
    old = {name.replace("standardize", "standardise"): tensor for name, tensor in saved.state_dict().items()}
    assert old.keys() != saved.state_dict().keys()
    loaded = Inputs(box((3,)), normalize=True)
    loaded.load_state_dict(old)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
