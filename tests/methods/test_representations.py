"""FedDecorr and FedUV against a few lines of torch, by its own correlation, deviation, distances and median."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedpews.methods.fedavg import FedAvg
from fedpews.methods.representations import FedDecorr, FedUV
from fedpews.neurons.network import Batch, Network
from fedpews.seeds import global_generator
from fedpews.testing import Playground, check_same, small_clients, small_network
from fedpews.trees import Tree


def network() -> Network:
    """Two inputs, three features without activation, two classes."""
    with global_generator(0):
        return Network(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.zeros(1, 2))


X = torch.tensor([[1.0, 0.5], [-0.3, 2.0], [0.7, -1.0], [2.0, 0.1]])
Y = torch.tensor([0, 1, 1, 0])


def gradients(method: FedAvg, batch: Batch, net: Network | None = None) -> Tree:
    net = net or network()
    return method.gradient(net, {"params": net.initial()}, batch)[1]


def slopes(term: Callable[[Tensor, Tensor], Tensor]) -> Tree:
    """The gradient of cross-entropy and a term of (features, outputs), by torch alone."""
    module = network().module(network().initial())
    features = module[0](X)  # type: ignore[index]
    outputs = module[1](features)  # type: ignore[index]
    (nn.functional.cross_entropy(outputs, Y) + term(features, outputs)).backward()
    return {name: value.grad for name, value in module.named_parameters()}  # type: ignore[misc]


def decorrelation(features: Tensor, outputs: Tensor) -> Tensor:
    K = torch.corrcoef(features.T)
    # N = 4 samples: (N − 1)²/N = 9/4; K has six elements off its diagonal
    return 0.1 * 9 / 4 * (K.pow(2).sum() - 3) / 6


def uniformity_and_variance(features: Tensor, outputs: Tensor) -> Tensor:
    squares = torch.pdist(features).pow(2)
    # two classes: the deviation of (1, 0) is 1/√2
    lacking = (0.5**0.5 - outputs.softmax(1).std(0)).clamp_min(0).mean()
    return 2.5 * lacking + 0.5 * torch.exp(-squares / squares.median()).mean()


@pytest.mark.parametrize(
    ("method", "term"), [(FedDecorr(), decorrelation), (FedUV(), uniformity_and_variance)]
)
def test_its_gradient_is_that_of_the_formula(
    method: FedAvg, term: Callable[[Tensor, Tensor], Tensor]
) -> None:
    found, expected = gradients(method, Batch(X, Y)), slopes(term)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4)
    plain = gradients(FedAvg(), Batch(X, Y))
    assert not torch.allclose(found["0.weight"], plain["0.weight"], atol=1e-3)


@pytest.mark.parametrize("method", [FedDecorr(), FedUV()])
def test_padding_and_a_single_sample_add_nothing(method: FedAvg) -> None:
    padded = Batch(torch.cat([X, 9 * X]), torch.cat([Y, Y]), torch.tensor([1.0] * 4 + [0.0] * 4))
    found, expected = gradients(method, padded), gradients(method, Batch(X, Y))
    alone, plain = (gradients(m, Batch(X[:1], Y[:1])) for m in (method, FedAvg()))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4)
        assert torch.equal(alone[name], plain[name])


@pytest.mark.parametrize("method", [FedDecorr(), FedUV()])
def test_samples_that_are_all_alike_have_a_finite_gradient(method: FedAvg) -> None:
    found = gradients(method, Batch(X[:1].expand(4, 2), Y))
    assert all(bool(value.isfinite().all()) for value in found.values())


@pytest.mark.parametrize("method", [FedDecorr(), FedUV()])
def test_closed_neurons_count_as_if_they_were_not_there(method: FedAvg) -> None:
    net, open_neurons = small_network(), torch.tensor([True, False, True, True, False, True, True, True])
    (x, y), params = small_clients()[0], small_network().initial()
    gated = method.gradient(net.gated(open_neurons.float()), {"params": params}, Batch(x, y))[1]
    cut = method.gradient(net, {"params": net.graph.slice(params, open_neurons)}, Batch(x, y))[1]
    for name, value in net.graph.slice(gated, open_neurons).items():
        torch.testing.assert_close(value, cut[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("method", [FedDecorr(strength=0.0), FedUV(variance=0.0, uniformity=0.0)])
def test_without_strength_it_is_fedavg(method: FedAvg) -> None:
    net, clients = small_network(), small_clients()
    ours, plain = (Playground(m, net, clients).partly(2) for m in (method, FedAvg()))
    check_same(ours, plain, "it differs", deep=False)
