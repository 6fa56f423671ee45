"""Parameters that stay at the client."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedpews.compose import METHODS
from fedpews.compose import method as make
from fedpews.errors import ConfigError
from fedpews.methods.contract import Cohort
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fedbn import Local
from fedpews.methods.scaffold import Scaffold
from fedpews.methods.wire import encode_download, encode_upload
from fedpews.neurons.network import Network
from fedpews.testing import Playground, check_laws, small_clients
from fedpews.warmup import Fixed, Learned, with_warmup

OWN = ("1.weight", "1.bias", "1.running_mean", "1.running_var")


def network() -> Network:
    torch.manual_seed(3)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)]
    return Network(nn.Sequential(*layers), torch.zeros(1, 3))


@pytest.mark.parametrize("name", METHODS)
def test_norm_layers_are_never_sent_and_never_change_at_the_server(name: str) -> None:
    net = network()
    played = Playground(Local(make(name)), net, small_clients(samples=8)).partly(3)
    for first in played.downloads[0]:
        assert all(torch.equal(first.extra["first"][f"first:{own}"], net.initial()[own]) for own in OWN)
    # from then on they are at the client
    for messages in (*played.uploads, *played.downloads):
        for message in messages:
            trees = [message.params, *message.extra.values()]
            assert not any(own in tree for tree in trees for own in OWN)
    for own in OWN:
        assert torch.equal(played.params[-1][own], net.initial()[own])


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "moon", "ist", "fedpm"])
def test_with_local_keeps_the_laws(name: str) -> None:
    # Adam would blow up the rounding in the gradient of a bias before a BatchNorm, which is zero
    options = {"scores": "sgd"} if name == "fedpm" else {}
    check_laws(Playground(Local(make(name, **options)), network(), small_clients(samples=8)))


@pytest.mark.parametrize("masks", [Learned(), Fixed()])
def test_with_local_goes_around_a_warmup(masks: Learned | Fixed) -> None:
    method = Local(with_warmup(Scaffold(), 2, masks))
    check_laws(Playground(method, network(), small_clients(samples=8)))


def test_each_client_keeps_and_uses_its_own_statistics() -> None:
    net, method = network(), Local(FedAvg())
    played = Playground(method, net, small_clients(samples=8)).play(2)
    means = [memory["own"]["1.running_mean"] for memory in played.memories.values()]
    assert not torch.allclose(means[0], means[1])
    downloads = method.downloads(net, played.state, Cohort(3, (0, 1, 2), 3, 0))
    personal = method.client("train").personal(net, downloads[0], played.memories[0])
    assert torch.equal(personal["1.running_mean"], means[0])
    assert torch.equal(personal["0.weight"], played.params[-1]["0.weight"])


def test_a_local_parameter_trains_as_if_its_client_were_alone() -> None:
    """With everything local SCAFFOLD must not correct anything: each client does plain SGD of its own."""
    net = network()
    names = ("0", "1", "3", "5")
    alone = [Playground(FedAvg(), net, [client]).play(3).params[-1] for client in small_clients(samples=8)]
    played = Playground(Local(Scaffold(), names), net, small_clients(samples=8)).play(3)
    for client, params in enumerate(alone):
        for name, value in played.memories[client]["own"].items():
            assert torch.allclose(value, params[name], atol=1e-6), name


def test_the_bytes_of_local_parameters_are_saved() -> None:
    net = network()
    grounds = [Playground(m, net, small_clients(samples=8)) for m in (FedAvg(), Local(FedAvg()))]
    # the first download brings the initial values
    whole, kept = (ground.play(2) for ground in grounds)
    saved_up = len(encode_upload(net, whole.uploads[0][0])) - len(encode_upload(net, kept.uploads[0][0]))
    saved_down = len(encode_download(net, whole.downloads[1][0])) - len(
        encode_download(net, kept.downloads[1][0])
    )
    assert saved_up >= 4 * 16
    assert saved_down >= 4 * 16


def test_a_name_the_model_lacks_is_an_error_before_the_first_round() -> None:
    ground = Playground(FedAvg(), network(), small_clients())
    with pytest.raises(ConfigError, match="nothing to keep local"):
        replace(ground, method=Local(FedAvg(), ("no-such-layer",))).play(1)
