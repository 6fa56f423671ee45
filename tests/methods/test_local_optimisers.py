"""The local optimisers: torch's numbers, right under masks, the same on both engines, refused where they do harm."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpews
from fedpews.build import Setup
from fedpews.compose import METHODS, OPTIMIZERS, local_optimizer, method_fields
from fedpews.compose import method as make
from fedpews.data import from_clients
from fedpews.engines.compiled import engine as compiled
from fedpews.engines.compiled.engine import CompiledEngine
from fedpews.engines.compiled.program import Looped, Step
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Engine, Schedule
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.methods import subnetwork
from fedpews.methods.contract import Download, Method
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fednova import FedNova
from fedpews.methods.fedprox import FedProx
from fedpews.methods.optimizers import Adam, Momentum, Optimizer
from fedpews.methods.scaffold import Scaffold
from fedpews.methods.subnetwork import start_subnetwork, step_subnetwork
from fedpews.neurons.network import Batch
from fedpews.results.memories import MemoryStore
from fedpews.server import Server
from fedpews.testing import Playground, small_clients, small_network
from fedpews.trees import Tree
from fedpews.warmup import Learned, with_warmup
from tiny import chain

TORCHS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.99, weight_decay=0.1),
}


@pytest.mark.parametrize("name", TORCHS)
def test_a_client_takes_the_steps_that_torch_takes(name: str) -> None:
    net = small_network()
    x, y = small_clients()[0]
    method = FedAvg(weight_decay=0.1, clip_norm=0.5, optimizer=local_optimizer(name))
    local = method.start(net, Download(1, "train", 1, net.initial()), None)
    module = net.module(net.initial())
    theirs = TORCHS[name](module.parameters())
    for _ in range(5):
        local, _ = method.step(net, local, Batch(x, y), torch.zeros(0), 0.05)
        theirs.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        theirs.step()
    for parameter, value in module.named_parameters():
        assert torch.allclose(local["params"][parameter], value, rtol=1e-4, atol=1e-5), parameter


def test_adamw_decays_by_a_hundredth_where_nothing_is_said() -> None:
    # one weight at 2 with gradient 0: 2 − 0.1·0.01·2
    half = FedAvg(optimizer=local_optimizer("adamw"))
    net = chain([2.0], [0.0])
    local = half.start(net, Download(1, "train", 1, net.initial()), None)
    grads = {name: torch.zeros(net.shapes[name]) for name in net.trainable}
    assert half.descend(local, grads, {}, 0.1)["params"]["0.weight"].item() == pytest.approx(1.998)


def test_two_steps_of_adam_by_hand() -> None:
    rule, x = Adam(), torch.tensor(1.0)
    slots = rule.start(x)
    x, slots = rule.step(x, torch.tensor(0.5), slots, 0.1)
    # both corrections make the first step one of length η
    assert x.item() == pytest.approx(0.9)
    x, slots = rule.step(x, torch.tensor(-1.0), slots, 0.1)
    # m = .9·.05 − .1 = −.055 over 1 − .81; v = .999·.00025 + .001 = .00124975 over 1 − .998001
    assert x.item() == pytest.approx(0.9 + 0.1 * (0.055 / 0.19) / (0.00124975 / 0.001999) ** 0.5, rel=1e-5)


def test_an_element_that_was_closed_has_its_own_bias_correction() -> None:
    """Open for the first time in step 3, an element's first step of Adam is still one of length η."""
    net, half = chain([1.0, 2.0], [3.0, 4.0]), FedAvg(optimizer=Adam())
    local = start_subnetwork(half, net, Download(1, "train", 2, net.initial()), None)
    batch = Batch(torch.ones(1, 1), torch.zeros(1))
    for gates in ([1.0, 0.0], [1.0, 0.0], [1.0, 1.0]):
        before = local
        local, _ = step_subnetwork(half, net, local, batch, torch.zeros(0), 0.1, torch.tensor(gates))
        if not gates[1]:
            for key in ("params", *Adam.slots):
                assert torch.equal(local[key]["0.weight"][1], before[key]["0.weight"][1]), key
    assert (before["params"]["0.weight"] - local["params"]["0.weight"])[1].item() == pytest.approx(0.1)
    assert local["first_of_one"]["0.weight"].flatten().tolist() == pytest.approx([1 - 0.9**3, 1 - 0.9])


@pytest.mark.parametrize("name", ["momentum", "adam", "rmsprop"])
def test_the_smaller_network_takes_the_same_steps_as_the_masked_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping and FedProx too: a closed neuron's pull does not count in the gradient's length."""
    net, half = small_network(), FedProx(mu=5.0, clip_norm=0.1, optimizer=local_optimizer(name))
    x, y = small_clients()[0]
    ends = []
    for limit in (float("inf"), 0.0):
        monkeypatch.setattr(subnetwork, "CUT_FROM", limit)
        local = start_subnetwork(half, net, Download(1, "train", 2, net.initial()), None)
        for gates in ([1.0] * 8, [1.0, 0, 1, 0, 1, 0, 0, 1], [0.0, 1, 1, 0, 1, 1, 0, 1]):
            local, _ = step_subnetwork(
                half, net, local, Batch(x, y), torch.zeros(0), 0.1, torch.tensor(gates)
            )
        ends.append(local["params"])
    for parameter, value in ends[0].items():
        assert torch.allclose(ends[1][parameter], value, atol=1e-6), parameter


@pytest.mark.parametrize("warm", [False, True], ids=["bare", "warmup"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_engines_give_the_same_numbers(name: str, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "load", lambda program, *_: Looped(Step(program), 1, len(program.changes)))
    method: Method = FedProx(clip_norm=0.5, weight_decay=0.01, optimizer=local_optimizer(name))
    method = with_warmup(method, 1, Learned()) if warm else method
    clients = small_clients(samples=9)
    data = from_clients(clients, clients[0])
    net = small_network()

    def train(engine: Engine) -> Tree:
        states = {0: method.init(net, net.initial(), len(data))}
        setup = Setup(Experiment(train={"lr": 0.01}), data, net, {}, method)
        server = Server(setup, engine, MemoryStore(None), states)
        with closing(engine):
            for round in (1, 2):
                server.run(round)
        return method.params(server.states[0])

    eager = train(EagerEngine(net, data, Schedule(4), 1))
    fast = train(CompiledEngine(net, data, Schedule(4), 1, lanes=2))
    for parameter, value in eager.items():
        assert torch.allclose(fast[parameter], value, rtol=0, atol=1e-5), parameter


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_stops_and_goes_on_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    clients = small_clients()
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)),
        "clients": clients,
        "test": clients[0],
        "method": "fedavg+pews",
        "rounds": 4,
        "warmup": {"rounds": 2},
        "train": {"optimizer": name, "lr": 0.01, "batch_size": 4, "clip_norm": 1.0, "lr_schedule": "cosine"},
        "runtime": {"engine": "eager"},
    }
    stop = fedpews.Callback(round=lambda records: records[0]["round"] == 3)
    fedpews.run(**given, out=tmp_path / "run", callbacks=[stop])
    resumed = fedpews.run(**given, out=tmp_path / "run", resume=True)
    straight = fedpews.run(**given)
    assert resumed.rounds.column("loss") == straight.rounds.column("loss")
    assert all(torch.equal(resumed.params[0][n], value) for n, value in straight.params[0].items())


@pytest.mark.parametrize("name", [name for name in METHODS if "optimizer" in method_fields(name)])
def test_every_method_takes_adam_or_says_why_not(name: str) -> None:
    if name in ("scaffold", "fednova", "fedavg-m", "scaffold-m", "fedmoswa", "fedselect"):
        with pytest.raises(ConfigError, match=r"plain SGD|not behind Adam"):
            make(name, optimizer="adam")
        return
    net = small_network()
    plain, adam = (
        Playground(make(name, optimizer=optimizer), net, small_clients(), lr=0.01).play(2).params[-1]
        for optimizer in (None, "adam")
    )
    assert any(not torch.equal(plain[n], adam[n]) for n in net.names)
    assert all(bool(adam[n].isfinite().all()) for n in net.names)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: make("fedpm", optimizer="adam"), "fedpm has its own update rule"),
        (lambda: make("fedavg", optimizer="adm"), "there is no optimiser 'adm'"),
        (lambda: make("fedavg", optimizer={"name": "adam", "beta3": 1.0}), r"no option optimizer\.beta3"),
        (lambda: FedAvg(momentum=0.9, optimizer=Adam()), "momentum goes with plain SGD"),
        (lambda: Scaffold(clip_norm=1.0), "scaffold needs plain SGD"),
        (lambda: FedNova(mu=0.1, clip_norm=1.0), "only for plain SGD"),
        (lambda: FedNova(mu=0.1, optimizer=Momentum()), "only for plain SGD"),
        (lambda: FedAvg(clip_norm=0.0), "greater than 0"),
    ],
)
def test_what_does_not_go_together_is_refused(made: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made()


def test_fednova_knows_the_work_of_momentum_whichever_way_it_is_asked_for() -> None:
    ways = FedNova(momentum=0.5), FedNova(optimizer=Momentum(0.5))
    # (4 − .5·(1 − .5⁴)/.5)/.5 = (4 − .9375)/.5
    assert [way.work(4, 0.1) for way in ways] == pytest.approx([6.125, 6.125])


@pytest.mark.parametrize(
    ("train", "rule"),
    [
        ({}, "SGD()"),
        ({"momentum": 0.5}, "Momentum(momentum=0.5)"),
        ({"optimizer": "momentum"}, "Momentum(momentum=0.9)"),
        ({"optimizer": "nesterov", "momentum": 0.5}, "Nesterov(momentum=0.5)"),
        ({"optimizer": "adam"}, "Adam(beta1=0.9, beta2=0.999, tau=1e-08)"),
    ],
)
def test_a_configuration_names_the_local_optimiser(train: dict[str, Any], rule: str) -> None:
    from fedpews.build import build_method

    made: Any = build_method(fedpews.Experiment(method={"name": "fedavg"}, train=train))
    assert repr(made.rule) == rule


class Signs(Optimizer):
    """A rule of one's own."""

    def start(self, like: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, value: Tensor, gradient: Tensor, slots: Any, lr: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return value - lr * torch.sign(gradient), {}


def test_a_rule_of_ones_own_needs_two_functions() -> None:
    from dataclasses import dataclass

    rule = dataclass(frozen=True)(Signs)()
    net = chain([1.0], [1.0])
    ground = Playground(FedAvg(optimizer=rule), net, [(torch.ones(1, 1), torch.zeros(1))])
    assert ground.play(1).params[0]["0.weight"].item() == pytest.approx(0.9)


def test_the_learning_rate_rises_then_falls() -> None:
    from math import cos, pi

    train = {"lr": 1.0, "lr_warmup": 4, "lr_min": 0.1}
    experiment = Experiment(rounds=14, train={**train, "lr_schedule": "cosine"}, method={"name": "fedavg"})
    assert [experiment.lr_at(t) for t in (1, 2, 4, 5)] == pytest.approx([0.25, 0.5, 1.0, 1.0])
    assert experiment.lr_at(10) == pytest.approx(0.55)
    assert experiment.lr_at(14) == pytest.approx(0.1 + 0.9 * (1 + cos(pi * 0.9)) / 2)
    assert Experiment(rounds=14, train={**train, "lr_milestones": [6]}).lr_at(7) == pytest.approx(0.1)


def test_the_learning_rate_rises_again_after_a_warmup() -> None:
    settings = {"rounds": 9, "train": {"lr": 1.0, "lr_milestones": [5]}, "warmup": {"rounds": 3, "ramp": 3}}
    experiment = Experiment(method={"name": "fedavg+pews-fixed"}, **settings)
    rates = [experiment.lr_at(t) for t in range(1, 10)]
    # full in the warmup, then a quarter more in each round; the milestone applies as well
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.25, 0.5, 0.075, 0.1, 0.1, 0.1])
    assert Experiment(method={"name": "fedavg"}, **settings).lr_at(4) == 1.0
    with pytest.raises(ConfigError, match="ends it automatically"):
        Experiment(method={"name": "fedavg+pews-auto"}, **settings)
