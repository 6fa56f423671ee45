"""What a run says, in one line each, where a setting or the data mean less than they seem to."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpews
from command_line import fedpews as command
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 2
HALVES = [(X[:20], Y[:20]), (X[20:], Y[20:])]
ONE_CLASS_EACH = [(X[Y == 0], Y[Y == 0]), (X[Y == 1], Y[Y == 1])]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def run(**settings: Any) -> None:
    given: dict[str, Any] = {"model": small, "method": "fedavg", "rounds": 1, "runtime": {"engine": "eager"}}
    given |= {"clients": HALVES, "test": (X, Y)}
    fedpews.run(**given | settings)


def test_a_run_in_which_nothing_is_strange_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    run(method="fedavg+pews", warmup={"rounds": 1, "diversity": 1.0}, data={"validation": 0.2})
    assert caplog.messages == []


def test_a_warmup_of_no_round_is_said(caplog: pytest.LogCaptureFixture) -> None:
    run(method="fedavg+pews", rounds=2, warmup={"fraction": 0.125})
    assert caplog.messages == [
        "fedavg+pews: warmup.fraction 0.125 of 2 rounds is less than half a round, so there is no warmup; "
        "set warmup.rounds"
    ]


def test_the_command_line_says_it_on_standard_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # without pytest's handlers, as in a process of its own
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    quick = [
        "--rounds",
        "2",
        "--seeds",
        "0",
        "--set",
        "train.batch_size=400",
        "--set",
        "runtime.engine=eager",
    ]
    done = command("run", "synthetic-3.2k", *quick, "--out", str(tmp_path / "run"))
    assert done.code == 0, done.stderr
    assert done.stderr.count("so there is no warmup") == 1


def test_classes_without_test_samples_are_said(caplog: pytest.LogCaptureFixture) -> None:
    run(test=(X[Y == 0], Y[Y == 0]))
    assert "no test samples of class 1: not covered by any metric" in caplog.messages


def test_clients_without_test_samples_are_said(caplog: pytest.LogCaptureFixture) -> None:
    named = {"train": HALVES[0], "test": HALVES[0]}
    run(clients=[named, {"train": HALVES[1]}], test=(X, Y))
    assert caplog.messages == ["no test samples of client 1: no client metrics there"]


def test_clients_whose_classes_have_no_test_samples_are_said(caplog: pytest.LogCaptureFixture) -> None:
    run(clients=ONE_CLASS_EACH, test=(X[Y == 0], Y[Y == 0]))
    assert "no test samples of client 1: no client metrics there" in caplog.messages


def test_a_metric_that_a_clients_one_class_does_not_define_is_said(caplog: pytest.LogCaptureFixture) -> None:
    run(clients=ONE_CLASS_EACH, test=ONE_CLASS_EACH, metrics=["auroc"], data={"validation": 0.2})
    assert caplog.messages == [
        "one class among the validation samples of clients 0, 1, so auroc is only defined over all clients",
        "auroc is undefined on the test samples of clients 0, 1",
    ]


def test_a_metric_that_no_validation_sample_defines_is_said_and_cannot_choose(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = {"clients": [ONE_CLASS_EACH[0]] * 2, "metrics": ["auroc"], "data": {"validation": 0.2}}
    run(**one)
    assert "auroc is undefined on the validation samples" in caplog.messages
    with pytest.raises(
        ConfigError, match="auroc is to choose the best round, but it is undefined on the validation"
    ):
        run(**one, stop={"best": True})


def test_a_client_without_validation_samples_is_said(caplog: pytest.LogCaptureFixture) -> None:
    run(clients=[*HALVES, (X[:1], Y[:1])], data={"validation": 0.2})
    assert caplog.messages == ["no validation samples of client 2: too few to hold any out"]


@pytest.mark.parametrize(
    ("method", "warmup"),
    [("fedavg+pews", {"start": 9.0, "start_spread": 0.0}), ("fedavg+pews-random", {"density": 1.0})],
)
def test_masks_that_are_all_open_are_said(
    method: str, warmup: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    run(method=method, rounds=3, warmup={"rounds": 2, **warmup})
    assert caplog.messages == ["all masks are open: in this warmup every client trains the whole network"]


@pytest.mark.parametrize("method", ["fedavg", "fedavg+pews-fixed", "fedavg+pews-random"])
def test_diversity_without_learned_masks_is_said(method: str, caplog: pytest.LogCaptureFixture) -> None:
    run(method=method, warmup={"rounds": 1, "diversity": 5.0})
    assert caplog.messages == [f"{method} learns no masks: warmup.diversity has no effect"]


@pytest.mark.parametrize("method", ["fedavg", "fedavg+pews-fixed", "fedavg+pews-auto"])
def test_the_diversity_of_a_recipe_is_for_its_own_method(method: str) -> None:
    assert Experiment.load("synthetic-32k", {"method.name": method}).warmup.diversity is None
    assert Experiment.load("synthetic-32k", {"method.name": "scaffold+pews"}).warmup.diversity == 5
    given = {"method.name": method, "warmup.diversity": 2.0}
    assert Experiment.load("synthetic-32k", given).warmup.diversity == 2


def test_long_lists_of_clients_are_cut_short(caplog: pytest.LogCaptureFixture) -> None:
    run(clients=[*HALVES, *[(X[:1], Y[:1])] * 9], data={"validation": 0.2})
    assert caplog.messages == [
        "no validation samples of clients 2, 3, 4, 5, 6 and 4 more: too few to hold any out"
    ]
