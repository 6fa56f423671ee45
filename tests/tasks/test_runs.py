"""Tasks, inputs and test sets of every kind through `fedpews.run`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedpews
from fedpews.errors import ConfigError
from fedpews.tasks import Metric, Regression, Task

G = torch.Generator().manual_seed(1)
X = torch.randn(48, 6, generator=G)
Y = (X[:, 0] > 0).long()
FAST: dict[str, Any] = {
    "method": "fedavg",
    "rounds": 2,
    "train": {"batch_size": 8, "lr": 0.1},
    "model": {"name": "mlp", "hidden": [8]},
    "runtime": {"engine": "eager"},
}


def halves(x: Any, y: Tensor) -> list[tuple[Any, Tensor]]:
    def part(rows: slice) -> Any:
        return {key: value[rows] for key, value in x.items()} if isinstance(x, dict) else x[rows]

    return [(part(slice(0, 20)), y[:20]), (part(slice(20, 40)), y[20:40])]


class Two(nn.Module):
    """Takes two inputs by name, returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 8), nn.Embedding(5, 8), nn.Linear(8, 2)

    def forward(self, numbers: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (self.a(numbers) + self.b(kind)).relu()
        return self.out(hidden), numbers


NAMED = {"numbers": X[:, :4], "kind": (X[:, 4] > 0).long()}


@pytest.mark.parametrize("method", ["fedavg", "fedavg+pews-fixed"])
def test_a_dict_of_inputs_goes_to_the_model_by_name(method: str) -> None:
    settings = FAST | {"method": method, "model": Two, "warmup": {"rounds": 1} if "pews" in method else {}}
    test = {key: value[40:] for key, value in NAMED.items()}
    result = fedpews.run(clients=halves(NAMED, Y), test=(test, Y[40:]), **settings)
    assert 0 <= result.rounds[-1]["accuracy"] <= 1


def test_bytes_are_trained_as_the_numbers_they_stand_for() -> None:
    pixels = (X.clamp(-1, 1) * 127 + 127).to(torch.uint8)
    runs = [
        fedpews.run(clients=halves(x, Y), test=(x[40:], Y[40:]), **FAST) for x in (pixels, pixels / 127.5 - 1)
    ]
    assert runs[0].rounds.column("loss") == runs[1].rounds.column("loss")


class Items(Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor, noise: float = 0.0) -> None:
        self.x, self.y, self.noise, self.reads = x, y, noise, 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        self.reads += 1
        return self.x[row] + self.noise * torch.randn(self.x.shape[1]), int(self.y[row])


def test_a_dataset_read_batch_by_batch_gives_the_numbers_of_one_read_at_once() -> None:
    sets = [Items(*pair) for pair in halves(X, Y)]
    test = Items(X[40:], Y[40:])
    lazy = fedpews.run(clients=sets, test=test, data={"lazy": True}, **FAST)
    reads = sets[0].reads
    whole = fedpews.run(clients=halves(X, Y), test=(X[40:], Y[40:]), **FAST)
    assert lazy.rounds.column("loss") == whole.rounds.column("loss")
    assert reads > 40  # labels once, and each of two epochs


def test_a_dataset_whose_items_are_random_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedpews"):
        fedpews.run(clients=[Items(X[:20], Y[:20], 1.0)], test=(X[40:], Y[40:]), **FAST)
    assert "gives other inputs each time it is asked" in caplog.text


def test_labels_from_one_are_noticed() -> None:
    with pytest.raises(ConfigError, match="labels are 1 to 2 and none is 0"):
        fedpews.run(clients=halves(X, Y + 1), test=(X[40:], Y[40:] + 1), **FAST)
    result = fedpews.run(
        clients=halves(X, Y + 1),
        test=(X[40:], Y[40:] + 1),
        task={"name": "classification", "classes": 3},
        **FAST,
    )
    assert result.params[0]["classifier.weight"].shape[0] == 3


class Tens(Task):
    """Tells numbers above ten by their sign."""

    name = "tens"
    METRICS = {"hit": Metric(("hits", "weight"), lambda hits, weight: float(hits / weight))}  # noqa: RUF012

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.softplus(-outputs.squeeze(1) * labels)

    def labels(self, y: Tensor, whose: str) -> Tensor:
        return y.float()

    def tallies(self, outputs: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"hits": lambda: (outputs.squeeze(1) * labels > 0).sum()}


def test_a_task_of_ones_own_is_trained_and_written_down(tmp_path: Path) -> None:
    sign = 2.0 * Y - 1
    result = fedpews.run(
        clients=halves(X, sign), test=(X[40:], sign[40:]), task=Tens(), out=tmp_path / "run", **FAST
    )
    assert result.summary["target_metric"] == "hit"
    assert 0 <= result.rounds[-1]["metrics"]["hit"] <= 1
    assert result.experiment.task.name.endswith("test_runs:Tens")


def test_a_loss_that_returns_a_mean_trains_like_the_tasks_own() -> None:
    y = X[:, :1] * 2
    given = {"clients": halves(X, y), "test": (X[40:], y[40:])}
    own = fedpews.run(**given, task="regression", **FAST)
    mine = fedpews.run(**given, task=Regression(), loss=nn.MSELoss(), **FAST)
    assert mine.rounds.column("loss") == pytest.approx(own.rounds.column("loss"), rel=1e-5)
    with pytest.raises(ConfigError, match="one number per sample"):
        fedpews.run(**given, task="regression", loss=lambda outputs, labels: torch.zeros(7), **FAST)


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        (X[:, 0], "classification", "for numbers choose task='regression'"),
        (X[:, :2], "multilabel", "must hold 0 .absent. and 1 .present."),
        (Y, "segmentation", "a class for every pixel"),
        (Y, "tokens", "a class for every token"),
        (X[:, :3], "regression", "2 number"),
    ],
)
def test_labels_that_do_not_fit_the_task_are_refused(y: Tensor, task: str, message: str) -> None:
    settings = FAST | ({"model": nn.Linear(6, 2)} if task == "regression" else {})
    if task == "regression":
        message = r"needs a model with outputs of shape \(3,\); this model.s have shape \(2,\)"
    with pytest.raises(ConfigError, match=message):
        fedpews.run(clients=halves(X, y), test=(X[40:], y[40:]), task=task, **settings)


def test_each_client_is_measured_on_its_own_test_data_and_the_global_model_on_all_of_it(
    tmp_path: Path,
) -> None:
    clients = [
        {"train": (X[:16], Y[:16]), "test": (X[40:43], Y[40:43])},
        {"train": (X[16:32], Y[16:32]), "test": (X[43:48], Y[43:48])},
    ]
    result = fedpews.run(clients=clients, out=tmp_path, data={"validation": 0.25}, **FAST)

    last = result.rounds[-1]
    one, two = last["client_metrics"]["accuracy"]
    assert last["accuracy"] == pytest.approx((3 * one + 5 * two) / 8)
    summary = json.loads((tmp_path / "summary.json").read_text())
    sites = summary["clients"]["accuracy"]
    assert sites["worst"] == min(one, two)
    assert sites["gap"] == pytest.approx(abs(one - two))
    assert summary["measured_on"]["clients"] == "each client's own test data"
    assert "best_accuracy" not in summary
    best = summary["best_on_validation"]["by_seed"][0]
    seen = [record["validation"]["accuracy"] for record in result.rounds]
    assert best["validation"] == max(seen)
    assert best["test"] == result.rounds[best["round"] - 1]["accuracy"]


def test_validation_samples_are_never_trained_on() -> None:
    data = fedpews.from_clients(halves(X, Y), (X[40:], Y[40:]))
    from fedpews.data.federation import hold_out

    split = hold_out(data, 0.25)
    assert [len(rows) for rows in split.clients] == [15, 15]
    assert not set(torch.cat(split.clients).tolist()) & set(torch.cat(split.validation).tolist())
    assert torch.equal(hold_out(data, 0.25).validation[0], split.validation[0])


def test_augmentation_changes_the_numbers_and_can_be_repeated() -> None:
    x = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    settings = FAST | {"model": {"name": "cnn", "hidden": [4]}}
    runs = [
        fedpews.run(clients=halves(x, Y), test=(x[40:], Y[40:]), data={"augment": names}, **settings)
        for names in ([], ["crop", "flip"], ["crop", "flip"])
    ]
    losses = [run.rounds.column("train_loss") for run in runs]
    assert losses[0] != losses[1]
    assert losses[1] == losses[2]


def test_folders_may_have_val_and_test_per_client_and_labels_by_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for client in ("a", "b"):
        (tmp_path / client).mkdir()
        for part, samples in (("train", 8), ("val", 4), ("test", 4)):
            y = np.array(["dog", "cat"])[rng.integers(0, 2, samples)]
            np.savez(tmp_path / client / f"{part}.npz", x=rng.random((samples, 6)), y=y)
    (tmp_path / "classes.txt").write_text("dog\ncat\n")

    data = fedpews.data.load(f"folder:{tmp_path}")

    assert data.class_names == ("dog", "cat")
    assert [len(rows) for rows in data.clients] == [8, 8]
    assert [len(rows) for rows in data.validation] == [4, 4]
    assert [rows.tolist() for rows in data.test_clients] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Tagger(nn.Module):
    """A class for every token, from integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(12, 8), nn.Linear(8, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tags: torch.Tensor = self.out(torch.relu(self.hidden(self.embed(x))))
        return tags


def pixel_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))


@pytest.mark.parametrize(
    ("task", "method"),
    [
        ("regression", "fedavg+pews"),
        ("multilabel", "fedavg"),
        ("segmentation", "fedavg+pews"),
        ("tokens", "fedavg+pews"),
    ],
)
@pytest.mark.parametrize("code", ["interpreted", pytest.param("machine code", marks=pytest.mark.slow)])
def test_the_compiled_engine_gives_the_eager_engines_numbers(
    code: str, task: str, method: str, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    if code == "interpreted":
        request.getfixturevalue("interpreted")
    draw = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {}
    x, y = X, X[:, :2] * 2 if task == "regression" else (X[:, :2] > 0).float()
    if task == "segmentation":
        x, y = torch.randn(60, 1, 6, 6, generator=draw), torch.randint(0, 3, (60, 6, 6), generator=draw)
        given["model"] = pixel_net
    elif task == "tokens":
        x, y = (torch.randint(0, n, (60, 5), generator=draw) for n in (12, 3))
        given["model"] = Tagger
    engines: list[str] = []
    runs = [
        fedpews.run(
            clients=halves(x, y),
            test=(x[40:], y[40:]),
            task=task,
            callbacks=[fedpews.Callback(begin=lambda experiment, done, engine: engines.append(engine))],
            **FAST
            | {
                "method": method,
                "warmup": {"rounds": 1} if "pews" in method else {},
                "runtime": {"engine": engine},
                "train": {"batch_size": 8, "lr": 0.01},
            }
            | given,
        )
        for engine in ("eager", "compiled")
    ]
    assert [engine.split()[0] for engine in engines] == ["eager", "compiled"]
    assert "eager engine" not in caplog.text  # nothing was refused on the way
    assert runs[0].rounds.column("loss") == pytest.approx(runs[1].rounds.column("loss"), rel=1e-4)


def test_what_has_a_target_is_measured_and_the_accuracy_stays_where_it_was() -> None:
    given = {"clients": halves(X, Y), "test": (X[40:], Y[40:])}
    result = fedpews.run(**given, metrics=["macro_f1"], target_metric="auroc", target=0.01, **FAST)
    assert result.rounds[0]["metrics"].keys() == {"macro_f1", "auroc"}
    assert 0 <= result.rounds[0]["accuracy"] <= 1
    assert len(result.rounds[0]["client_accuracy"]) == 2
    assert result.summary["rounds_to_target"]["by_seed"] == [1]


def test_a_federation_brings_its_task_with_it() -> None:
    y = X[:, :1] * 2
    data = fedpews.from_clients(halves(X, y), (X[40:], y[40:]), task=Regression())
    assert fedpews.run(clients=data, metrics=["r2"], **FAST).summary["target_metric"] == "r2"
    with pytest.raises(
        ConfigError, match="for the task regression, but the experiment has the task classification"
    ):
        fedpews.run(clients=data, task="classification", **FAST)
