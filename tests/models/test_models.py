"""The models that ship: each is traced, masked, sliced and trained, and says what it cannot do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fedpews
from fedpews.errors import ConfigError
from fedpews.models import MODELS, build, describe_models
from fedpews.neurons import NeuronGraph, slice_module, trace
from fedpews.seeds import fold

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"hidden": [12, 8]}),
    "cnn": ("cnn", {"hidden": [6, 8, 10]}),
    "resnet-group": ("resnet", {"width": 4}),
    "resnet-batch": ("resnet", {"width": 4, "norm": "batch"}),
    "resnet-14": ("resnet", {"width": 4, "depth": 14}),
    "vit": ("vit", {"width": 16, "depth": 2, "heads": 2, "hidden": 12}),
}
SHAPES = [(3, 32, 32), (1, 28, 28)]


def made(label: str, shape: tuple[int, ...], classes: int = 7) -> tuple[nn.Module, Tensor, NeuronGraph]:
    """A small model in double precision, with no norm left neutral, and a batch for it."""
    torch.manual_seed(0)
    name, options = SMALL[label]
    model = build(name, shape, classes, options).double()
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point():
            noise = torch.rand_like(value)
            value.data += noise if key.endswith("running_var") else 0.4 * (noise - 0.5)
    x = torch.randn(3, *shape, dtype=torch.float64)
    return model, x, trace(model, x)


def half_open(graph: NeuronGraph) -> Tensor:
    neurons = torch.rand(graph.size, generator=torch.Generator().manual_seed(1)) < 0.5
    for layer in graph.layers:
        neurons[layer.start] = True
    return neurons


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("label", SMALL)
def test_a_masked_model_equals_the_sliced_one(label: str, shape: tuple[int, ...]) -> None:
    model, x, graph = made(label, shape)
    neurons = half_open(graph)
    for training in (False, True):
        model.train(training)
        tensors = {**dict(model.named_parameters()), **dict(copy.deepcopy(model).named_buffers())}
        masked = functional_call(model, graph.gate(tensors, neurons.double()), (x,))
        small = slice_module(model, graph, neurons)
        assert masked.shape == (3, 7)
        torch.testing.assert_close(small(x), masked, rtol=1e-9, atol=1e-9)
        assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("label", SMALL)
def test_a_closed_neuron_gets_no_gradient(label: str) -> None:
    model, x, graph = made(label, SHAPES[0])
    neurons = half_open(graph)
    gated = graph.gate(dict(model.named_parameters()), neurons.double())
    functional_call(model, gated, (x,)).pow(3).sum().backward()
    masks = graph.expand(neurons)
    for name, value in model.named_parameters():
        assert value.grad is not None
        if name in masks:
            closed = ~masks[name].expand_as(value)
            assert not value.grad[closed].any(), name
            assert value.grad[~closed].any(), name


def test_pooling_can_end_before_the_last_convolution() -> None:
    # 32×32 after three poolings is 4×4, of 128 channels: the flatten of 2,048 in the paper's table
    assert build("cnn", (3, 32, 32), 20, {}).get_parameter("classifier.weight").shape == (20, 2048)
    flat = build("cnn", (3, 32, 32), 20, {"hidden": [4, 6], "pools": 0})
    assert flat.get_parameter("classifier.weight").shape == (20, 6 * 32 * 32)
    assert flat(torch.zeros(2, 3, 32, 32)).shape == (2, 20)


EXPECTED = {
    "cnn": [("convs.0", 32), ("convs.1", 64), ("convs.2", 128), ("convs.3", 128)],
    "resnet": [  # two channels make a group, a group is a neuron: half the channels 16, 32, 64
        ("stem + blocks.0.conv2", 8),
        ("blocks.0.conv1", 8),
        ("blocks.1.conv1", 16),
        ("blocks.1.conv2 + blocks.1.skip.1", 16),
        ("blocks.2.conv1", 32),
        ("blocks.2.conv2 + blocks.2.skip.1", 32),
    ],
    "vit": [
        layer
        for n in range(4)
        for layer in ((f"blocks.{n}.attention.in_proj_weight", 4), (f"blocks.{n}.up", 128))
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_neurons_of_the_full_size_models(name: str) -> None:
    graph = trace(build(name, (3, 32, 32), 20, {}), torch.zeros(1, 3, 32, 32))
    assert [(layer.name, layer.size) for layer in graph.layers] == EXPECTED[name]


def test_with_batchnorm_every_channel_of_the_resnet_is_a_neuron() -> None:
    _, _, graph = made("resnet-batch", SHAPES[0])
    assert [layer.size for layer in graph.layers] == [4, 4, 8, 8, 16, 16]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("label", SMALL)
def test_a_warmup_round_and_a_plain_round_train_it(label: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, *shape, generator=generator), torch.arange(24) % 4
    name, options = SMALL[label]
    result = fedpews.run(
        _experiment(name, options, rounds=2),
        clients=[(x[:12], y[:12]), (x[12:], y[12:])],
        test=(x, y),
        method="fedavg+pews",
        warmup={"rounds": 1},
        train={"batch_size": 6, "lr": 0.05},
    )
    assert result.rounds.column("phase") == ["warmup", "train"]
    assert 0.2 < result.rounds[0]["density"] < 0.8  # masks start as fair coins
    before, after = _start(name, options, shape), result.params[0]
    assert [key for key in after if torch.equal(before[key], after[key])] == []


def _experiment(name: str, options: dict[str, Any], rounds: int) -> fedpews.Experiment:
    return fedpews.Experiment(rounds=rounds, model={"name": name, **options}, runtime={"engine": "eager"})


def _start(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Where the same seed begins."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(0, "model"))
        return build(name, shape, 4, options).state_dict()


@pytest.mark.parametrize("size", [8, 9, 15, 28, 31, 32])
def test_cnn_resnet_take_images_of_any_size(size: int) -> None:
    for name in ("cnn", "resnet"):
        assert build(name, (1, size, size), 3, {})(torch.zeros(2, 1, size, size)).shape == (2, 3)


def test_resnet_takes_images_that_are_not_square() -> None:
    assert build("resnet", (3, 20, 36), 3, {})(torch.zeros(2, 3, 20, 36)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("cnn", (5,), {}, r"needs images .*shape \(5,\); choose model mlp"),
        ("resnet", (5,), {}, "needs images"),
        ("vit", (4, 5), {}, "needs images"),
        ("cnn", (1, 7, 7), {}, "at least 8×8"),
        ("cnn", (3, 28, 32), {}, "square images, the data has 28×32"),
        ("cnn", (3, 32, 32), {"hidden": []}, "hidden must list"),
        ("cnn", (3, 32, 32), {"pools": 5}, "pools must be between 0 and 4"),
        ("mlp", (5,), {"hidden": []}, "hidden must list"),
        ("mlp", (5,), {"hiden": [3]}, r"no option model\.hiden; did you mean 'hidden'\?"),
        ("mlp", (5,), {"zzz": 3}, "there is classes, hidden, inputs"),
        ("vit", (3, 30, 30), {}, "patch must divide the images' size 30; got 4"),
        ("vit", (3, 32, 32), {"heads": 5}, "heads must divide width 64"),
        ("vit", (3, 32, 32), {"depth": 0}, "above 0"),
        ("resnet", (3, 32, 32), {"depth": 18}, r"8, 14, 20, .*got 18"),
        ("resnet", (3, 32, 32), {"norm": "layer"}, '"group" or "batch"'),
        ("resnet", (3, 32, 32), {"width": 5}, "multiple of group_size 2"),
        ("rasnet", (3, 32, 32), {}, "did you mean 'resnet'"),
        ("nothing.like:it", (5,), {}, "No module named 'nothing'"),
        ("fedpews.seeds:Missing", (5,), {}, "has no class or function 'Missing'"),
        ("fedpews.seeds:fold", (5,), {}, "cannot be built"),
        ("nowhere.py:Model", (5,), {}, "No such file"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(
    name: str, shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(name, shape, 4, options)
    assert "\n" not in str(caught.value)


OWN = """
from dataclasses import dataclass
from torch import nn

@dataclass
class Sizes:
    hidden: int = 3

class Net(nn.Sequential):
    def __init__(self, inputs, classes, hidden=Sizes().hidden):
        super().__init__(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))

def broken(inputs):
    raise RuntimeError("no more ideas")

def not_a_module(classes):
    return classes
"""


@pytest.mark.parametrize("module", ["own_net_for_test", "sub/own_net.py"])
def test_own_models_are_loaded_beside_the_configuration(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / module.removesuffix(".py")).with_suffix(".py").write_text(OWN)
    model = build(f"{module}:Net", (3, 4, 4), 5, {"hidden": 7})
    assert model(torch.zeros(2, 3, 4, 4)).shape == (2, 5)
    with pytest.raises(ConfigError, match="RuntimeError: no more ideas"):
        build(f"{module}:broken", (5,), 4, {})
    with pytest.raises(ConfigError, match=r"is a int, not a torch\.nn\.Module"):
        build(f"{module}:not_a_module", (5,), 4, {})


def test_every_model_is_described_in_one_line() -> None:
    described = dict(describe_models())
    assert list(described) == list(MODELS)
    assert all(text.endswith(".") and len(text) < 110 for text in described.values())


def test_the_shortcut_is_a_strided_convolution() -> None:
    block = build("resnet", (3, 15, 15), 4, {}).blocks[1]
    x = torch.randn(2, 16, 15, 15)
    pool, conv, _ = block.skip
    expected = torch.nn.functional.conv2d(x, conv.weight, stride=2)
    torch.testing.assert_close(conv(pool(x)), expected)


def test_a_strided_1x1_convolution_on_few_channels_trains_as_in_plain_torch() -> None:
    """Laid out channels last, its gradient writes past its workspace: wrong numbers, a hang or a crash."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 1, stride=2), nn.Flatten(), nn.LazyLinear(4)
    )
    x, y = torch.randn(6, 3, 32, 32), torch.arange(6) % 4
    model(x)
    result = fedpews.run(
        fedpews.Experiment(rounds=1, method={"name": "fedavg"}, train={"lr": 0.1, "batch_size": 6}),
        model=model, clients=[(x, y)], test=(x, y), runtime={"engine": "eager"},
    )  # fmt: skip
    nn.functional.cross_entropy(model(x), y).backward()
    for name, value in model.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(result.params[0][name], value - 0.1 * value.grad, rtol=1e-4, atol=1e-6)
