"""Whatever a configuration, a setting, a method's name or a run's folder holds: an answer, or an error of ours."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from fuzzing import cases, spoilt, spoilt_bytes, survives, tame, texts, wild
from hypothesis import example, given
from hypothesis import strategies as st

from fedpews import compose
from fedpews.build import build_method, build_task
from fedpews.config import flatten, parse_setting, recipes
from fedpews.data import from_clients
from fedpews.experiment import Experiment, known_keys
from fedpews.flower.roster import KnownSites
from fedpews.outside import parse_json, parse_toml
from fedpews.paper.study import load_study
from fedpews.report.compare import remarks, table, verdicts
from fedpews.report.html import make_report
from fedpews.report.runs import find_runs
from fedpews.result import load
from fedpews.running import run as run_experiment

RECIPES = {name: tomllib.loads(file.read_text()) for name, file in recipes().items()}
WHOLE = Experiment().to_dict()
KEYS = sorted(known_keys())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def _write(path: Path, text: str) -> Path:
    path.write_text(text, errors="replace")
    return path


@cases(120)
@given(data=st.data())
def test_any_configuration_file_is_an_experiment_or_refused(place: Path, data: st.DataObject) -> None:
    start = data.draw(st.sampled_from([WHOLE, *RECIPES.values()]))
    values = data.draw(spoilt(start, tame))
    try:
        text = tomli_w.dumps(values if isinstance(values, dict) else {"value": values})
    except (TypeError, ValueError, AttributeError):
        return

    def read() -> None:
        experiment = Experiment.load(_write(place / "a.toml", text))
        # what was read is written with every run, and must read the same
        assert Experiment.load(_write(place / "b.toml", experiment.to_toml())) == experiment
        flatten(experiment.to_dict())
        if ":" not in experiment.method.name + experiment.train.optimizer + experiment.task.name:
            build_method(experiment)
            build_task(experiment)

    survives(read)


@cases(60)
@given(data=st.data())
def test_any_bytes_are_a_configuration_or_refused(place: Path, data: st.DataObject) -> None:
    raw = data.draw(st.one_of(spoilt_bytes(tomli_w.dumps(WHOLE).encode()), st.binary(max_size=60)))
    (place / "c.toml").write_bytes(raw)
    survives(lambda: Experiment.load(place / "c.toml"))


@cases(60)
@given(text=st.one_of(st.text(max_size=80), st.from_regex(r"[a.\[\]{}=\"',0-9\n]{0,60}", fullmatch=True)))
@example(".".join("a" * 30_000) + "=1")
@example("a=" + "[" * 9000)
@example("a=" + "9" * 9000)
def test_any_text_is_toml_and_json_or_refused(text: str) -> None:
    survives(lambda: parse_toml(text, "text"))
    survives(lambda: parse_json(text, "text"))


@cases(80)
@given(key=st.one_of(st.sampled_from(KEYS), texts), value=st.one_of(texts, wild.map(json.dumps)))
@example("train.lr", "[" * 5000)
@example("rounds", "9" * 5000)
@example(".".join("a" * 5000), "1")
@example("a", "{" + ".".join("a" * 30_000) + "=1}")
def test_any_setting_is_an_experiment_or_refused(key: str, value: str) -> None:
    survives(lambda: Experiment.load("synthetic-3.2k", dict([parse_setting(f"{key}={value}")])))


NAMES = [*compose.METHODS, *compose.SERVERS, *compose.WARMUPS, *compose.PERSONAL]


@cases(80)
@given(
    parts=st.lists(st.one_of(st.sampled_from(NAMES), texts), max_size=4),
    options=st.dictionaries(
        st.sampled_from(["mu", "momentum", "clip_norm", "x", "inner", "server"]), wild, max_size=2
    ),
    warmup=st.one_of(
        st.none(), st.dictionaries(st.sampled_from(["rounds", "diversity", "shares"]), wild, max_size=3)
    ),
)
def test_any_name_is_a_method_or_refused(parts: list[str], options: dict[str, Any], warmup: Any) -> None:
    name = "+".join(parts)
    tables = {key: options.pop(key) for key in ("server",) if isinstance(options.get(key), dict)}
    options.pop("server", None)
    survives(lambda: compose.method(name, warmup=warmup, **tables, **options))


@cases(30)
@given(data=st.data())
def test_any_study_and_roster_is_read_or_refused(place: Path, data: st.DataObject) -> None:
    study = {
        "item": "Table 1",
        "title": "x",
        "recipe": "synthetic-3.2k",
        "rows": {"a": {}},
        "columns": {"b": {}},
    }
    roster = {"site": [{"number": 0, "name": "north", "key": "SHA256:aaa"}]}
    for start, read in ((study, lambda path: load_study(str(path))), (roster, KnownSites.read)):
        values = data.draw(spoilt(start, tame))
        path = _write(
            place / "d.toml", tomli_w.dumps(values if isinstance(values, dict) else {"value": values})
        )
        survives(lambda read=read, path=path: read(path))  # type: ignore[misc]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    x, y = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2
    held = from_clients([(x[::2], y[::2]), (x[1::2], y[1::2])], (x, y), 2, client_names=("Oslo", "Lima"))
    run_experiment(
        clients=held,
        rounds=3,
        seeds=[0, 1],
        method="fedavg+pews",
        warmup={"rounds": 2},
        model={"name": "mlp", "hidden": [4]},
        runtime={"engine": "eager"},
        out=folder,
    )
    return folder


FILES = ["config.toml", "rounds.jsonl", "summary.json", "neurons.jsonl", "federation.json"]
TENSORS = ["masks-0.safetensors", "model-0.safetensors"]


def _spoil(data: st.DataObject, path: Path) -> None:
    raw = path.read_bytes()
    kind = data.draw(st.integers(0, 3))
    if kind == 0 or path.suffix == ".safetensors":
        path.write_bytes(data.draw(spoilt_bytes(raw)))
    elif path.suffix == ".toml":
        values = data.draw(spoilt(tomllib.loads(raw.decode()), tame))
        path.write_text(
            tomli_w.dumps(values if isinstance(values, dict) else {"value": values}), errors="replace"
        )
    elif path.suffix == ".json":
        path.write_text(json.dumps(data.draw(spoilt(json.loads(raw)))))
    else:
        lines = raw.decode().splitlines()
        place = data.draw(st.integers(0, len(lines) - 1))
        lines[place] = json.dumps(data.draw(spoilt(json.loads(lines[place]))))
        path.write_text("\n".join(lines) + "\n")


@cases(120)
@given(data=st.data())
def test_any_run_folder_is_shown_or_refused(base: Path, place: Path, data: st.DataObject) -> None:
    folder = place / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    # what vouches for the files would refuse nearly everything before it is looked at
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    for name in data.draw(st.lists(st.sampled_from([*FILES, *TENSORS]), min_size=1, max_size=2, unique=True)):
        _spoil(data, folder / name)

    def show() -> None:
        runs = find_runs([folder, base])
        table(runs)
        verdicts(runs)
        remarks(runs)
        assert "<script>alert" not in make_report(runs)

    survives(show)
    survives(lambda: load(folder))
