"""Trackers, each with its real library, offline in a temporary folder; skipped where the library is not here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedpews.callbacks import Callback
from fedpews.errors import ConfigError, Interrupted
from fedpews.experiment import Experiment
from fedpews.running import run
from fedpews.trackers import scalars, tracking

TINY = Experiment(
    rounds=3,
    seeds=[0, 1],
    method={"name": "fedavg"},
    train={"steps": 1},
    data={"train_per_class": 4, "test_per_class": 2},
    model={"hidden": [4]},
    runtime={"engine": "eager", "checkpoint_every": 1},
)

# these libraries warn about themselves and about each other; none of it is ours to mend
pytestmark = pytest.mark.filterwarnings("default")


def tracked(name: str, folder: Path) -> Any:
    with tracking([name], folder) as tracker:
        return run(TINY, out=folder, callbacks=[tracker])


def test_a_tracker_nobody_knows_is_an_error_that_names_the_others(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="tensorboard, wandb, mlflow, trackio"),
        tracking(["x"], tmp_path),
    ):
        pass


def test_a_tracker_that_is_not_installed_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)

    with (
        pytest.raises(ConfigError, match=r"pip install 'fedpews\[wandb\]'"),
        tracking(["wandb"], tmp_path),
    ):
        pass


def test_only_numbers_are_sent() -> None:
    record = {
        "seed": 1,
        "round": 2,
        "phase": "warmup",
        "loss": 1,
        "client_accuracy": [0.5],
        "update_cosine": None,
    }

    assert scalars(record) == {"loss": 1.0}


def test_tensorboard_gets_every_round_of_every_seed_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed (pip install 'fedpews[tensorboard]')"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def stop(records: Any) -> None:
        if records[0]["round"] == 2:
            raise Interrupted("stopped")

    with pytest.raises(Interrupted), tracking(["tensorboard"], tmp_path) as tracker:
        run(TINY, out=tmp_path, callbacks=[tracker, Callback(round=stop)])
    with tracking(["tensorboard"], tmp_path) as tracker:
        result = run(TINY, out=tmp_path, resume=True, callbacks=[tracker])

    for seed in (0, 1):
        events = (
            EventAccumulator(str(tmp_path / "tensorboard" / f"fedavg-seed-{seed}"))
            .Reload()
            .Scalars("accuracy")
        )
        expected = {r["round"]: pytest.approx(r["accuracy"]) for r in result.rounds if r["seed"] == seed}
        assert {event.step: event.value for event in events} == expected


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DIR": str(tmp_path),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "GRADIO_ANALYTICS_ENABLED": "False",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.usefixtures("_offline")
def test_wandb_writes_an_offline_run_for_every_seed(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (pip install 'fedpews[wandb]')")

    result = tracked("wandb", tmp_path / "run")

    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    losses = sorted(_wandb_history(file, "loss") for file in files)
    assert losses == sorted([r["loss"] for r in result.rounds if r["seed"] == seed] for seed in (0, 1))


def _wandb_history(file: Path, key: str) -> list[float]:
    """A metric's values in the file that wandb would send later."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store, found = DataStore(), []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        for item in record.history.item:
            if (item.key or ".".join(item.nested_key)) == key:
                found.append(float(item.value_json))
    return found


@pytest.mark.usefixtures("_offline")
def test_mlflow_has_the_same_numbers_as_the_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed (pip install 'fedpews[mlflow]')")
    from mlflow import MlflowClient

    result = tracked("mlflow", tmp_path / "run")

    client = MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    place = client.get_experiment_by_name("fedpews").experiment_id
    runs = {run.data.params["seed"]: run.info.run_id for run in client.search_runs([place])}
    for seed in (0, 1):
        history = client.get_metric_history(runs[str(seed)], "loss")
        assert {one.step: one.value for one in history} == {
            r["round"]: r["loss"] for r in result.rounds if r["seed"] == seed
        }


@pytest.mark.usefixtures("_offline")
def test_trackio_has_a_run_for_every_seed(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed (pip install 'fedpews[trackio]')")
    from trackio.sqlite_storage import SQLiteStorage

    result = tracked("trackio", tmp_path / "run")

    names = SQLiteStorage.get_runs("fedpews")
    assert sorted(name[:13] for name in names) == ["fedavg-seed-0", "fedavg-seed-1"]
    logs = SQLiteStorage.get_logs("fedpews", min(names))
    assert [line["loss"] for line in logs] == [r["loss"] for r in result.rounds if r["seed"] == 0]
