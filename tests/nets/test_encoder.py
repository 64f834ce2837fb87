"""Tests of the choice of a network by shape, and of branches for observations with entries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remuda.data import namedarraytuple
from remuda.errors import ConfigError
from remuda.nets import MLP, NETS, EntriesNet, ImpalaNet, NatureCNN, SmallCNN, make_net
from remuda.nets.residual import FixupBlock

torch.set_num_threads(1)  # more threads are many times slower on a busy machine
SHAPES = {"camera": (12, 12, 3), "body": (5,), "pair.height": (), "pair.grid": (2, 3)}
Pair = namedarraytuple("Entries", ("height", "grid"))
Whole = namedarraytuple("Entries", ("camera", "body", "pair"))


def rows(count: int = 4) -> Whole:
    return Whole(
        torch.rand(count, 12, 12, 3), torch.randn(count, 5), Pair(torch.randn(count), torch.randn(count, 2, 3))
    )


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((4, 84, 84), NatureCNN),
        ((36, 36, 3), NatureCNN),
        ((35, 64, 3), SmallCNN),
        ((10, 10, 10), SmallCNN),
        ((3, 3, 3), SmallCNN),
        ((2, 4, 2), MLP),
        ((1, 1, 1), MLP),
        ((8,), MLP),
        ((), MLP),
        ((84, 84), MLP),
    ],
)
def test_auto_chooses_by_the_shape(shape: tuple[int, ...], kind: type[nn.Module]) -> None:
    net = make_net(shape)
    assert type(net) is kind
    assert net(torch.rand(2, *shape)).shape[0] == 2


@pytest.mark.parametrize(
    ("name", "kind", "features"),
    [("mlp", MLP, 7), ("nature", NatureCNN, 512), ("small", SmallCNN, 128), ("impala", ImpalaNet, 256)],
)
def test_net_by_name(name: str, kind: type[nn.Module], features: int) -> None:
    net = make_net((40, 40, 3), name, hidden=(9, 7))
    assert type(net) is kind
    assert net(torch.rand(2, 40, 40, 3)).shape == (2, features)


def test_fixup_by_name() -> None:
    found = [
        any(isinstance(part, FixupBlock) for part in make_net((8, 8, 3), name).modules())
        for name in ("impala", "impala-fixup")
    ]
    assert found == [False, True]


def test_hidden_activation_and_initial_weights_reach_the_mlp() -> None:
    net = make_net((3,), hidden=(6, 5), activation="relu", orthogonal_init=False)
    assert [layer.out_features for layer in net.modules() if isinstance(layer, nn.Linear)] == [6, 5]
    assert any(isinstance(layer, nn.ReLU) for layer in net.modules())
    assert next(layer for layer in net.modules() if isinstance(layer, nn.Linear)).bias.any()


@pytest.mark.parametrize("name", ["nature", "small", "impala", "impala-fixup"])
def test_orthogonal_init_reaches_image_nets(name: str) -> None:
    for orthogonal_init in (False, True):
        last = [
            layer
            for layer in make_net((36, 36, 3), name, orthogonal_init=orthogonal_init).modules()
            if isinstance(layer, nn.Linear)
        ][-1]
        assert bool(last.bias.any()) is not orthogonal_init


def test_outputs_of_branches_are_concatenated_for_the_mlp() -> None:
    net = EntriesNet(SHAPES, SmallCNN, (6, 7), "relu")
    obs = rows()
    joined = torch.cat([net.branches[0](obs.camera), obs.body, obs.pair.height[:, None], obs.pair.grid.flatten(1)], 1)
    assert joined.shape == (4, 128 + 5 + 1 + 6)
    assert net(obs).shape == (4, 7)
    torch.testing.assert_close(net(obs), net.body(joined))


def test_every_entry_affects_the_output_and_every_parameter_has_a_gradient() -> None:
    net, obs = make_net(SHAPES, hidden=(8,)), rows()
    before = net(obs)
    for changed in (
        obs.replace(camera=1 - obs.camera),
        obs.replace(body=obs.body + 1),
        obs.replace(pair=obs.pair.replace(height=obs.pair.height + 1)),
        obs.replace(pair=obs.pair.replace(grid=obs.pair.grid + 1)),
    ):
        assert not torch.allclose(net(changed), before)
    before.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in net.parameters())


def test_nets_of_entries_are_chosen_by_the_same_rule() -> None:
    net = make_net({"far": (3, 40, 40), "near": (7, 7, 3), "dot": (1, 1, 3), "speed": (2,)})
    assert [type(branch) for branch in net.branches] == [NatureCNN, SmallCNN, nn.Flatten, nn.Identity]
    named = make_net({"near": (7, 7, 3), "speed": (2,)}, "impala")
    assert [type(branch) for branch in named.branches] == [ImpalaNet, nn.Identity]
    flat = make_net({"near": (7, 7, 3), "speed": (2,)}, "mlp", hidden=(4,))
    assert flat.body.layers[0].in_features == 7 * 7 * 3 + 2


def test_missing_entry_is_an_error() -> None:
    net = make_net({"a": (2,), "b": (2,)})
    with pytest.raises(KeyError, match="b"):
        net(namedarraytuple("Entries", ("a", "c"))(torch.zeros(1, 2), torch.zeros(1, 2)))


def test_unknown_net_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"agent\.net=natur is not known: did you mean nature"):
        make_net((4, 84, 84), "natur")


@pytest.mark.parametrize("name", [name for name in NETS if name not in ("auto", "mlp")])
@pytest.mark.parametrize("shapes", [(4,), (), {"a": (4,), "b": (3, 3)}])
def test_image_net_without_an_image_is_refused(name: str, shapes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"^agent\.net={name} needs an image.*: use agent\.net=mlp or auto\.$"):
        make_net(shapes, name)
