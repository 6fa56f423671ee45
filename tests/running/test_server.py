"""The server's round: when it evaluates, what it says about ownership, and what grows with the clients."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpews
from fedpews.build import Setup
from fedpews.data import Federation, load
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Schedule
from fedpews.measure import measure_ownership
from fedpews.methods.average import Average
from fedpews.methods.contract import Upload
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Network
from fedpews.report.compare import table, verdicts
from fedpews.report.plots import curve
from fedpews.report.runs import find_runs
from fedpews.results.memories import MemoryStore
from fedpews.server import Server, average_of
from fedpews.tasks.names import Goal
from fedpews.testing import small_network
from fedpews.warmup import with_warmup


@pytest.fixture(scope="module")
def data() -> Federation:
    return load("synthetic-3.2k", partition="dirichlet", alpha=0.5, clients=6, train_per_class=20)


def run(data: Federation, every: int, out: Path | None = None, **settings: Any) -> fedpews.Result:
    runtime = {"engine": "eager", "evaluate_every": every}
    common: dict[str, Any] = {
        "rounds": 7,
        "seeds": [0, 1],
        "model": {"hidden": [6, 5]},
        "train": {"steps": 2},
    }
    return fedpews.run(clients=data, out=out, runtime=runtime, **common | settings)


# evaluation


def test_only_every_so_many_rounds_are_evaluated_and_always_the_last(data: Federation) -> None:
    result = run(data, 3)
    seen = [record["round"] for record in result.rounds.of_seed(1) if "accuracy" in record]
    assert seen == [3, 6, 7]
    for record in result.rounds:
        assert ("accuracy" in record) == ("loss" in record) == ("client_accuracy" in record)
        assert {"train_loss", "bytes_up", "bytes_down", "density", "seconds"} <= record.keys()


def test_rarer_evaluation_changes_no_model_and_no_accuracy_that_is_measured(data: Federation) -> None:
    often, rarely = run(data, 1), run(data, 3)
    for seed, params in often.params.items():
        assert all(torch.equal(rarely.params[seed][name], value) for name, value in params.items())
    known = {(r["seed"], r["round"]): r["accuracy"] for r in often.rounds}
    for record in rarely.rounds:
        assert (
            record.get("accuracy", known[record["seed"], record["round"]])
            == known[record["seed"], record["round"]]
        )
    assert rarely.summary["final_accuracy"] == often.summary["final_accuracy"]


def test_reports_leave_out_rounds_that_were_not_evaluated(data: Federation, tmp_path: Path) -> None:
    for name in ("fedavg", "fedavg+pews"):
        run(data, 3, tmp_path / name, method=name, target_accuracy=0.01)
    runs = find_runs([tmp_path / "fedavg", tmp_path / "fedavg+pews"])
    # everybody is above 1 % from the start, which is seen at the first evaluation
    assert [one.summary["rounds_to_target"]["by_seed"] for one in runs] == [[3, 3], [3, 3]]
    assert len(table(runs)) == 2
    assert "reaches 1 % in 2 of 2 seeds, fedavg in 2" in verdicts(runs)[0]
    assert curve(runs[0].records)[0] == [3, 6, 7]
    assert curve(runs[0].records, "train_loss")[0] == [1, 2, 3, 4, 5, 6, 7]
    rounds = fedpews.run(tmp_path / "fedavg" / "config.toml", clients=data).rounds
    assert rounds.column("accuracy")[:2] == [None, None]
    with pytest.raises(KeyError):
        rounds.column("acuracy")


def test_a_run_that_was_never_evaluated_still_has_a_summary() -> None:
    from fedpews.results.records import summarize

    records = [{"seed": 0, "round": 1, "bytes_up": 1, "bytes_down": 1, "seconds": 0.1}]
    summary = summarize(records, "fedavg", Goal(value=0.5))
    assert summary["final_accuracy"]["mean"] is None
    assert summary["rounds_to_target"]["reached"] == 0


# ownership


def owners(*rows: list[int]) -> list[Upload]:
    return [
        Upload(i, 1, 1, 1, 0.0, {}, neurons=torch.tensor(row, dtype=torch.bool)) for i, row in enumerate(rows)
    ]


def test_overlap_is_the_mean_over_all_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [*(torch.rand(23, 40, generator=generator) < 0.3).int().tolist(), [0] * 40, [0] * 40]
    pairs = []
    for a, b in itertools.combinations(rows, 2):
        both = sum(x and y for x, y in zip(a, b, strict=True))
        either = sum(x or y for x, y in zip(a, b, strict=True))
        pairs.append(both / either if either else 0.0)
    found = measure_ownership(owners(*rows), each=True)
    assert found["overlap"] == sum(pairs) / len(pairs)
    assert found["client_density"] == [sum(row) / 40 for row in rows]
    assert found["coverage"] == sum(map(any, zip(*rows, strict=True))) / 40


def test_masks_of_all_clients_at_once_are_those_of_each() -> None:
    net = small_network()
    generator = torch.Generator().manual_seed(0)
    neurons = torch.rand(5, net.graph.size, generator=generator) < 0.5
    uploads = [Upload(i, 1, 1, 1, 0.0, net.initial(), neurons=row) for i, row in enumerate(neurons)]
    average = average_of(net, uploads, "uniform")
    for mask, upload in zip(average.masks, uploads, strict=True):
        assert mask is not None
        expected = upload.ownership(net)
        assert mask.keys() == expected.keys()
        assert all(torch.equal(mask[name], value) for name, value in expected.items())


# what grows with the clients


def test_tables_of_all_clients_are_changed_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    net = Network(model, torch.zeros(1, 2))
    method = with_warmup(FedAvg(), rounds=3)
    state = method.init(net, net.initial(), total=1000)
    theta, neurons = torch.rand(3), torch.tensor([True, False, True])
    upload = Upload(7, 1, 8, 1, 1.0, net.initial(), neurons, extra={"theta": {"neurons": theta}})
    after = method.update(net, state, [upload], Average((1.0,), (None,)))
    for name in ("theta", "neurons"):
        assert after["warmup"][name].data_ptr() == state["warmup"][name].data_ptr()
    assert torch.equal(after["warmup"]["theta"][7], theta)
    assert torch.equal(after["warmup"]["neurons"][7], neurons)


def test_who_took_part_before_gets_one_and_the_same_download_in_a_learned_warmup() -> None:
    from fedpews.server import choose_cohort

    net = small_network()
    method = with_warmup(FedAvg(), rounds=3)
    state = method.init(net, net.initial(), 9)
    state["warmup"]["took_part"][:7] = True
    downloads = method.downloads(net, state, choose_cohort(9, 9, 2, 0))
    # and each of the two newcomers one of its own, with its start
    assert len({id(download) for download in downloads}) == 3
    assert ["start" in download.extra for download in downloads] == [False] * 7 + [True] * 2


def test_a_round_after_the_experiments_last_one_keeps_the_last_learning_rate(data: Federation) -> None:
    net, method = Network(torch.nn.Linear(5, 4), torch.zeros(1, 5)), FedAvg()
    experiment = fedpews.Experiment(rounds=1, train={"lr": 0.5, "steps": 1})
    engine = EagerEngine(net, data, Schedule(4, None, 1), 1)
    state = method.init(net, net.initial(), len(data))
    server = Server(Setup(experiment, data, net, {}, method), engine, MemoryStore(None), {0: state})

    rounds = [server.run(round)[0]["round"] for round in (1, 2)]

    assert rounds == [1, 2]
    engine.close()
