"""Other people's architectures: each is masked as far as it can be, with the right numbers, or says why not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from importlib.util import find_spec

import hugging_face
import others
import pictures
import pytest
import torch
from collection import Animal, import_torchvision
from torch import Tensor
from torch.func import functional_call

from fedpews.errors import ConfigError
from fedpews.neurons import NeuronGraph, trace
from fedpews.neurons.modules import main_output, outputs_of
from fedpews.neurons.network import Batch, Network, differentiate
from fedpews.trees import Tree

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's

ANIMALS: list[Animal] = [*hugging_face.ANIMALS, *pictures.ANIMALS, *others.ANIMALS]

LITTLE = {"SqueezeBertForSequenceClassification"}
"""Those of which less than a third of the weights can be masked: its grouped convolutions read a normed stream."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)


def squared(outputs: object, _: Tensor) -> Tensor:
    """A loss of each sample on whatever a model returns."""
    parts = [part.flatten(1) for part in outputs_of(outputs) if part.is_floating_point() and part.dim() > 1]
    return torch.cat(parts, 1).pow(2).mean(1)


def some_closed(graph: NeuronGraph, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    neurons = torch.rand(graph.size, generator=generator) < 0.6
    for layer in graph.layers:
        neurons[layer.start + int(torch.randint(layer.size, (), generator=generator))] = True
    return neurons


def closed_by_hand(graph: NeuronGraph, tensors: Tree, neurons: Tensor) -> Tree:
    """Zero wherever a closed neuron is read, and other numbers wherever one is made."""
    closed = dict(tensors)
    for name, axes in graph.axes.items():
        for axis in sorted(axes, key=lambda axis: axis.reads):
            other = torch.zeros_like(closed[name]) if axis.reads else 1 - closed[name]
            closed[name] = torch.where(axis.spread(neurons), closed[name], other)
    return closed


def marked(animal: Animal) -> object:
    return pytest.param(animal, id=str(animal), marks=[pytest.mark.slow] if animal.slow else [])


@pytest.mark.parametrize("animal", [marked(animal) for animal in ANIMALS])
def test_closing_neurons_leaves_no_trace_of_them_and_the_open_ones_learn(animal: Animal) -> None:
    reason = f"{animal.library} is not installed (make zoo)"
    if animal.library in {"torchvision", "timm", "vit_pytorch", "transformers"}:
        pytest.importorskip("PIL", reason=reason)
        if find_spec("torchvision") is None:
            pytest.skip(reason)
        import_torchvision()
    pytest.importorskip(animal.library, reason=reason)
    torch.manual_seed(0)
    model, x = animal.build()
    if animal.refused:
        with pytest.raises(ConfigError, match="no hidden neuron that could be masked"):
            trace(model, x)
        return
    double = copy.deepcopy(model).double()
    for parameter in double.parameters():  # a layer that starts at zero lets no gradient through
        parameter.data += 0.01 * torch.rand_like(parameter)
    x = x.double() if x.is_floating_point() else x
    net = Network(double, x, sample_loss=squared)  # type: ignore[arg-type]
    graph = net.graph
    assert graph.masked_share >= (0.05 if animal.name in LITTLE else 1 / 3), dict(graph.left_whole)
    neurons = some_closed(graph, 1)
    gated, params = net.gated(neurons.double()), net.initial()

    # the pass of the gated network is that of the network whose closed neurons are something else entirely
    double.eval()
    tensors = {**dict(double.named_parameters()), **dict(double.named_buffers())}
    with torch.no_grad():
        by_hand = main_output(functional_call(double, closed_by_hand(graph, tensors, neurons), (x,)))
        torch.testing.assert_close(gated.predict(params, x), by_hand, rtol=1e-6, atol=1e-6)

    # nothing of a closed neuron has a gradient, something of the open ones has, and so have the gates
    batch = Batch(x, torch.zeros(len(x), dtype=torch.long))
    torch.manual_seed(0)
    _, gradients, _ = gated.gradients(params, batch)
    masks = graph.expand(neurons)
    moved = 0
    for name, gradient in gradients.items():
        mask = masks.get(name, torch.tensor(True)).expand_as(gradient)
        assert not bool(gradient[~mask].any()), name
        moved += int(gradient[mask].count_nonzero()) if name in masks else 0
    assert moved > 0
    _, _, slope = differentiate(lambda gates: net.gated(gates).loss(params, batch), neurons.double())
    assert bool(slope.isfinite().all())
    assert bool(slope.any())
