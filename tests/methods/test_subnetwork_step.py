"""A step on a part of the network touches nothing of the rest, whatever the client's own terms would do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedpews.methods.contract import ClientHalf, Download
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fedprox import FedProx
from fedpews.methods.optimizers import AdamW
from fedpews.methods.representations import Moon
from fedpews.methods.scaffold import Scaffold
from fedpews.methods.subnetwork import start_subnetwork, step_subnetwork
from fedpews.neurons.network import Batch, Network
from fedpews.testing import equal
from fedpews.trees import map_tree


def network() -> Network:
    torch.manual_seed(3)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
    return Network(nn.Sequential(*layers), torch.zeros(1, 3))


CLIENTS = [
    FedAvg(momentum=0.9, weight_decay=0.1),
    FedAvg(optimizer=AdamW()),
    FedProx(mu=1.0),
    Scaffold(weight_decay=0.1),
    Moon(),
]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: type(client).__name__)
def test_closed_neurons_keep_weights_momentum_and_statistics(client: ClientHalf) -> None:
    net = network()
    start = net.initial()
    control = {name: torch.ones_like(start[name]) for name in net.trainable}
    download = Download(2, "train", 2, start, extra={"control": control})
    memory = {"control": map_tree(torch.neg, control), "previous": map_tree(torch.neg, start)}
    local = start_subnetwork(client, net, download, memory)
    if "anchor" in local:  # a proximal pull on everything
        local["anchor"] = map_tree(torch.neg, start)
    gates = torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0])
    torch.manual_seed(1)
    moved = local
    for _ in range(2):
        batch = Batch(torch.randn(6, 3), torch.arange(6) % 2)
        moved, _ = step_subnetwork(client, net, moved, batch, torch.zeros(0), 0.1, gates)
    mask = net.graph.expand(gates != 0)
    assert "1.running_mean" in mask
    still = [name for name, value in moved["params"].items() if equal(value, local["params"][name])]
    assert set(still) <= {"0.bias"}  # BatchNorm takes it out again
    for key in ("params", "velocity", "first", "second"):
        for name, value in moved.get(key, {}).items():
            closed = (
                ~mask[name].expand_as(value) if name in mask else torch.zeros_like(value, dtype=torch.bool)
            )
            assert torch.equal(value[closed], local[key][name][closed]), f"{key} of {name}"


def test_steps_are_counted_for_each_element() -> None:
    net, client = network(), Scaffold()
    control = {name: torch.zeros(net.shapes[name]) for name in net.trainable}
    local = start_subnetwork(
        client, net, Download(1, "train", 2, net.initial(), extra={"control": control}), None
    )
    batch = Batch(torch.randn(6, 3), torch.arange(6) % 2)
    draws = [[1.0, 1, 0, 1, 1, 1, 1, 1], [1.0, 0, 0, 1, 1, 0, 1, 1]]
    for gates in draws:
        local, _ = step_subnetwork(client, net, local, batch, torch.zeros(0), 0.1, torch.tensor(gates))
    assert local["taken"]["0.bias"].tolist() == [2, 1, 0, 2]
    # a weight takes part when the neurons on both its sides do
    assert local["taken"]["3.weight"][1].tolist() == [1, 1, 0, 1]


def test_a_scale_multiplies_what_is_read() -> None:
    net = network()
    torch.manual_seed(2)
    x = torch.randn(4, 3)
    once, twice = (net.gated(torch.full((8,), scale)).predict(net.initial(), x) for scale in (1.0, 2.0))
    assert not torch.allclose(once, twice)
