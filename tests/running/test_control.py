"""Steering a run: early stopping, the best model, longer runs, watchers, a method's object, reading a folder back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpews
from fedpews.engines.eager import EagerEngine
from fedpews.errors import CheckpointError, ConfigError
from fedpews.methods.contract import Method
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.feddyn import FedDyn
from fedpews.methods.fedprox import FedProx
from fedpews.results.records import Record
from fedpews.running import StopRule
from fedpews.testing import small_clients
from fedpews.warmup import Learned, with_warmup

CLIENTS = [(torch.cat([x] * 3), torch.cat([y] * 3)) for x, y in small_clients(2)]
TEST = (torch.cat([x for x, _ in CLIENTS]), torch.cat([y for _, y in CLIENTS]))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


GIVEN: dict[str, Any] = {
    "model": model,
    "clients": CLIENTS,
    "test": TEST,
    "train": {"lr": 0.05, "batch_size": 8},
    "runtime": {"engine": "eager", "checkpoint_every": 3},
}


def run(**settings: Any) -> fedpews.Result:
    return fedpews.run(**GIVEN | {"method": "fedavg"} | settings)


def without_seconds(records: Any) -> list[Record]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def records(*accuracies: float, phase: str = "train") -> list[Record]:
    return [{"accuracy": accuracy, "phase": phase} for accuracy in accuracies]


@pytest.mark.parametrize(
    ("accuracies", "is_over", "best"),
    [
        ([0.5], False, 0),
        ([0.5, 0.5], False, 0),
        ([0.5, 0.5, 0.5], True, 0),
        # 0.505 is better, but not by 0.01
        ([0.5, 0.505, 0.508], True, 0),
        ([0.5, 0.505, 0.52], False, 2),
        ([0.5, 0.6, 0.5, 0.59], True, 1),
    ],
)
def test_a_seed_ends_after_so_many_rounds_without_improvement(
    accuracies: list[float], is_over: bool, best: int
) -> None:
    rule = StopRule(patience=2, min_delta=0.01, on="test")
    assert rule.is_over(records(*accuracies)) == is_over
    assert rule.best(records(*accuracies)) == best


def test_rounds_of_a_warmup_do_not_wear_patience_out() -> None:
    rule = StopRule(patience=2, on="test")
    assert not rule.is_over(records(0.5, 0.4, 0.4, 0.4, phase="warmup"))
    assert not rule.is_over(records(0.5, 0.4, 0.4, phase="warmup") + records(0.4))
    assert rule.is_over(records(0.5, 0.4, 0.4, phase="warmup") + records(0.4, 0.4))


def test_validation_data_choose_where_there_are_some() -> None:
    rule = StopRule(patience=1)
    seen = [
        {"accuracy": a, "validation": {"accuracy": v}, "phase": "train"} for a, v in ((0.9, 0.1), (0.1, 0.9))
    ]
    assert rule.best(seen) == 1


def test_without_validation_data_nothing_is_chosen_unless_the_test_data_may(tmp_path: Path) -> None:
    for stop in ({"patience": 2}, {"best": True}):
        with pytest.raises(ConfigError, match="needs validation data, and there are none"):
            run(rounds=2, stop=stop, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_ends_early_seed_by_seed_and_keeps_the_best_model(tmp_path: Path) -> None:
    stop = {"patience": 3, "on": "test"}
    seen: dict[tuple[int, int], Any] = {}
    keep = fedpews.Callback(
        models=lambda round, models: seen.update({(s, round): m for s, m in models.items()})
    )
    result = run(rounds=60, seeds=[0, 1], stop=stop, out=tmp_path / "run", callbacks=[keep])
    ends, best = result.summary["ended_after"], result.summary["best"]
    assert max(ends) < 60
    for seed, (end, at) in enumerate(zip(ends, best["rounds"], strict=True)):
        assert end == at + 3
        assert all(torch.equal(result.best[seed][n], value) for n, value in seen[seed, at].items())
        # the other seed changes nothing
        alone = run(rounds=60, seeds=[seed], stop=stop)
        assert without_seconds(alone.rounds) == without_seconds(result.rounds.of_seed(seed))
    assert best["on"] == "test"
    found = fedpews.load(tmp_path / "run")
    assert torch.equal(found.best[1]["0.weight"], result.best[1]["0.weight"])
    # a run that is over stays over
    again = run(rounds=60, seeds=[0, 1], stop=stop, out=tmp_path / "run", resume=True)
    assert without_seconds(again.rounds) == without_seconds(result.rounds)


def test_a_resumed_run_has_the_best_model_of_before(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 8, "stop": {"best": True, "on": "test"}}
    enough = fedpews.Callback(round=lambda records: records[0]["round"] == 4)
    run(**settings, out=tmp_path / "run", callbacks=[enough])
    resumed = run(**settings, out=tmp_path / "run", resume=True)
    straight = run(**settings)
    assert resumed.summary["best"] == straight.summary["best"]
    assert all(torch.equal(resumed.best[0][n], value) for n, value in straight.best[0].items())
    assert resumed.model(best=True)(TEST[0]).shape == (len(TEST[1]), 3)


def test_a_watcher_ends_a_run_that_can_go_on(tmp_path: Path) -> None:
    enough = fedpews.Callback(round=lambda records: records[0]["round"] == 2)
    ended = run(rounds=5, out=tmp_path / "run", callbacks=[enough])
    assert ended.summary["ended_after"] == [2]
    assert fedpews.load(tmp_path / "run").summary["rounds"] == 2
    resumed = run(rounds=5, out=tmp_path / "run", resume=True)
    assert "ended_after" not in resumed.summary
    assert without_seconds(resumed.rounds) == without_seconds(run(rounds=5).rounds)


@pytest.mark.parametrize("method", ["fedavg", "scaffold+fedadam", "fedavg+pews", "ditto"])
def test_a_finished_run_made_longer_is_one_long_run(method: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": method, "train": GIVEN["train"] | {"lr_milestones": [3]}}
    if "pews" in method:
        settings["warmup"] = {"rounds": 2}
    run(rounds=4, out=tmp_path / "run", **settings)
    longer = run(rounds=7, out=tmp_path / "run", resume=True, **settings)
    straight = run(rounds=7, **settings)
    assert without_seconds(longer.rounds) == without_seconds(straight.rounds)
    assert fedpews.load(tmp_path / "run").experiment.rounds == 7
    # and once more, from the longer one
    assert len(run(rounds=8, out=tmp_path / "run", resume=True, **settings).rounds) == 8


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"rounds": 4}, {"rounds": 3}, "a run of 4 rounds, more than the 3 asked for"),
        (
            {"rounds": 4},
            {"rounds": 5, "train": {"lr": 0.1}},
            r"another experiment: .*train\.lr is 0\.05 there",
        ),
        (
            {"rounds": 4, "train": {"lr_schedule": "cosine"}},
            {"rounds": 5, "train": {"lr_schedule": "cosine"}},
            "the cosine schedule",
        ),
        (
            {"rounds": 4, "method": "fedavg+pews", "warmup": {"fraction": 0.5}},
            {"rounds": 8, "method": "fedavg+pews", "warmup": {"fraction": 0.5}},
            r"the warmup had 2 rounds, now 4; --set warmup\.rounds=2 keeps it",
        ),
    ],
)
def test_a_longer_run_that_would_have_begun_otherwise_is_refused(
    before: dict[str, Any], now: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run(**before | {"train": GIVEN["train"] | before.get("train", {})}, out=tmp_path / "run")
    with pytest.raises(CheckpointError, match=message):
        run(**now | {"train": GIVEN["train"] | now.get("train", {})}, out=tmp_path / "run", resume=True)
    assert fedpews.load(tmp_path / "run").experiment.rounds == 4


def test_the_advice_for_a_longer_warmup_run_works(tmp_path: Path) -> None:
    run(rounds=4, method="fedavg+pews", warmup={"fraction": 0.5}, out=tmp_path / "run")
    longer = run(rounds=6, method="fedavg+pews", warmup={"rounds": 2}, out=tmp_path / "run", resume=True)
    straight = run(rounds=6, method="fedavg+pews", warmup={"rounds": 2})
    assert without_seconds(longer.rounds) == without_seconds(straight.rounds)


def test_an_engine_that_more_rounds_would_have_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = {"engine": "auto"}
    run(rounds=4, runtime=auto, out=tmp_path / "run")
    monkeypatch.setattr(EagerEngine, "name", "compiled")
    with pytest.raises(CheckpointError, match=r"--set runtime\.engine=eager keeps it"):
        run(rounds=5, runtime=auto, out=tmp_path / "run", resume=True)


def test_a_methods_object_is_as_good_as_its_name() -> None:
    for name, method in (("fedprox", FedProx()), ("fedavg+pews", with_warmup(FedAvg(), 1, Learned()))):
        warmup = {"warmup": {"rounds": 1}} if "pews" in name else {}
        named, given = run(rounds=2, method=name, **warmup), run(rounds=2, method=method)
        assert without_seconds(named.rounds) == without_seconds(given.rounds)
    assert given.summary["method"] == "FedAvg+Warmup"


def test_another_object_is_another_experiment(tmp_path: Path) -> None:
    run(rounds=2, method=FedDyn(alpha=0.5), out=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"method\.object is FedDyn\(.*alpha=0\.5"):
        run(rounds=2, method=FedDyn(alpha=0.6), out=tmp_path / "run", resume=True)
    assert len(run(rounds=3, method=FedDyn(alpha=0.5), out=tmp_path / "run", resume=True).rounds) == 3
    with pytest.raises(ConfigError, match="made in Python"):
        fedpews.run(tmp_path / "run" / "config.toml", model=model, clients=CLIENTS, test=TEST)


def test_what_an_object_would_ignore_is_refused_but_a_recipes_own_method_makes_room() -> None:
    with pytest.raises(ConfigError, match=r"train\.momentum would be ignored"):
        run(method=FedAvg(), train={"momentum": 0.9})
    result = fedpews.run("synthetic-32k", method=FedAvg(), rounds=1, seeds=[0], clients=CLIENTS, test=TEST)
    assert result.experiment.train.lr == 0.001


def test_an_object_that_does_not_say_what_it_is_is_refused() -> None:
    @dataclass(frozen=True, repr=False)
    class Silent(FedAvg):
        __repr__ = object.__repr__

    method: Method = Silent()
    with pytest.raises(ConfigError, match="does not show its options"):
        run(method=method)


def test_fine_tuning_gives_each_client_a_model_that_fits_its_own_data_better(tmp_path: Path) -> None:
    result = run(rounds=2, finetune={"epochs": 5, "lr": 0.1}, out=tmp_path / "run")
    tuned = result.summary["finetuned"]
    assert len(tuned["client_personal_accuracy"][0]) == 2
    for client, (x, y) in enumerate(CLIENTS):
        own, common = (
            nn.functional.cross_entropy(module(x), y)
            for module in (result.model(client=client), result.model())
        )
        assert own < common
    # the global model is as it was
    assert without_seconds(result.rounds) == without_seconds(run(rounds=2).rounds)
    assert (tmp_path / "run" / "finetuned-0.safetensors").exists()
    with pytest.raises(ConfigError, match="has personal models already"):
        run(rounds=2, method="ditto", finetune={"epochs": 1})


PUBLIC: dict[str, Any] = {"data": "synthetic-3.2k", "train_per_class": 50, "seed": 9, "lr": 0.1, "epochs": 20}


def test_the_server_pretrains_on_public_data_before_the_first_round() -> None:
    held: dict[str, Any] = {
        "data": {"name": "synthetic-3.2k", "partition": "class", "train_per_class": 20, "test_per_class": 50},
        "method": "fedavg",
        "rounds": 1,
        "seeds": [0, 1],
        "runtime": {"engine": "eager"},
        "train": {"lr": 1e-6},  # so that what was learned was learned before
    }
    bare, pretrained, alone = (
        fedpews.run(**held | changes)
        for changes in ({}, {"pretrain": PUBLIC}, {"pretrain": PUBLIC, "seeds": [1]})
    )
    assert all(
        after["loss"] < 0.8 * before["loss"]
        for after, before in zip(pretrained.rounds, bare.rounds, strict=True)
    )
    assert without_seconds(alone.rounds) == without_seconds(pretrained.rounds[1:])


def test_a_resumed_run_goes_on_from_its_pretrained_start(tmp_path: Path) -> None:
    held: dict[str, Any] = {
        "data": {"name": "synthetic-3.2k", "partition": "class", "train_per_class": 20, "test_per_class": 20},
        "method": "fedavg+pews",
        "warmup": {"rounds": 2},
        "pretrain": PUBLIC,
        "runtime": {"engine": "eager"},
    }
    whole = fedpews.run(**held, rounds=4)
    fedpews.run(**held, rounds=2, out=tmp_path / "run")
    longer = fedpews.run(**held, rounds=4, out=tmp_path / "run", resume=True)
    assert without_seconds(longer.rounds) == without_seconds(whole.rounds)


def test_public_data_must_be_of_the_clients_kind() -> None:
    with pytest.raises(
        ConfigError, match=r"pretrain.data: synthetic-3.2k has inputs of shape \(5,\) and 4 classes"
    ):
        run(rounds=1, pretrain=PUBLIC)


def test_fine_tuning_is_judged_by_the_metric_that_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    slopes = (torch.tensor([1.0, 2.0, 0.0]), torch.tensor([-1.0, 0.0, 2.0]))
    clients = []
    for slope in slopes:
        x = torch.randn(40, 3, generator=generator)
        clients.append({"train": (x[:30], x[:30] @ slope), "test": (x[30:], x[30:] @ slope)})
    result = fedpews.run(
        clients=clients,
        task="regression",
        method="fedavg",
        rounds=2,
        train={"lr": 0.02, "batch_size": 10},
        finetune={"epochs": 40, "lr": 0.05},
    )
    tuned = result.summary["finetuned"]
    before = result.rounds[-1]["client_metrics"]["mae"]
    assert all(after < first for after, first in zip(tuned["client_personal_mae"][0], before, strict=True))
    assert tuned["personal_mae"]["mean"] == pytest.approx(sum(tuned["client_personal_mae"][0]) / 2)


def test_a_folder_is_read_back(tmp_path: Path) -> None:
    result = run(rounds=3, seeds=[0, 1], method="fedavg+pews", warmup={"rounds": 2}, out=tmp_path / "run")
    found = fedpews.load(tmp_path / "run", model=model)
    assert list(found.rounds) == list(result.rounds)
    assert found.summary == result.summary
    assert found.experiment == result.experiment
    for seed in (0, 1):
        assert all(torch.equal(found.neurons[seed][c], mask) for c, mask in result.neurons[seed].items())
        again = found.model(seed)
        assert torch.equal(again(TEST[0]), result.model(seed)(TEST[0]))
    with pytest.raises(ConfigError, match=r"not the model that was trained: it has no 0\.bias"):
        fedpews.load(tmp_path / "run", model=nn.Linear(3, 3)).model()
    with pytest.raises(ConfigError, match="no best model of seed 0"):
        found.model(best=True)


def test_a_run_starts_from_another_ones_model(tmp_path: Path) -> None:
    first = run(rounds=2, seeds=[0, 1], out=tmp_path / "first")
    start = str(tmp_path / "first" / "model-{seed}.safetensors")
    settings = GIVEN | {"model": "mlp"}
    with pytest.raises(ConfigError, match=r"model\.start: .* has no"):
        fedpews.run(**settings | {"model": {"name": "mlp", "start": start}}, method="fedavg", rounds=1)
    tiny = {"lr": 1e-30, "batch_size": 8}
    again = fedpews.Experiment(
        model={"start": start}, method={"name": "fedavg"}, rounds=1, seeds=[0, 1], train=tiny
    )
    result = fedpews.run(again, model=model, clients=CLIENTS, test=TEST)
    for seed in (0, 1):
        assert torch.equal(result.params[seed]["0.weight"], first.params[seed]["0.weight"])


def test_a_result_says_what_it_is_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(rounds=2, progress=True)
    assert repr(result).startswith("<Result of fedavg: 2 rounds, 1 seed(s), final accuracy ")
    assert len(repr(result)) < 120
