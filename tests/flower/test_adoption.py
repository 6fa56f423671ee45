"""The warmup around Flower's own strategies and in hand-written loops."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_grid import MemoryGrid
from torch import nn

from fedpews.flower.local_warmup import LocalWarmup
from fedpews.flower.with_warmup import MaskedUpload, WithWarmup, fill_in, restore
from fedpews.methods.average import Average
from fedpews.methods.fedavg import FedAvg as OurFedAvg
from fedpews.methods.wire import BadMessage
from fedpews.neurons import trace
from fedpews.neurons.network import Batch, Network
from fedpews.seeds import fold
from fedpews.warmup.masks import Learned
from fedpews.warmup.warmup import LearnedClient

EXAMPLES = Path(__file__).parents[2] / "examples" / "flower-quickstart"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)
    )


READING = {"gradient": "open", "start": -1.0, "start_spread": 0.5, "upload_mask": "drawn"}


def a_message(
    warm: bool = True, others: torch.Tensor | None = None, diversity: float = 1.0, **reading: Any
) -> Message:
    content: dict[str, Any] = {"config": ConfigRecord({"server-round": 1})}
    if warm:
        about = {"round": 1, "diversity": diversity, "mask_lr": 0.1, **READING, **reading}
        content["fedpews"] = ConfigRecord(about)
    if others is not None:
        content["others"] = ArrayRecord({"neurons": Array(others.numpy())})
    message = Message(RecordDict(content), 1, "train")
    message.metadata.__dict__["_message_id"] = "x"
    return message


def a_context(scores: torch.Tensor | None = None) -> Context:
    state = {} if scores is None else {"fedpews-scores": ArrayRecord({"hidden": Array(scores.numpy())})}
    return Context(1, 7, {"partition-id": 0}, RecordDict(state), {})


def a_batch() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(16, 2, generator=random), torch.arange(16) % 3


@pytest.mark.parametrize("gradient", ["theta", "open", "gate"])
def test_a_score_step_is_that_of_the_method_itself(gradient: Any) -> None:
    module, (x, y) = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)), a_batch()
    others = torch.linspace(0.1, 0.9, 5)
    scores = torch.linspace(-1, 1, 5)
    message = a_message(others=others, diversity=2.0, gradient=gradient)
    warmup = LocalWarmup(message, a_context(scores), module, x[:1])
    warmup.learn(nn.CrossEntropyLoss(), x, y)

    net = Network(module, x[:1])
    client = LearnedClient(OurFedAvg(), Learned(diversity=2.0, mask_lr=0.1, gradient=gradient))
    local = {
        "inner": {"params": net.initial()},
        "scores": {"neurons": scores},
        "others": {"neurons": others},
        "drawn": {},
    }
    noise = torch.rand(5, generator=torch.Generator().manual_seed(fold(0, 1, "gates")))
    after, _ = client.step(net, local, Batch(x, y), noise.repeat(2), 0.1)
    assert torch.allclose(warmup.scores, after["scores"]["neurons"], atol=1e-6)


def test_each_site_starts_at_its_own_draw_and_can_send_what_is_above_one_half() -> None:
    module, (x, _) = model(), a_batch()
    sites = [Context(1, 7, {"partition-id": site}, RecordDict({}), {}) for site in (0, 0, 1)]
    message = a_message(upload_mask="thresholded")
    first, again, other = (LocalWarmup(message, site, module, x[:1]) for site in sites)
    assert torch.equal(first.scores, again.scores)
    assert not torch.equal(first.scores, other.scores)
    # eleven numbers of mean −1 and deviation .5: their mean is off by .15
    assert abs(float(first.scores.mean()) + 1) < 0.6
    same = LocalWarmup(a_message(start_spread=0.0), sites[0], module, x[:1])
    assert set(same.scores.tolist()) == {-1.0}
    first.scores = torch.tensor([1.0, -1.0] * 5 + [1.0])
    sent: Any = first.reply({"num-examples": 1}).content["owned"]
    # of the six neurons of the second layer those at odd places are open: 3 of 6 biases
    assert sent["3.bias"].numpy().shape == (3,)


def test_a_closed_neuron_keeps_its_weights_momentum_and_statistics() -> None:
    module, (x, y) = model(), a_batch()
    graph = trace(module, x[:1])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):  # momentum from whole steps first
        nn.CrossEntropyLoss()(module(x), y).backward()
        optimizer.step()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    momentum = {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in module.named_parameters()}
    warmup = LocalWarmup(a_message(), a_context(), module.train(), x[:1])
    optimizer.zero_grad()
    nn.CrossEntropyLoss()(warmup(x), y).backward()
    warmup.step(optimizer)
    owned = graph.expand(warmup._gates.bool())
    assert 0 < int(warmup._gates.sum()) < graph.size
    for name, value in module.state_dict().items():
        if name in owned:
            closed = ~owned[name].expand_as(value)
            assert torch.equal(value[closed], before[name][closed])
            assert not torch.equal(value, before[name])
    for name, parameter in module.named_parameters():
        closed = ~owned.get(name, torch.tensor(True)).expand_as(parameter)
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"][closed], momentum[name][closed])


def test_after_the_warmup_nothing_is_different() -> None:
    (x, y), results = a_batch(), []
    for with_helper in (False, True):
        module = model().train()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        warmup = LocalWarmup(a_message(warm=False), a_context(), module, x[:1])
        for _ in range(3):
            warmup.learn(nn.CrossEntropyLoss(), x, y)
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(warmup(x) if with_helper else module(x), y).backward()
            warmup.step(optimizer) if with_helper else optimizer.step()
        results.append(module.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    reply = warmup.reply({"num-examples": 16})
    assert set(reply.content) == {"arrays", "metrics"}


@given(seed=st.integers(0, 10**6), clients=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_filled_in_uploads_average_to_the_mean_over_the_owners(seed: int, clients: int) -> None:
    random = np.random.default_rng(seed)
    old = {"w": random.normal(size=(3, 4)).astype(np.float32)}
    masks = [{"w": random.random((3, 4)) < 0.5} for _ in range(clients)]
    uploads = [{"w": random.normal(size=(3, 4)).astype(np.float32)} for _ in range(clients)]
    weights = [float(random.integers(1, 50)) for _ in range(clients)]
    sent = [MaskedUpload(*each) for each in zip(uploads, masks, weights, strict=True)]
    filled = fill_in(sent, old)
    mean = sum(w * f["w"] for w, f in zip(weights, filled, strict=True)) / sum(weights)
    ours = Average(tuple(weights), tuple({"w": torch.from_numpy(m["w"])} for m in masks))
    expected = ours([{"w": torch.from_numpy(u["w"])} for u in uploads], {"w": torch.from_numpy(old["w"])})
    assert np.allclose(mean, expected["w"].numpy(), atol=1e-5)


def test_owned_elements_come_back_where_they_were() -> None:
    values = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "n": np.array(7)}
    mask = np.outer([True, False, True], [False, True, True, False])
    sent = values | {"w": values["w"][mask]}
    assert sent["w"].tolist() == [1, 2, 9, 10]  # rows 0 and 2, columns 1 and 2
    back, masks = restore(sent, {"w": np.packbits(mask)}, values)
    assert back["w"].tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 9, 10, 0]]
    assert masks["n"].all()


@pytest.mark.parametrize(
    ("sent", "packed"),
    [
        ({"w": np.zeros(3, np.float32)}, {}),  # names
        ({"w": np.zeros(3, np.float32), "v": np.zeros(2)}, {}),
        ({"w": np.zeros((3, 4), np.float64)}, {}),  # type
        ({"w": np.full((3, 4), np.nan, np.float32)}, {}),
        ({"w": np.zeros((3, 4), np.float32)}, {"v": np.zeros(2, np.uint8)}),  # a mask of no array
        ({"w": np.zeros(0, np.float32)}, {"w": np.zeros(3, np.uint8)}),  # too long a mask
        ({"w": np.zeros(0, np.float32)}, {"w": np.zeros(2, np.float32)}),
        ({"w": np.zeros(5, np.float32)}, {"w": np.packbits(np.arange(12) < 4)}),
    ],
)
def test_what_does_not_fit_the_model_is_refused(sent: Any, packed: Any) -> None:
    with pytest.raises(BadMessage):
        restore(sent, packed, {"w": np.zeros((3, 4), np.float32)})


def test_a_bad_reply_is_refused_counted_and_left_out() -> None:
    strategy = WithWarmup(FedAvg(fraction_evaluate=0.0), rounds=1)
    module, (x, _) = model(), a_batch()
    grid = MemoryGrid()
    grid.nodes = {1: lambda m: m, 2: lambda m: m}
    arrays = ArrayRecord(module.state_dict())
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    for message in messages:
        message.metadata.__dict__["_message_id"] = "x"
    good = LocalWarmup(messages[0], a_context(), module, x[:1]).reply({"num-examples": 10})
    bad = Message(RecordDict({"metrics": MetricRecord({"num-examples": 10})}), reply_to=messages[1])
    result, _ = strategy.aggregate_train(1, [good, bad])
    assert result is not None
    assert strategy.refused == {bad.metadata.src_node_id: 1}
    for name, value in module.state_dict().items():  # nobody moved, so the model is as it was
        assert np.allclose(result[name].numpy(), value.numpy(), atol=1e-6)


@contextmanager
def loaded(folder: Path) -> Iterator[tuple[Any, Any]]:
    """An example's two apps."""
    names = ("task", "client_app", "server_app")
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("client_app"), importlib.import_module("server_app")
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("version", ["before", "after"])
def test_the_quickstart_runs(
    version: str, grid: MemoryGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_config = {"num-server-rounds": 10, "local-epochs": 1, "lr": 0.05}
    with loaded(EXAMPLES / version) as (client, server):
        for site in (0, 1):
            context = Context(
                1, site + 1, {"partition-id": site, "num-partitions": 2}, RecordDict(), run_config
            )
            grid.nodes[site + 1] = lambda message, context=context: client.app(message, context)  # type: ignore[misc]
        server.app(grid, Context(1, 0, {}, RecordDict(), run_config))
    assert (tmp_path / "final_model.pt").exists()
    sent = [message for message in grid.sent if "fedpews" in message.content]
    assert len(sent) == (0 if version == "before" else 2 * 8)
    if version == "after":  # from round 2 on each knows of the other
        assert "others" in sent[2].content


def test_another_strategy_takes_its_own_step_on_the_masked_average() -> None:
    strategy = WithWarmup(FedAdam(fraction_evaluate=0.0, eta=0.1), rounds=1)
    module, (x, _) = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)), a_batch()
    grid = MemoryGrid()
    grid.nodes = {1: lambda m: m, 2: lambda m: m}
    messages = list(strategy.configure_train(1, ArrayRecord(module.state_dict()), ConfigRecord(), grid))
    for message in messages:
        message.metadata.__dict__["_message_id"] = "x"
    closed = a_context(torch.full((5,), -50.0))  # nobody owns a neuron, so none may move
    with torch.no_grad():
        moved = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3))
    replies = [LocalWarmup(m, closed, moved, x[:1]).reply({"num-examples": 4}) for m in messages]
    result, _ = strategy.aggregate_train(1, replies)
    assert result is not None
    assert np.allclose(result["0.weight"].numpy(), module.state_dict()["0.weight"].numpy(), atol=1e-6)
    assert not np.allclose(result["2.bias"].numpy(), module.state_dict()["2.bias"].numpy(), atol=1e-6)
