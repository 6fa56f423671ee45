"""The law of masks, on every kind of architecture: closing neurons equals removing them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from architectures import ALL
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedpews.neurons import NeuronGraph, slice_module, trace
from fedpews.trees import Tree


def prepared(name: str) -> tuple[nn.Module, Tensor, NeuronGraph]:
    model, x, graph = traced(name)
    return copy.deepcopy(model), x, graph


@functools.cache
def traced(name: str) -> tuple[nn.Module, Tensor, NeuronGraph]:
    """A model in double precision whose norms have neither neutral weights nor neutral statistics."""
    torch.manual_seed(len(name))
    model, x = ALL[name][0]()
    shake(model)
    model, x = model.double(), x.double() if x.is_floating_point() else x
    return model, x, trace(model, x)


def shake(model: nn.Module) -> None:
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point():
            noise = torch.rand_like(value)
            value.data += noise if name.endswith("running_var") else 0.4 * (noise - 0.5)


def tensors(model: nn.Module) -> Tree:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def random_neurons(graph: NeuronGraph, seed: int, to_cut: bool = True) -> Tensor:
    """A random mask that leaves every layer at least one neuron, and whole what could not be cut out."""
    generator = torch.Generator().manual_seed(seed)
    neurons = torch.rand(graph.size, generator=generator) < 0.6
    for layer in graph.layers:
        neurons[layer.start + int(torch.randint(layer.size, (), generator=generator))] = True
        if to_cut and layer.name in graph.uncut:
            neurons[layer.start : layer.start + layer.size] = True
    return neurons


@pytest.mark.parametrize("name", ALL)
def test_every_hidden_layer_is_found_and_neither_input_nor_output(name: str) -> None:
    _, _, graph = prepared(name)
    assert [(layer.name, layer.size) for layer in graph.layers] == ALL[name][1]
    assert [layer.start for layer in graph.layers] == [
        sum(before.size for before in graph.layers[:index]) for index in range(len(graph.layers))
    ]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ALL)
def test_masked_forward_equals_forward_of_the_sliced_network(name: str, training: bool) -> None:
    model, x, graph = prepared(name)
    model.train(training)
    for seed in range(3):
        neurons = random_neurons(graph, seed)
        small = slice_module(model, graph, neurons)
        gated = graph.gate(tensors(copy.deepcopy(model)), neurons.double())
        torch.testing.assert_close(functional_call(model, gated, (x,)), small(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_gradient_is_zero_exactly_where_expand_closes(name: str) -> None:
    model, x, graph = prepared(name)
    model.train()
    neurons = random_neurons(graph, 1, to_cut=False)

    def loss(params: Tree) -> Tensor:
        buffers = {key: value.clone() for key, value in model.named_buffers()}  # BatchNorm writes into them
        return functional_call(model, graph.gate(params, neurons.double()) | buffers, (x,)).pow(3).sum()

    gradients = grad(loss)({key: value.detach() for key, value in model.named_parameters()})
    masks = graph.expand(neurons)
    for key, gradient in gradients.items():
        closed = ~masks.get(key, torch.tensor(True)).expand_as(gradient)
        assert torch.equal(gradient[closed], torch.zeros_like(gradient[closed])), key


@pytest.mark.parametrize("name", ALL)
def test_gradient_of_the_open_elements_equals_that_of_the_sliced_network(name: str) -> None:
    model, x, graph = prepared(name)
    neurons = random_neurons(graph, 2)
    small = slice_module(model.eval(), graph, neurons)
    small(x).pow(3).sum().backward()
    functional_call(model, graph.gate(tensors(model), neurons.double()), (x,)).pow(3).sum().backward()
    gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    sliced = graph.slice(gradients, neurons)
    for key, value in small.named_parameters():
        if value.grad is not None:
            torch.testing.assert_close(sliced[key], value.grad, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ALL)
def test_slice_then_scatter_changes_only_what_expand_keeps(name: str) -> None:
    model, _, graph = prepared(name)
    neurons = random_neurons(graph, 3)
    full = {key: value.detach() for key, value in tensors(model).items() if value.is_floating_point()}
    sliced = graph.slice(full, neurons)
    back = graph.scatter(full, {key: value + 1 for key, value in sliced.items()}, neurons)
    masks = graph.expand(neurons)
    for key, value in full.items():
        torch.testing.assert_close(back[key], value + masks.get(key, torch.tensor(True)).double())
        assert sliced[key].numel() == int(masks.get(key, torch.tensor(True)).expand_as(value).sum())


@pytest.mark.parametrize("name", ALL)
def test_the_sliced_module_states_the_sizes_it_has(name: str) -> None:
    model, x, graph = prepared(name)
    small = slice_module(model, graph, random_neurons(graph, 4))
    for module in small.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        elif isinstance(module, nn.Conv2d):
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels // module.groups)
        elif isinstance(module, nn.ConvTranspose2d):
            assert module.weight.shape[:2] == (module.in_channels, module.out_channels // module.groups)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.weight.shape == module.running_mean.shape == (module.num_features,)
        elif isinstance(module, nn.GroupNorm) and module.affine:
            assert module.weight.shape == (module.num_channels,)
    assert model(x).shape == small(x).shape


def test_all_neurons_open_is_the_model_itself() -> None:
    model, x, graph = prepared("cnn")
    gated = graph.gate(tensors(model), torch.ones(graph.size, dtype=torch.double))
    assert torch.equal(functional_call(model, gated, (x,)), model(x))


def test_gate_and_expand_agree_under_vmap_and_grad_with_a_loop() -> None:
    model, x, graph = prepared("cnn_batchnorm")
    model.eval()
    params = {key: value.detach() for key, value in tensors(model).items()}
    gates = torch.rand(4, graph.size, dtype=torch.double)

    def loss(gates: Tensor) -> Tensor:
        return functional_call(model, graph.gate(params, gates), (x,)).pow(2).sum()

    together = vmap(grad(loss))(gates)
    torch.testing.assert_close(together, torch.stack([grad(loss)(one) for one in gates]))
    assert bool((together != 0).all())
    for key, value in vmap(graph.expand)(gates > 0.5).items():
        assert torch.equal(value, torch.stack([graph.expand(one > 0.5)[key] for one in gates]))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=4), st.integers(0, 2**31))
def test_the_law_holds_for_mlps_of_any_widths(widths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in zip([3, *widths], widths, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 2)).double()
    check_law(model, torch.randn(4, 3).double(), widths, seed)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(2, 6), min_size=1, max_size=3),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_law_holds_for_cnns_of_any_widths(widths: list[int], side: int, norm: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in zip([2, *widths], widths, strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.BatchNorm2d(outputs)] if norm else []
    layers += [nn.AdaptiveMaxPool2d(side), nn.Flatten(), nn.Linear(widths[-1] * side * side, 2)]
    model = nn.Sequential(*layers).double()
    shake(model)
    check_law(model, torch.randn(4, 2, 5, 5).double(), widths, seed)


def check_law(model: nn.Module, x: Tensor, widths: list[int], seed: int) -> None:
    graph = trace(model.eval(), x)
    assert [layer.size for layer in graph.layers] == widths
    neurons = random_neurons(graph, seed)
    gated = functional_call(model, graph.gate(tensors(model), neurons.double()), (x,))
    torch.testing.assert_close(gated, slice_module(model, graph, neurons)(x))
