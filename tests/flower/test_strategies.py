"""The warmup around each of Flower's averaging strategies, round after round, and Flower's own quickstart model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy
from memory_grid import MemoryGrid, over_the_wire
from torch import Tensor, nn

from fedpews import run
from fedpews.errors import ConfigError
from fedpews.flower.local_warmup import LocalWarmup
from fedpews.flower.with_warmup import WithWarmup
from fedpews.neurons import trace, verify

NODES = 7
PLAIN: dict[str, Any] = {"fraction_evaluate": 0.0}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: flower.FedAvg(**PLAIN),
    "FedProx": lambda: flower.FedProx(**PLAIN, proximal_mu=0.01),
    "FedAvgM": lambda: flower.FedAvgM(**PLAIN, server_momentum=0.9),
    "FedAdam": lambda: flower.FedAdam(**PLAIN),
    "FedAdagrad": lambda: flower.FedAdagrad(**PLAIN),
    "FedYogi": lambda: flower.FedYogi(**PLAIN),
    "FedMedian": lambda: flower.FedMedian(**PLAIN),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(**PLAIN),
    "Krum": lambda: flower.Krum(**PLAIN, num_malicious_nodes=1),
    "MultiKrum": lambda: flower.MultiKrum(**PLAIN, num_malicious_nodes=1, num_nodes_to_select=4),
    "Bulyan": lambda: flower.Bulyan(**PLAIN, num_malicious_nodes=1),
    "QFedAvg": lambda: flower.QFedAvg(**PLAIN, client_learning_rate=0.1, q=0.1),
}


class Quickstart(nn.Module):
    """The model of Flower's PyTorch quickstart: a size stands in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        out: Tensor = self.fc3(x)
        return out


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


class Site:
    """A client of an existing app: its own loop, around LocalWarmup."""

    def __init__(
        self, number: int, make: Callable[[], nn.Module], shape: tuple[int, ...], **settings: Any
    ) -> None:
        self.make, self.context = (
            make,
            Context(1, number, {"partition-id": number, **settings}, RecordDict(), {}),
        )
        random = torch.Generator().manual_seed(number)
        self.x = torch.randn(8, *shape, generator=random)
        self.y = torch.arange(8) % 3
        self.gates: list[Tensor] = []

    def __call__(self, message: Message) -> Message:
        model = self.make()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        warmup, criterion = LocalWarmup(message, self.context, model, self.x[:1]), nn.CrossEntropyLoss()
        for _ in range(2):
            warmup.learn(criterion, self.x, self.y)
            optimizer.zero_grad()
            loss = criterion(warmup(self.x), self.y)
            loss.backward()
            warmup.step(optimizer)
        if warmup.active:
            self.gates.append(warmup._gates.clone())
        return warmup.reply({"num-examples": 8, "train_loss": float(loss.detach())})


def play(
    strategy: WithWarmup, sites: list[Site], arrays: ArrayRecord, rounds: int, grid: MemoryGrid
) -> ArrayRecord:
    """Some rounds as ``Strategy.start`` runs them."""
    grid.nodes = {i + 1: site for i, site in enumerate(sites)}
    for number in range(1, rounds + 1):
        messages = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        assert len(messages) == len(sites)
        replies = grid.send_and_receive(messages)
        assert not [reply.error.reason for reply in replies if reply.has_error()]
        result, _ = strategy.aggregate_train(number, [over_the_wire(reply) for reply in replies])
        assert result is not None, f"round {number} was lost"
        arrays = result
    return arrays


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_keeps_every_warmup_round_and_goes_on_after_it(name: str, grid: MemoryGrid) -> None:
    strategy = WithWarmup(STRATEGIES[name](), rounds=3)
    # QFedAvg itself cannot do with BatchNorm's counter of batches
    make = plain if name == "QFedAvg" else with_norm
    start = ArrayRecord(make().state_dict())
    types = {key: array.numpy().dtype for key, array in start.items()}
    sites = [Site(i, make, (2,)) for i in range(NODES)]
    warm = play(strategy, sites, start, 3, grid)
    assert strategy.refused == {}
    assert {key: array.numpy().dtype for key, array in warm.items()} == types
    assert all(np.isfinite(array.numpy()).all() for array in warm.values())
    assert not np.allclose(warm["0.weight"].numpy(), start["0.weight"].numpy())
    assert all(len(site.gates) == 3 for site in sites)


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam"])
def test_after_the_warmup_the_strategy_gets_what_the_clients_send(name: str, grid: MemoryGrid) -> None:
    strategy = WithWarmup(STRATEGIES[name](), rounds=1)
    sites = [Site(i, with_norm, (2,)) for i in range(3)]
    play(strategy, sites, ArrayRecord(with_norm().state_dict()), 3, grid)
    assert strategy.refused == {}
    assert all(len(site.gates) == 1 for site in sites)


def test_flowers_quickstart_model_warms_up(grid: MemoryGrid) -> None:
    sites = [Site(i, Quickstart, (3, 32, 32)) for i in range(2)]
    strategy = WithWarmup(STRATEGIES["FedAvg"](), rounds=2)
    play(strategy, sites, ArrayRecord(Quickstart().state_dict()), 2, grid)
    assert strategy.refused == {}


@pytest.mark.parametrize("method", ["fedavg", "fedavg+pews"])
def test_flowers_quickstart_model_runs_in_one_process(method: str) -> None:
    x, y = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 10
    found = run(
        model=Quickstart,
        clients=[(x[:8], y[:8]), (x[8:], y[8:])],
        test=(x, y),
        rounds=2,
        method=method,
        warmup={"rounds": 1} if "pews" in method else {},
        runtime={"engine": "eager"},
    )
    assert len(found.rounds) == 2


def test_a_size_in_the_code_hides_no_wrong_graph() -> None:
    graph = trace(Quickstart(), torch.zeros(1, 3, 32, 32))
    assert [layer.name for layer in graph.layers] == ["conv1", "conv2", "fc1", "fc2"]

    class Leaks(Quickstart):
        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(F.relu(self.conv1(x)))
            x = self.pool(F.relu(self.conv2(x)))
            # past fc1 to the outputs, so closing a channel of conv2 is not removing it
            seen = x.mean((1, 2, 3))[:, None]
            x = F.relu(self.fc1(x.view(-1, 16 * 5 * 5)))
            out: Tensor = self.fc3(F.relu(self.fc2(x))) + seen
            return out

    leaks = Leaks()
    wrong = replace(graph, axes={name: axes for name, axes in graph.axes.items() if name != "fc2.weight"})
    for model, found in ((leaks, graph), (Quickstart(), wrong)):
        with pytest.raises(ConfigError, match="is not the same as removing them"):
            verify(model, found, torch.zeros(1, 3, 32, 32))


def test_fixed_masks_are_disjoint_and_cover_every_neuron(grid: MemoryGrid) -> None:
    sites = [Site(i, with_norm, (2,)) for i in range(3)]
    strategy = WithWarmup(STRATEGIES["FedAvg"](), rounds=2, masks="fixed", sites=3)
    play(strategy, sites, ArrayRecord(with_norm().state_dict()), 2, grid)
    assert strategy.refused == {}
    total = torch.stack([site.gates[-1] for site in sites]).sum(0)
    assert total.tolist() == [1.0] * 6
    assert all(torch.equal(site.gates[0], site.gates[1]) for site in sites)
    with pytest.raises(ConfigError, match="sites=4"):
        WithWarmup(STRATEGIES["FedAvg"](), rounds=2, masks="fixed")


def test_auto_ends_the_warmup_by_the_clients_loss(grid: MemoryGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedpews.warmup.masks import Auto

    sites = [Site(i, with_norm, (2,)) for i in range(2)]
    strategy = WithWarmup(STRATEGIES["FedAvg"](), rounds=9, masks="auto")
    monkeypatch.setattr(Auto, "is_flat", lambda self, losses: len(losses) >= 2)
    play(strategy, sites, ArrayRecord(with_norm().state_dict()), 4, grid)
    assert [len(site.gates) for site in sites] == [2, 2]


def test_a_server_goes_on_from_what_it_kept(grid: MemoryGrid) -> None:
    first = WithWarmup(STRATEGIES["FedAvg"](), rounds=4)
    sites = [Site(i, with_norm, (2,)) for i in range(2)]
    arrays = play(first, sites, ArrayRecord(with_norm().state_dict()), 2, grid)
    kept = json.loads(json.dumps(first.state()))
    again = WithWarmup(STRATEGIES["FedAvg"](), rounds=4, first_round=3)
    again.restore(kept)
    a, b = (
        sorted(messages, key=lambda message: message.metadata.dst_node_id)
        for messages in (
            first.configure_train(3, arrays, ConfigRecord(), grid),
            again.configure_train(1, arrays, ConfigRecord(), grid),
        )
    )
    for one, other in zip(a, b, strict=True):
        assert one.content["fedpews"] == other.content["fedpews"]
        mine, theirs = (m.content["others"]["neurons"].numpy() for m in (one, other))
        assert np.allclose(mine, theirs)


def test_scores_outlive_a_restart_of_the_site(tmp_path: Path, grid: MemoryGrid) -> None:
    site = Site(0, with_norm, (2,), **{"state-dir": str(tmp_path)})
    other = Site(1, with_norm, (2,))
    strategy = WithWarmup(STRATEGIES["FedAvg"](), rounds=4)
    arrays = play(strategy, [site, other], ArrayRecord(with_norm().state_dict()), 2, grid)
    restarted = Context(1, 1, {"partition-id": 0, "state-dir": str(tmp_path)}, RecordDict(), {})
    message = next(iter(strategy.configure_train(3, arrays, ConfigRecord(), grid)))
    warmup = LocalWarmup(message, restarted, with_norm(), site.x[:1])
    known = site.context.state["fedpews-scores"]["hidden"].numpy()
    assert np.array_equal(warmup.scores.numpy(), known)
    assert np.abs(known).max() > 0
