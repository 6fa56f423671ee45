"""A module seen as pure functions gives what the module itself gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fedpews
from fedpews.errors import ConfigError
from fedpews.models import build
from fedpews.neurons import network, slice_module, trace
from fedpews.neurons.modules import GatedConvolution, channels_last, differentiate
from fedpews.neurons.network import Batch, Network


class Tied(nn.Module):
    """The same weight reads the input and the hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).relu())
        return out


def test_a_weight_with_two_names_gets_the_gradient_of_both_uses() -> None:
    torch.manual_seed(0)
    model = Tied()
    x, y = torch.randn(8, 4), torch.arange(8) % 4
    net = Network(model, x[:1])

    loss, grads, _ = net.gradients(net.initial(), Batch(x, y))

    wanted = F.cross_entropy(model(x), y)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    assert set(grads) == {"first.weight", "first.bias", "second.bias"}
    torch.testing.assert_close(grads["first.weight"], model.first.weight.grad)


def test_values_given_for_a_weight_with_two_names_are_used_in_both_places() -> None:
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    x = torch.randn(3, 4)
    net = Network(model, x[:1])

    torch.testing.assert_close(net.predict(Network(other, x[:1]).initial(), x), other(x).detach())


class LowRank(nn.Module):
    """LoRA: a frozen linear layer and a trained product of two thin ones beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.whole, self.down, self.up = (
            nn.Linear(inputs, outputs),
            nn.Linear(inputs, 2),
            nn.Linear(2, outputs),
        )
        self.whole.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.whole(x) + self.up(self.down(x))
        return out


def frozen_middle() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    model[2].requires_grad_(False)
    return model


def frozen_backbone() -> nn.Module:
    model = frozen_middle()
    model[0].requires_grad_(False)
    return model


def low_rank() -> nn.Module:
    return nn.Sequential(LowRank(4, 8), nn.ReLU(), LowRank(8, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("make", [frozen_middle, frozen_backbone, low_rank])
def test_what_is_frozen_reads_nothing_from_a_closed_neuron_either(make: object) -> None:
    torch.manual_seed(0)
    model: nn.Module = make().double()  # type: ignore[operator]
    x = torch.randn(5, 4).double()
    net = Network(model, x[:1], graph=trace(model, x[:1], frozen=True))
    neurons = torch.rand(net.graph.size) < 0.5
    for layer in net.graph.layers:
        neurons[layer.start] = True
    gated = net.gated(neurons.double())
    wanted = slice_module(model, net.graph, neurons)
    torch.testing.assert_close(gated.predict(net.initial(), x), wanted(x).detach())
    batch = Batch(x, torch.arange(5) % 3)
    loss, gradients, _ = gated.gradients(net.initial(), batch)
    F.cross_entropy(wanted(x), batch.y).backward()
    assert loss.isfinite()
    assert set(gradients) == {name for name, value in model.named_parameters() if value.requires_grad}
    for name, value in wanted.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(net.graph.slice(gradients, neurons)[name], value.grad)


def test_the_classifier_of_a_model_with_a_parameter_of_its_own_is_its_last_layer() -> None:
    model = build("vit", (1, 8, 8), 3, {"width": 8, "depth": 1, "heads": 2, "hidden": 6})
    assert Network(model, torch.zeros(1, 1, 8, 8)).classifier == "classifier"


def test_by_default_a_frozen_base_is_never_cut() -> None:
    torch.manual_seed(0)
    model, x = low_rank(), torch.randn(5, 4)
    net = Network(model, x[:1])
    assert [layer.name for layer in net.graph.layers] == ["0.down", "2.down"]
    closed = net.gated(torch.zeros(net.graph.size)).predict(net.initial(), x)
    for layer in (model[0], model[2]):  # without its low-rank part, but for the constant that it adds
        nn.init.zeros_(layer.up.weight)
    torch.testing.assert_close(closed, model(x).detach())


@pytest.mark.parametrize("traced", [True, False])
def test_a_layer_that_is_split_into_two_is_masked_unevenly_without_being_cut(traced: bool) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.a(x).relu().chunk(2, 1)
            out: Tensor = self.b(one) + self.c(other)
            return out

    model, x = Halves(), torch.randn(2, 3)
    graph = trace(model, x)
    assert graph.uncut == {"a"}
    # described by hand, nothing is known about cutting it
    graph = graph if traced else replace(graph, uncut=frozenset())
    assert not Network(model, x[:1], graph=graph).can_be_cut


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))


def test_lazy_layers_are_initialised_before_they_are_traced() -> None:
    model = lazy()
    assert [layer.size for layer in trace(model, torch.randn(2, 3)).layers] == [8]
    assert model[0].has_uninitialized_params()  # tracing leaves the model as it was


def test_a_model_wrapped_in_data_parallel_is_refused_in_one_line() -> None:
    inside = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for model in (nn.DataParallel(inside), nn.Sequential(nn.DataParallel(inside))):
        for use in (Network, trace):
            with pytest.raises(ConfigError, match=r"is wrapped in DataParallel; give the module inside"):
                use(model, torch.zeros(1, 3))


class Rounded(nn.Module):
    """Weights in half the precision, inputs and outputs in single."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.bfloat16()).float()
        return out


class Checkpointed(nn.Module):
    """The second layer's activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.b, self.a(x).relu(), use_reentrant=self.reentrant)
        out: Tensor = self.c(hidden.relu())
        return out


def two_rounds(model: object, method: str) -> fedpews.Result:
    x, y = torch.randn(16, 3), torch.arange(16) % 2
    clients = [(x[y == label], y[y == label]) for label in (0, 1)]
    return fedpews.run(
        model=model,
        clients=clients,
        test=(x, y),
        method=method,
        rounds=2,
        warmup={"rounds": 1},
        runtime={"engine": "eager"},
    )


@pytest.mark.parametrize("method", ["fedavg+pews", "scaffold+pews", "fednova+pews"])
def test_a_model_in_bfloat16_keeps_its_precision_in_a_warmup(method: str) -> None:
    torch.manual_seed(0)
    model = two_rounds(Rounded, method).model()
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}


def test_a_model_that_takes_no_single_precision_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"inputs are float32: give model.float\(\)"):
        two_rounds(nn.Linear(3, 2).bfloat16(), "fedavg+pews")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_refused_in_one_line(reentrant: bool) -> None:
    # computed again with other weights than those of the step, its gradients would be wrong
    with pytest.raises(ConfigError, match="cannot be trained: activation checkpointing is not supported"):
        two_rounds(Checkpointed(reentrant), "fedavg+pews")


def test_a_lazy_layer_is_initialised_from_the_seed_of_the_others() -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))

    nets = [Network(build(seed), torch.zeros(1, 1, 6, 6)) for seed in (0, 0, 1)]
    weights = [net.initial()["3.weight"] for net in nets]
    assert weights[0].shape == (3, 4 * 16)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert nets[0].graph.size == 4


class Viewing(nn.Module):
    """As many tutorials have it: the shape after the convolutions is written into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6 * 9, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv(x).relu(), 2).view(-1, 54)
        out: Tensor = self.head(self.fc(x).relu())
        return out


@pytest.mark.parametrize("method", ["fedavg", "fedavg+pews", "fedavg+pews-fixed"])
def test_a_model_that_views_what_a_convolution_made_is_trained_and_evaluated(method: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(24, 3, 8, 8), torch.arange(24) % 4
    assert not Network(Viewing(), x[:1]).survives_channels_last
    result = fedpews.run(
        model=Viewing,
        clients=[(x[:12], y[:12]), (x[12:], y[12:])],
        test=(x, y),
        method=method,
        rounds=2,
        **({"warmup": {"rounds": 1}} if "pews" in method else {}),
        runtime={"engine": "eager"},
    )
    assert len(result.rounds) == 2


def test_a_model_that_flattens_is_laid_out_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4))
    assert Network(model, torch.randn(1, 3, 8, 8)).survives_channels_last


def strided() -> nn.Module:
    layers = [
        nn.Conv2d(2, 6, 3, padding=1),
        nn.GroupNorm(3, 6),
        nn.ReLU(),
        nn.Conv2d(6, 8, (3, 1), 2, (0, 1), 2),
    ]
    return nn.Sequential(
        *layers, nn.ReLU(), nn.Conv2d(8, 5, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    )


def with_batch_norm() -> nn.Module:
    layers = [
        nn.Conv2d(2, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


HALVED = {
    "strided": strided,
    "BatchNorm": with_batch_norm,
    "residual": lambda: build("resnet", (2, 9, 9), 3, {"width": 4}),
}


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
@pytest.mark.parametrize("gates", ["half", "real", "open", "a layer closed", "closed"])
@pytest.mark.parametrize("kind", HALVED)
def test_the_gradient_by_the_gates_is_the_same_without_closed_channels(
    kind: str, gates: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = Network(HALVED[kind]().double(), torch.randn(1, 2, 9, 9, dtype=torch.float64))
    drawn = (torch.arange(net.graph.size) % 3 > 0).double()
    layer = net.graph.layers[1]
    closed = drawn.clone()
    closed[layer.start : layer.start + layer.size] = 0
    values = {
        "half": drawn,
        "real": drawn * torch.randn(net.graph.size, dtype=torch.float64),
        "open": torch.ones_like(drawn),
        "a layer closed": closed,
        "closed": torch.zeros_like(drawn),
    }[gates]
    params, x = net.initial(), torch.randn(4, 2, 9, 9, dtype=torch.float64)
    if layout == "channels last":
        params, x = {name: channels_last(value) for name, value in params.items()}, channels_last(x)
    batch = Batch(x, torch.arange(4) % 3)

    calls: list[int] = []
    backward = GatedConvolution.backward
    monkeypatch.setattr(
        GatedConvolution, "backward", staticmethod(lambda *given: calls.append(1) or backward(*given))
    )
    found = []
    for limit in (float("inf"), 0):
        monkeypatch.setattr(network, "CUT_FROM", limit)
        found.append(differentiate(lambda gates: net.gated(gates).loss(params, batch), values))
    (whole, _, expected), (loss, _, slope) = found

    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-12)
    assert calls or gates in ("a layer closed", "closed"), "no convolution was halved"
