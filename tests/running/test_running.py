"""Runs from Python: your own model and data, the result, and going on after a kill."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedpews
from command_line import fedpews as fedpews_command
from fedpews.errors import CheckpointError, ConfigError, RunFailed
from waiting import deadly

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + 2 * (X[:, 1] > 0).long()
CLIENTS = [(X[:30], Y[:30]), (X[30:], Y[30:])]
FAST = {"rounds": 4, "train": {"batch_size": 8}, "runtime": {"engine": "eager"}}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def rounds_of(path: Path) -> list[str]:
    """rounds.jsonl without the seconds, which are nobody's contract."""
    return [
        re.sub(r'"(seconds|sum)": [^,}]+', "", line)
        for line in (path / "rounds.jsonl").read_text().splitlines()
    ]


def test_any_module_and_a_list_of_tensors_train_in_one_call() -> None:
    result = fedpews.run(
        model=small, clients=CLIENTS, test=(X, Y), method="fedavg+pews", seeds=[0, 1], **FAST
    )
    assert len(result.rounds) == 8
    assert {record["phase"] for record in result.rounds} == {"train", "warmup"}
    assert result.rounds.to_pandas().shape[0] == 8
    assert result.model(1)(X).shape == (60, 4)
    assert set(result.neurons[0]) == {0, 1}


def test_torch_datasets_are_clients_too() -> None:
    datasets = [TensorDataset(*client) for client in CLIENTS]
    a = fedpews.run(model=small, clients=datasets, test=TensorDataset(X, Y), method="fedavg", **FAST)
    b = fedpews.run(model=small, clients=CLIENTS, test=(X, Y), method="fedavg", **FAST)
    assert a.rounds.column("loss") == b.rounds.column("loss")


def test_a_plot_is_written(tmp_path: Path) -> None:
    result = fedpews.run(model=small, clients=CLIENTS, test=(X, Y), method="fedavg", **FAST)
    result.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def regression() -> fedpews.Result:
    """A result whose goal is not the accuracy."""
    halves = [(X[:30], X[:30, :1]), (X[30:], X[30:, :1])]
    return fedpews.run(clients=halves, test=(X, X[:, :1]), task="regression", method="fedavg", **FAST)


def test_a_result_says_the_metric_that_counts(regression: fedpews.Result) -> None:
    mae = regression.summary["final"]["mae"]["mean"]

    assert repr(regression) == f"<Result of fedavg: 4 rounds, 1 seed(s), final mae {mae:.4g}>"


def test_a_notebook_shows_a_result_as_a_table_and_its_plot_as_a_picture(regression: fedpews.Result) -> None:
    shown = regression._repr_html_()

    assert shown.startswith("<table")
    assert "final mae" in shown
    assert "fedavg" in shown
    figure: Any = regression.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_frame_of_rounds_has_a_column_for_each_metric(regression: fedpews.Result) -> None:
    frame = regression.rounds.to_pandas()

    assert "metrics.mae" in frame.columns
    assert not any(isinstance(value, dict) for value in frame.to_numpy().flat)


def test_a_given_module_is_not_changed() -> None:
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fedpews.run(model=model, clients=CLIENTS, test=(X, Y), method="fedavg+pews", **FAST)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training


def test_a_run_leaves_torchs_global_generator_alone() -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.Linear(8, 4))

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    fedpews.run(model=dropping, clients=CLIENTS, test=(X, Y), method="fedavg+pews", **FAST)
    assert torch.equal(torch.rand(1), expected)


def test_dropout_gives_the_same_numbers_for_any_number_of_workers() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))

    runs = [
        fedpews.run(
            model=model,
            clients=CLIENTS,
            test=(X, Y),
            method="fedavg",
            rounds=2,
            runtime={"engine": "eager", "workers": n},
        )
        for n in (1, 2)
    ]
    assert runs[0].rounds.column("loss") == runs[1].rounds.column("loss")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"test": (X, Y + 1)}, "outputs of shape \\(5,\\); this model's have shape \\(4,\\)"),
        ({"clients": [CLIENTS[0], (X[:0], Y[:0])]}, "(?i)empty|no samples"),
        ({"clients": [CLIENTS[0], (X[:1] * float("nan"), Y[:1])]}, "(?i)nan"),
        ({"model": nn.Linear(3, 4)}, "cannot take inputs of shape \\(5,\\)"),
        ({"test": None}, "there is no test set"),
        ({"clients": None}, "clients and test must be given together"),
    ],
)
def test_bad_input_is_refused_with_a_clear_error(arguments: dict[str, object], message: str) -> None:
    given = {"model": small, "clients": CLIENTS, "test": (X, Y), **arguments}
    with pytest.raises(ConfigError, match=message):
        fedpews.run(**given, method="fedavg", **FAST)


def test_a_loss_that_is_no_longer_finite_ends_the_run() -> None:
    with pytest.raises(RunFailed, match=r"lower train\.lr"):
        fedpews.run(
            model=small,
            clients=CLIENTS,
            test=(X, Y),
            method="fedavg",
            rounds=3,
            train={"lr": 1e30},
            runtime={"engine": "eager"},
        )


def test_the_run_folder_has_what_it_promises(tmp_path: Path) -> None:
    fedpews.run(model=small, clients=CLIENTS, test=(X, Y), method="fedavg+pews", out=tmp_path, **FAST)
    names = {path.name for path in tmp_path.iterdir()}
    assert {
        "config.toml",
        "rounds.jsonl",
        "summary.json",
        "model-0.safetensors",
        "masks-0.safetensors",
        "checkpoint",
    } <= names
    record = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[0])
    assert {
        "seed", "round", "phase", "accuracy", "loss", "train_loss", "client_accuracy", "bytes_up", "bytes_down",
        "density", "client_density", "coverage", "overlap", "seconds",
    } <= set(record)  # fmt: skip
    assert record["density"] == pytest.approx(sum(record["client_density"]) / len(CLIENTS))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["method"] == "fedavg+pews"
    assert summary["final_accuracy"]["by_seed"] == [
        json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[-1])["accuracy"]
    ]


def test_a_folder_is_not_overwritten_and_not_continued_with_other_settings(tmp_path: Path) -> None:
    given = {"model": small, "clients": CLIENTS, "test": (X, Y), "method": "fedavg", "out": tmp_path}
    fedpews.run(**given, **FAST)
    with pytest.raises(ConfigError, match="already holds a run"):
        fedpews.run(**given, **FAST)
    with pytest.raises(CheckpointError, match=r"train\.lr is 0\.01 there and 0\.5 here"):
        fedpews.run(**given, **FAST | {"train": {"batch_size": 8, "lr": 0.5}}, resume=True)
    with pytest.raises(CheckpointError, match="other data"):
        fedpews.run(**given | {"clients": [(X[:30] + 1, Y[:30]), CLIENTS[1]]}, **FAST, resume=True)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    from fedpews.results.folder import RunFolder

    held = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match="in use by another run"):
        fedpews.run(model=small, clients=CLIENTS, test=(X, Y), method="fedavg", out=tmp_path, **FAST)
    held.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(workers: int, tmp_path: Path) -> None:
    settings = FAST | {"runtime": {"engine": "eager", "workers": workers}}
    here = fedpews.run(
        model=small, clients=CLIENTS, test=(X, Y), method="fedavg+pews", seeds=[0, 1], **settings
    )
    plain = fedpews.run(model=small, clients=CLIENTS, test=(X, Y), method="fedavg+pews", seeds=[0, 1], **FAST)
    for record, other in zip(here.rounds, plain.rounds, strict=True):
        assert record | {"seconds": 0} == other | {"seconds": 0}


# eight batches a round: of two seeds, two clients and two steps
SETTINGS = (
    *("run", "synthetic-3.2k", "--rounds", "8", "--seeds", "0,1", "--set", "warmup.rounds=4"),
    *("--set", "train.batch_size=100", "--set", "train.steps=2", "--set", "runtime.engine=eager"),
    *("--set", "runtime.workers=1", "--set", "runtime.checkpoint_every=2"),
)


def killed(folder: Path, round: int, number: signal.Signals) -> tuple[str, subprocess.CompletedProcess[str]]:
    """A process whose run gets a signal in the middle of a round; and what else its configuration has."""
    augment = f'data.augment=["{deadly(folder, 8 * round - 3, number)}"]'
    command = [sys.executable, "-m", "fedpews", *SETTINGS, "--out", str(folder / "run"), "--set", augment]
    return augment, subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert fedpews_command(*SETTINGS, "--out", str(folder)).code == 0
    return folder


@pytest.mark.parametrize("round", [2, 4, 6])
def test_a_killed_run_goes_on_to_the_same_numbers(round: int, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    augment, ended = killed(tmp_path, round, signal.SIGKILL)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(rounds_of(folder)) == 2 * (round - 1)
    again = fedpews_command(*SETTINGS, "--out", str(folder), "--set", augment, "--resume")
    assert again.code == 0, again.stderr
    assert rounds_of(folder) == rounds_of(whole)
    assert (folder / "model-1.safetensors").read_bytes() == (whole / "model-1.safetensors").read_bytes()


def test_ctrl_c_saves_says_how_to_go_on_and_exits_130(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    augment, ended = killed(tmp_path, 3, signal.SIGINT)
    assert ended.returncode == 130, ended.stderr
    assert "--resume" in ended.stderr
    assert len(rounds_of(folder)) == 2 * 3
    again = fedpews_command(*SETTINGS, "--out", str(folder), "--set", augment, "--resume")
    assert again.code == 0, again.stderr
    assert "from round 4" in again.stderr
    assert rounds_of(folder) == rounds_of(whole)


def test_fedbn_keeps_norm_layers_at_the_client_around_any_warmup() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    result = fedpews.run(model=model, clients=CLIENTS, test=(X, Y), method="fedavg+pews+fedbn", **FAST)
    assert result.summary["method"] == "fedavg+pews+fedbn"
    assert torch.equal(result.params[0]["1.weight"], torch.ones(8))  # never averaged: as the model came
    assert not torch.equal(result.params[0]["0.bias"], torch.zeros(8))
    assert all("personal_accuracy" in record for record in result.rounds)
    assert set(result.neurons[0]) == {0, 1}


def test_a_model_may_be_a_name() -> None:
    result = fedpews.run(model="mlp", clients=CLIENTS, test=(X, Y), method="fedavg", **FAST)
    assert result.experiment.model.name == "mlp"


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": small, "clients": CLIENTS, "test": (X, Y), "method": "fedavg", "out": tmp_path}
    fedpews.run(**given, **FAST)
    monkeypatch.setattr("fedpews.saving.STATE_LAYOUT", "another")
    with pytest.raises(CheckpointError, match="another version"):
        fedpews.run(**given, **FAST, resume=True)
