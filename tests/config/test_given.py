"""A model and data given in Python: a configuration that says so, and nothing that runs in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpews
from command_line import fedpews as command
from fedpews.errors import CheckpointError, ConfigError
from fedpews.report.collect import collect
from fedpews.report.compare import remarks
from fedpews.report.runs import find_runs
from fedpews.results.schema import GIVEN

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
CLIENTS = [(X[:20], Y[:20]), (X[20:], Y[20:])]


def small(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 2))


def run(out: Path, clients: Any = CLIENTS, model: Any = small, **settings: Any) -> fedpews.Result:
    settings = {"rounds": 2, "method": "fedavg", "runtime": {"engine": "eager"}} | settings
    return fedpews.run(model=model, clients=clients, test=(X, Y), out=out, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("given") / "run"
    run(path)
    return path


def test_a_configuration_says_what_was_given_in_python(folder: Path) -> None:
    experiment = fedpews.load(folder).experiment

    line = small.__code__.co_firstlineno
    assert (experiment.data.name, experiment.model.name) == (GIVEN, GIVEN)
    assert experiment.model.model_extra is not None
    assert experiment.model.model_extra["code"].endswith(f"test_given.py:{line}")
    assert experiment.data.fingerprint
    assert experiment.model.model_extra["fingerprint"]


def test_the_command_line_refuses_to_run_it_and_says_what_is_needed(folder: Path, tmp_path: Path) -> None:
    done = command("run", str(folder / "config.toml"), "--out", str(tmp_path / "again"))

    assert done.code == 2
    said = " ".join(done.stderr.split())
    assert "model (small, " in said
    assert (
        "and data were given in Python: run it there, with fedpews.run(CONFIG, model=…, clients=…, test=…)"
        in said
    )
    assert not (tmp_path / "again" / "rounds.jsonl").exists()


def test_the_page_makes_it_again_in_python(folder: Path) -> None:
    (shown,) = collect(find_runs([folder]))["runs"]

    assert shown["again"]["command"].startswith("fedpews.run(")
    assert "model=…, clients=…, test=…" in shown["again"]["command"]


def test_the_same_objects_go_on_and_others_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "run")
    assert len(run(tmp_path / "run", rounds=3, resume=True).rounds) == 3

    with pytest.raises(CheckpointError, match="other data"):
        run(tmp_path / "run", clients=CLIENTS[::-1], rounds=3, resume=True)
    with pytest.raises(CheckpointError, match=r"another model: 0\.weight has shape 6×5 there and 7×5 here"):
        run(tmp_path / "run", model=lambda: small(7), rounds=3, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"clients": CLIENTS[::-1]}, "other data"), ({"model": lambda: small(7)}, "another model")],
)
def test_a_run_without_a_checkpoint_is_held_to_its_configuration(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text((folder / "config.toml").read_text())

    with pytest.raises(CheckpointError, match=message):
        run(tmp_path, resume=True, **changes)


def test_a_loaded_run_asks_for_the_module_that_it_cannot_build(folder: Path) -> None:
    loaded = fedpews.load(folder)

    with pytest.raises(ConfigError, match=r"pass your module, .* load\(folder, model=\.\.\.\)"):
        loaded.model(0)
    assert fedpews.load(folder, model=small).model(0)(X).shape == (40, 2)


def test_runs_of_different_models_are_told_apart(folder: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", model=lambda: small(60))

    # 5·6 + 6 + 6·2 + 2 = 50, and ten times the width 5·60 + 60 + 60·2 + 2 = 482
    (said,) = remarks(find_runs([folder, tmp_path / "run"]))

    assert said.startswith("The models differ, not only the methods; weights: ")
    assert " 50, " in said
    assert said.endswith(" 482.")
