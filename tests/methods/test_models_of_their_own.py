"""Clients with models of their own: FedPer, FedRep, Ditto and local training, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedpews
from fedpews.compose import method as make
from fedpews.errors import ConfigError
from fedpews.methods.contract import Cohort, Method
from fedpews.methods.ditto import Ditto, own_solver
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fedbn import FedPer, FedRep, LocalOnly
from fedpews.methods.optimizers import Adam
from fedpews.methods.wire import encode_upload
from fedpews.neurons.network import Network
from fedpews.testing import Played, Playground, small_clients, small_network
from fedpews.trees import Tree
from fedpews.warmup import Fixed, with_warmup
from tiny import chain, point, targets


def own_models(method: Method, net: Network, played: Played) -> list[Tree]:
    """What each client would use after the last round."""
    total = len(played.memories)
    cohort = Cohort(len(played.params) + 1, tuple(range(total)), total, 0)
    half = method.client(method.phase(played.state, cohort.round))
    downloads = method.downloads(net, played.state, cohort)
    return [half.personal(net, downloads[i], played.memories[i]) for i in range(total)]


def test_ditto_by_hand() -> None:
    """One weight from 1, clients at 0 and 4, two steps of η = 0.1, λ = 0.5."""
    method, net = Ditto(FedAvg(), strength=0.5), point(1.0)
    played = Playground(method, net, targets(0, 4), batch_size=1).play(1)
    # global, as in test_base_methods: the mean of 1·0.9² = .81 and 4 − 3·.81 = 1.57
    assert played.params[0]["weight"].item() == pytest.approx(1.19)
    # own: v ← v − .1(v − y + .5(v − 1)). y = 0: 1 → .9 → .9 − .1(.9 − .05) = .815; y = 4: 1 → 1.3 → 1.3 + .255
    own = [model["weight"].item() for model in own_models(method, net, played)]
    assert own == pytest.approx([0.815, 1.555])


def test_dittos_global_model_is_the_inner_methods_to_the_bit() -> None:
    net = small_network()
    for name in ("fedavg", "scaffold"):
        bare, around = (
            Playground(method, net, small_clients()).partly(3)
            for method in (make(name), make(f"{name}+ditto"))
        )
        assert all(torch.equal(bare.params[-1][n], around.params[-1][n]) for n in net.names)


def test_ditto_without_strength_is_local_training() -> None:
    net = small_network()
    ends = []
    for method in (Ditto(FedAvg(), strength=0.0), LocalOnly(FedAvg())):
        ends.append(own_models(method, net, Playground(method, net, small_clients()).play(3)))
    for one, other in zip(*ends, strict=True):
        assert all(torch.allclose(one[n], other[n], atol=1e-6) for n in net.names)


def test_ditto_trains_a_clients_own_model_by_the_methods_optimiser() -> None:
    inner = with_warmup(FedAvg(optimizer=Adam(), clip_norm=2.0), 1)
    solver = own_solver(inner, 0.3)
    assert (solver.optimizer, solver.clip_norm, solver.mu) == (Adam(), 2.0, 0.3)


def test_ditto_refuses_a_method_that_sends_parts_of_the_model() -> None:
    method = Ditto(with_warmup(FedAvg(), 1, Fixed()))
    with pytest.raises(ConfigError, match="needs a method that sends all of it"):
        Playground(method, small_network(), small_clients()).play(1)
    with pytest.raises(ConfigError, match="personal models already"):
        Ditto(LocalOnly(FedAvg()))


def test_local_training_is_each_client_alone_and_sends_nothing() -> None:
    net, clients = small_network(), small_clients()
    method = LocalOnly(FedAvg())
    played = Playground(method, net, clients).play(3)
    for client, own in enumerate(own_models(method, net, played)):
        alone = Playground(FedAvg(), net, [clients[client]]).play(3).params[-1]
        assert all(torch.equal(own[n], alone[n]) for n in net.names)
    assert all(upload.params == {} for uploads in played.uploads for upload in uploads)
    assert len(encode_upload(net, played.uploads[-1][0])) < 300
    assert all(torch.equal(played.params[-1][n], net.initial()[n]) for n in net.names)


def test_fedper_by_hand() -> None:
    """Output v·u·x with v at the client: one step of η = 0.1 from u = 1, v = 2, clients at 0 and 4."""
    net, method = chain([1.0], [2.0]), FedPer(FedAvg())
    played = Playground(method, net, targets(0, 4, steps=1), batch_size=1).play(1)
    # the error is 2 and −2; ∂u = v·error = ±4 cancels in the mean, ∂v = u·error = ±2 does not leave the client
    assert played.params[0]["0.weight"].item() == pytest.approx(1.0)
    own = [model["1.weight"].item() for model in own_models(method, net, played)]
    assert own == pytest.approx([1.8, 2.2])
    assert "1.weight" not in played.uploads[0][0].params


def test_fedrep_by_hand() -> None:
    """The same with two steps: the first moves v alone, the second u alone."""
    net, method = chain([1.0], [2.0]), FedRep(FedAvg(), head_steps=1)
    played = Playground(method, net, targets(0, 4), batch_size=1).play(1)
    own = [model["1.weight"].item() for model in own_models(method, net, played)]
    assert own == pytest.approx([1.8, 2.2])
    # client 0: u ← 1 − .1·1.8·1.8 = .676; client 1: u ← 1 − .1·2.2·(2.2 − 4) = 1.396
    assert played.params[0]["0.weight"].item() == pytest.approx((0.676 + 1.396) / 2)


def test_what_fedrep_does_not_train_keeps_its_optimisers_slots() -> None:
    net, method = chain([1.0], [2.0]), FedRep(FedAvg(optimizer=Adam()), head_steps=1)
    half = method.client("train")
    state = method.init(net, net.initial(), 1)
    ground = Playground(method, net, targets(4))
    local, batches, noise = ground.begin(
        half, 0, method.downloads(net, state, Cohort(1, (0,), 1, 0))[0], None
    )
    local, _ = half.step(net, local, batches[0], noise[0], 0.1)
    first = local["inner"]["first_of_one"]
    assert (first["0.weight"].item(), first["1.weight"].item()) == pytest.approx((0.0, 0.1))


def test_the_first_values_of_what_stays_come_with_the_first_download() -> None:
    """So that a seed beside others starts its clients' heads from its own model."""
    net = small_network()
    method = FedPer(FedAvg())
    start = {name: value + 1 for name, value in net.initial().items()}
    state = method.init(net, start, 2)
    (sent, _) = method.downloads(net, state, Cohort(1, (0, 1), 2, 0))
    local = method.client("train").start(net, sent, None)
    assert torch.equal(local["own"]["4.weight"], start["4.weight"])


def test_a_seed_alone_is_the_seed_beside_others() -> None:
    clients = small_clients()
    given: dict[str, Any] = {"clients": clients, "test": clients[0], "rounds": 2, "method": "fedper"}
    given |= {
        "model": lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    }
    both = fedpews.run(seeds=[0, 1], **given).rounds.of_seed(1)
    alone = fedpews.run(seeds=[1], **given).rounds.of_seed(1)
    for one, other in zip(both, alone, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_clients_that_share_nothing_take_no_warmup() -> None:
    with pytest.raises(ConfigError, match="needs no warmup"):
        make("local+pews", warmup={"rounds": 1})


def test_options_find_their_owner() -> None:
    made: Any = make("fedprox+ditto", mu=0.5, strength=2.0)
    assert (made.strength, made.inner.mu) == (2.0, 0.5)
    with pytest.raises(ConfigError, match=r"fedprox has no option method\.lambda_"):
        make("fedprox+ditto", lambda_=1.0)
