"""The map of when a warmup helps: its settings are those of the best trials, and its data are what it says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedpews.data import load
from fedpews.data.loading import data_table, load_table
from fedpews.experiment import Experiment
from fedpews.paper.cells import Runner
from fedpews.paper.reproduce import run_study
from fedpews.paper.study import Line, cells, load_study
from tiny_files import write_mnist
from toy import study

ROOT = Path(__file__).parents[2]


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def tune() -> ModuleType:
    return module(ROOT / "benchmarks" / "tune_map.py")


def test_the_studies_are_what_the_script_writes(
    tune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "STUDIES", tmp_path)
    tune.write("map-tuning", tune.trials())
    tune.write("map", tune.settings(tune.scores(tmp_path), tune.finished(tmp_path)))
    for name in ("map-tuning", "map"):
        committed = ROOT / "src/fedpews/paper/studies" / f"{name}.toml"
        assert (tmp_path / f"{name}.toml").read_text() == committed.read_text(), name


def test_every_method_has_as_many_trials_on_validation_data_of_a_draw_that_the_map_does_not_use() -> None:
    tuning, final = cells(load_study("map-tuning")), cells(load_study("map"))
    adam = sum("fedadam" in cell.row for cell in final)
    assert adam
    assert len(tuning) == 4 * len(final) + 4 * adam  # FedAdam has two rates to choose, so it has eight trials
    assert {cell.experiment.data.seed for cell in tuning} == {100}
    assert {cell.experiment.data.validation for cell in tuning} == {0.2}
    assert {cell.draw(seed) for cell in final for seed in cell.experiment.seeds} == {0, 1}


def test_the_best_trial_becomes_the_setting_and_the_best_method_the_one_to_beat(
    tune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {row: {"n4": [10.0, 20.0, None, 5.0]} for row in tune.methods()}
    known["scaffold"]["n4"] = [10.0, 20.0, 30.0, 70.0]
    known["scaffold-random"]["n4"] = [60.0, 1.0, 1.0, 1.0]
    monkeypatch.setattr(tune, "STUDIES", tmp_path)
    tune.write("map", tune.settings(known, {}))
    made = load_study(str(tmp_path / "map.toml"))
    rates = {(cell.row, cell.column): cell.experiment.train.lr for cell in cells(made)}
    assert rates["scaffold", "n4"] == 0.3
    assert rates["scaffold-random", "n4"] == 0.01
    assert rates["fedprox", "n4"] == 0.03
    assert rates["scaffold", "n8"] == 0.03  # not tuned: the second trial
    (claim,) = made.claims
    assert (claim.rows, claim.than, claim.columns) == (["scaffold-random"], "scaffold", ["n4"])
    assert "1 of 12 problems are tuned" in made.notes
    # in the map another method turned out to be the best one
    measured = dict.fromkeys(tune.BASES, 50.0) | {"fedadam": 60.0}
    (claim,) = tune.settings(known, {"n4": measured})["claims"]
    assert (claim["rows"], claim["than"]) == (["fedadam-fixed"], "fedadam")


def test_scores_are_those_of_the_runs_and_stay_when_the_runs_are_gone(
    tune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpews.report.html.write_report", lambda folders, path: path)
    small = {"rounds": 2, "train": {"steps": 1}, "model": {"hidden": [4, 4]}, "runtime": {"engine": "eager"}}
    columns = {"n4": Line(set={"data": {"name": "synthetic-3.2k", "validation": 0.2}, **small})}
    rows = {f"fedavg-{number}": Line(set={"train.lr": 0.1 * number}) for number in range(1, 4)}
    rows["fedavg-4"] = Line(set={"train.lr": 1e30, "train.steps": 20})
    toy = study(rows=rows, columns=columns, paper={}, claims=[], seeds=[0])
    monkeypatch.setattr(tune, "load_study", lambda name: toy)
    monkeypatch.setattr(tune, "PROBLEMS", {"n4": tune.PROBLEMS["n4"]})
    monkeypatch.setattr(tune, "methods", lambda: {"fedavg": tune.BASES["fedavg"]})
    outcome = run_study(toy, Runner(tmp_path / "runs"))

    known = tune.scores(tmp_path / "runs", tmp_path / "scores.json")

    last = [outcome.table[f"fedavg-{number}", "n4"].runs[0][-1] for number in range(1, 4)]
    assert known["fedavg"]["n4"] == [*(pytest.approx(100 * r["validation"]["accuracy"]) for r in last), None]
    assert json.loads((tmp_path / "scores.json").read_text())["draw"] == 100
    assert tune.scores(tmp_path / "nothing", tmp_path / "scores.json") == known


def test_each_client_of_the_shifted_digits_sees_all_classes_changed_in_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path, per_class=100)
    monkeypatch.setenv("FEDPEWS_DATA", str(tmp_path))
    monkeypatch.setenv("FEDPEWS_OFFLINE", "1")
    data = load("fedpews.paper.domains:digits", seed=3)
    size = {"train_per_class": 100, "test_per_class": 50, "image_size": 16}
    plain = load_table(data_table(name="mnist", partition="iid", clients=4, seed=3, **size))
    assert data.counts().sum(0).tolist() == [100] * 10
    assert int(data.counts().min()) > 0
    undo = (lambda x: x, torch.neg, lambda x: x.rot90(-1, (2, 3)), lambda x: x.flip(3))
    for change, ours, theirs in zip(undo, data.clients, plain.clients, strict=True):
        assert torch.equal(change(data.x[ours]), plain.x[theirs])
        assert torch.equal(data.y[ours], plain.y[theirs])
    assert data.test_y.bincount().tolist() == [50] * 10
    assert not torch.equal(data.test_x.sort(0).values, plain.test_x.sort(0).values)


def test_a_pretrained_start_uses_a_draw_of_its_own() -> None:
    (cell,) = (c for c in cells(load_study("map")) if (c.row, c.column) == ("fedavg", "pretrained"))
    experiment: Experiment = cell.experiment
    assert experiment.pretrain.data == "synthetic-3.2k"
    assert experiment.pretrain.seed not in {0, 1, 100}
