"""FedExP at the server: by hand, against the tutorial's lines, and where clients own parts of the model."""

from __future__ import annotations

import pytest
import torch
from test_tutorial import tutorial as tutorial

from fedpews.compose import method as make
from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.private import Private
from fedpews.methods.server_optimizers import SGD, FedExP
from fedpews.testing import Playground, check_laws, small_clients, small_network
from fedpews.warmup import Fixed, with_warmup
from tiny import chain, point, targets


def test_it_goes_further_where_clients_pull_apart() -> None:
    method = FedAvg(server=FedExP(eps=0.0))
    # w = 1, two steps of 0.1: Δ = 0.19·(label − 1), so −1.71 and 1.52, their mean −0.095;
    # η_g = (1.71² + 1.52²)/2 / (2·0.095²) = 145
    played = Playground(method, point(), targets(-8, 9), batch_size=1).play(1)
    assert played.params[0]["weight"].item() == pytest.approx(1 - 145 * 0.095)


def test_it_is_fedavg_where_clients_agree() -> None:
    # both at 0: Δ_0 = Δ_1, so the ratio is 1/2 and η_g = 1
    ends = [
        Playground(FedAvg(server=server), point(), targets(0, 0), batch_size=1).play(1).params[0]["weight"]
        for server in (FedExP(), SGD())
    ]
    assert torch.equal(*ends)


def test_it_is_the_method_that_the_tutorial_writes(request: pytest.FixtureRequest) -> None:
    written = request.getfixturevalue("tutorial").FedExP(eps=0.01)
    net, clients = small_network(), small_clients()
    ours, theirs = (
        Playground(m, net, clients).play(3).params for m in (FedAvg(server=FedExP(eps=0.01)), written)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in net.names)


def test_squares_are_averaged_over_the_owners_of_each_element() -> None:
    net = chain([1.0, 2.0], [3.0, 4.0])
    old = net.initial()
    # client 0 owns both neurons and changes each of the four weights by 2; client 1 owns neuron 0 alone, by −1
    values = [{n: v + change for n, v in old.items()} for change in (2.0, -1.0)]
    average = Average((1.0, 1.0), (None, net.graph.expand(torch.tensor([True, False]))))
    goal = FedExP(eps=0.0).extrapolate(net, old, average(values, old), values, average)
    # neuron 0 (two weights): squares (4 + 1)/2 = 2.5, Δ̄ = .5; neuron 1: squares 4, Δ̄ = 2
    rate = (2 * 2.5 + 2 * 4) / (2 * (2 * 0.25 + 2 * 4))
    assert rate < 1  # neuron 1 has a single owner, whose change is the mean
    assert goal["0.weight"].flatten().tolist() == pytest.approx([1.5, 4.0])
    opposite = [values[0], {n: v - 1.9 for n, v in old.items()}]
    everybody = Average((1.0, 1.0), (None, None))
    goal = FedExP(eps=0.0).extrapolate(net, old, everybody(opposite, old), opposite, everybody)
    # (4 + 3.61)/2 = 3.805 for each weight, Δ̄ = .05: η_g = 3.805/(2·.0025) = 761
    assert goal["0.weight"].flatten().tolist() == pytest.approx([1 + 761 * 0.05, 2 + 761 * 0.05], rel=1e-3)


def test_in_a_warmup_without_common_neurons_it_is_fedavg() -> None:
    net, clients = chain([1.0, 2.0], [0.3, 0.4]), targets(0, 4)
    ends = [
        Playground(with_warmup(FedAvg(server=server), 2, Fixed()), net, clients).play(2).params[-1]
        for server in (FedExP(), SGD())
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in net.names)


@pytest.mark.parametrize("name", ["fedexp", "fedexp+pews", "scaffold+fedexp+pews-fixed", "fedexp+fedper"])
def test_it_keeps_the_contract(name: str) -> None:
    warmup = {"warmup": {"rounds": 2}} if "pews" in name else {}
    check_laws(Playground(make(name, **warmup), small_network(), small_clients()))


def test_it_asks_for_more_than_differential_privacy_pays_for() -> None:
    private = Private(FedAvg(server=FedExP()), clip=1.0, noise=1.0)
    with pytest.raises(ConfigError, match="several averages in a round"):
        Playground(private, small_network(), small_clients()).play(1)
