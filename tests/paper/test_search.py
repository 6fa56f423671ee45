"""A search for settings: what is tried, what is chosen by, and that it goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dask_here import Dask
from fedpews.cli import app
from fedpews.errors import ConfigError, FolderInUse
from fedpews.experiment import Experiment
from fedpews.paper.cells import Runner, report_validation
from fedpews.paper.search import (
    Search,
    best_trial,
    ended,
    has_failed,
    open_study,
    plan_search,
    run_search,
)
from fedpews.paper.sweep import Range, make_sweep, parse_grid
from fedpews.results import layout
from fedpews.results.records import read_rounds
from toy import TINY
from waiting import deadly, when

optuna = pytest.importorskip("optuna", reason="needs Optuna: pip install 'fedpews[search]'")

DATA = {"train_per_class": 20, "test_per_class": 10, "validation": 0.25}
RATES = Range(1e-6, 0.5, log=True)


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path)


def write_config(folder: Path, **changes: Any) -> str:
    values: dict[str, Any] = TINY | {"data": DATA, "train": {"steps": 2}, "method": {"name": "fedavg+pews"}}
    file = folder / "mine.toml"
    file.write_text(Experiment(**(values | changes)).to_toml())
    return str(file)


def search_in(root: Path, search: Search, storage: str | None = None) -> list[Any]:
    with open_study(search, root, storage) as study:
        run_search(search, study, Runner(root))
        return ended(study)


def settings(trial: Any) -> dict[str, Any]:
    suggested: dict[str, Any] = trial.user_attrs["settings"]
    return suggested


def sweep(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["sweep", *arguments, "--search", "optuna"])


# ---- what is searched


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.lr=0.001..0.1:log", Range(0.001, 0.1, log=True)),
        ("train.lr=1e-4..1e-1:log", Range(1e-4, 0.1, log=True)),
        ("warmup.rounds=10..100", Range(10, 100)),
        ("warmup.rounds=10..100:10", Range(10, 100, step=10)),
        ("train.lr=0..1:0.25", Range(0.0, 1.0, step=0.25)),
        ("train.lr=-.5...5", Range(-0.5, 0.5)),
        ("warmup.rounds=1..1000:log", Range(1, 1000, log=True)),
    ],
)
def test_a_range_is_read_with_its_kind_of_numbers(text: str, expected: Range) -> None:
    key, parsed = parse_grid(text)
    assert parsed == expected
    assert isinstance(parsed, Range)
    assert [type(parsed.low), type(parsed.high)] == [type(expected.low), type(expected.high)]
    assert parse_grid(f"{key}={parsed}") == (key, parsed)


@pytest.mark.parametrize("text", ["a=2..1", "a=1..1", "a=0..1:log", "a=-1..1:log", "a=0..1:0", "a=0..1:-1"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--grid"):
        parse_grid(text)


def test_a_grid_without_a_search_takes_no_range(config: str) -> None:
    with pytest.raises(ConfigError, match="--search optuna"):
        make_sweep(config, {"train.lr": RATES})


@pytest.mark.parametrize(
    ("grid", "fixed", "match"),
    [
        ({}, {}, "at least one"),
        ({"train.lr": Range(-1.0, 1.0)}, {}, "train.lr=-1.0"),
        ({"trian.lr": RATES}, {}, "unknown key"),
        ({"warmup.rounds": Range(1, 9)}, {}, "rounds is 2"),
        ({"data.validation": Range(0.1, 0.5)}, {}, "cannot be searched"),
        ({"train.lr": RATES}, {"stop.patience": 3, "stop.on": "test"}, "validation data only"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_runs(
    config: str, grid: Any, fixed: Any, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        plan_search(config, grid, 3, None, fixed)


def test_without_validation_data_some_are_held_out(tmp_path: Path) -> None:
    config = write_config(tmp_path, data={"train_per_class": 20, "test_per_class": 10})
    search = plan_search(config, {"train.lr": RATES}, 3, None, {})
    assert search.experiment({"train.lr": 0.1}).data.validation == 0.2
    own = plan_search(config, {"train.lr": RATES}, 3, None, {"data.validation": 0.5})
    assert own.experiment({"train.lr": 0.1}).data.validation == 0.5


def test_searches_that_differ_have_studies_of_their_own_and_more_trials_do_not(config: str) -> None:
    def name(grid: Any, trials: int = 3, fixed: Any = None) -> str:
        return plan_search(config, grid, trials, None, fixed or {}).study_name

    first = name({"train.lr": RATES})
    assert name({"train.lr": RATES}, trials=9) == first
    assert name({"train.lr": Range(1e-5, 0.5, log=True)}) != first
    assert name({"train.lr": RATES}, fixed={"rounds": 3}) != first


# ---- what it chooses by


def test_a_round_counts_behind_the_warmup_and_when_all_seeds_are_known() -> None:
    def record(seed: int, round: int, value: float | None, phase: str = "train") -> dict[str, Any]:
        return {"seed": seed, "round": round, "phase": phase, "validation": {"accuracy": value}}

    reported: list[tuple[int, float]] = []
    after = report_validation(Experiment(seeds=[0, 1]), lambda *pair: reported.append(pair)).round
    after([record(0, 1, 0.9, "warmup"), record(1, 1, 0.9, "warmup")])
    after([{"seed": 0, "round": 2, "phase": "train"}])
    assert reported == []
    after([record(0, 3, 0.2), record(1, 3, 0.4)])
    assert reported == [(3, pytest.approx(0.3))]
    # seed 1 has ended: its last value stays
    after([record(0, 4, 0.6)])
    assert reported[1:] == [(4, pytest.approx(0.5))]
    after([record(0, 5, None)])
    assert len(reported) == 2


def test_the_best_is_the_highest_or_where_less_is_better_the_lowest(config: str, tmp_path: Path) -> None:
    grid = {"train.lr": RATES}
    up = plan_search(config, grid, 3, None, {})
    down = plan_search(config, grid, 3, None, {"target_metric": "loss", "task.metrics": ["accuracy", "loss"]})
    best = []
    for search in (up, down):
        with open_study(search, tmp_path) as study:
            for value in (0.2, 0.9, 0.4):
                study.add_trial(optuna.trial.create_trial(value=value))
            study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.PRUNED))
            best.append(best_trial(study))
    assert [trial.number for trial in best] == [1, 0]  # type: ignore[union-attr]


# ---- from beginning to end


def test_a_search_ends_with_a_configuration_that_runs_to_the_same_number(config: str, tmp_path: Path) -> None:
    arguments = [config, "--grid", "train.lr=0.001..0.5:log", "--method", "fedavg", "--method", "fedavg+pews"]
    out = tmp_path / "out"

    answer = sweep(*arguments, "--rounds", "3", "--trials", "4", "--out", str(out))

    assert answer.exit_code == 0, answer.output
    best = out / "search-mine.best.toml"
    assert Experiment.load(best).rounds == 3
    ran = CliRunner().invoke(app, ["run", str(best), "--out", str(tmp_path / "best"), "--quiet"])
    assert ran.exit_code == 0, ran.output
    value = read_rounds(tmp_path / "best")[-1]["validation"]["accuracy"]
    assert f"accuracy {100 * value:.1f} % on validation data" in answer.output
    page = (out / "search-mine.md").read_text()
    assert "the test data choose nothing" in page


def test_finished_trials_are_not_run_again_and_more_can_be_asked_for(config: str, tmp_path: Path) -> None:
    grid = {"train.lr": RATES, "model.hidden": [[4, 4], [8, 8]]}

    def folders() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in tmp_path.glob(f"runs/*/*/{layout.SUMMARY}")}

    first = search_in(tmp_path, plan_search(config, grid, 2, None, {}))
    before = folders()
    again = search_in(tmp_path, plan_search(config, grid, 2, None, {}))
    assert again == first
    assert folders() == before

    more = search_in(tmp_path, plan_search(config, grid, 4, None, {}))

    assert more[:2] == first
    assert len(more) == 4
    assert len({str(settings(trial)) for trial in more}) == 4
    assert folders().items() > before.items()


def test_a_killed_search_goes_on_with_the_trial_it_was_at(tmp_path: Path) -> None:
    # in the middle of the first trial's rounds
    augment = [deadly(tmp_path, 30)]
    config = write_config(
        tmp_path, rounds=12, warmup={"rounds": 2}, seeds=[0], data=DATA | {"augment": augment}
    )
    out = tmp_path / "out"
    arguments = [config, "--grid", "train.lr=0.01..0.5:log", "--trials", "2", "--out", str(out), "--quiet"]
    command = [sys.executable, "-m", "fedpews", "sweep", *arguments, "--search", "optuna"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (begun,) = out.glob(f"runs/*/*/{layout.CONFIG}")
    assert not layout.is_finished(begun.parent)

    answer = sweep(*arguments)

    assert answer.exit_code == 0, answer.output
    # the run that was killed is one of the two, and went on where it was
    assert layout.is_finished(begun.parent)
    assert len(list(out.glob(f"runs/*/*/{layout.CONFIG}"))) == 2
    assert (
        len(re.findall(r"^\| \d+ \|.*\| done \|$", (out / "search-mine.md").read_text(), re.MULTILINE)) == 2
    )


def test_a_hopeless_trial_is_given_up_and_leaves_no_run_that_looks_finished(tmp_path: Path) -> None:
    config = write_config(tmp_path, rounds=8, warmup={"rounds": 1}, train={"steps": 5})
    search = plan_search(config, {"train.lr": RATES}, 10, None, {"data.train_per_class": 60})

    with open_study(search, tmp_path) as study:
        run_search(search, study, Runner(tmp_path))
        trials = ended(study)

    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert pruned
    assert {trial.user_attrs["note"] for trial in pruned} == {"no better than the median of the others"}
    done = [file.parent for file in tmp_path.glob(f"runs/*/*/{layout.SUMMARY}")]
    assert len(done) == len(trials) - len(pruned)
    assert {read_rounds(folder)[-1]["round"] for folder in done} == {8}


def test_settings_that_diverge_are_given_up_and_do_not_fail_the_search(config: str, tmp_path: Path) -> None:
    search = plan_search(config, {"train.lr": [1e30, 0.1]}, 4, None, {})

    trials = search_in(tmp_path, search)

    diverged = [trial for trial in trials if settings(trial) == {"train.lr": 1e30}]
    assert diverged
    assert all(trial.state.name == "PRUNED" and "finite" in trial.user_attrs["note"] for trial in diverged)
    assert not any(map(has_failed, trials))


def test_trials_that_all_fail_end_the_search(config: str, tmp_path: Path) -> None:
    answer = sweep(
        config, "--grid", "train.lr=0.1..0.5", "--set", "model.name=nothing", "--out", str(tmp_path)
    )
    assert answer.exit_code != 0
    assert "the first 3 trials all failed" in str(answer.exception)


def test_on_workers_a_search_comes_to_the_numbers_of_one_process(
    dask: Dask, config: str, tmp_path: Path
) -> None:
    arguments = ["--grid", "train.lr=0.1,0.2,0.3", "--trials", "5", "--rounds", "6", "--on", dask.address]

    answer = sweep(config, *arguments, "--out", str(tmp_path / "there"), "--quiet")

    assert answer.exit_code == 0, answer.output
    search = plan_search(config, {"train.lr": [0.1, 0.2, 0.3]}, 5, None, {"rounds": 6})
    with open_study(search, tmp_path / "there") as study:
        there = ended(study)
    assert len(there) == 5
    assert {trial.state.name for trial in there} == {"COMPLETE"}
    here = {str(settings(trial)): trial.value for trial in search_in(tmp_path / "here", search)}
    for trial in there:
        assert trial.value == here.get(str(settings(trial)), trial.value)
    assert {str(settings(trial)) for trial in there} & here.keys()


# ---- several processes


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_folder_takes_one_search_at_a_time_and_the_next_goes_on_with_its_trial(
    config: str, tmp_path: Path
) -> None:
    search = plan_search(config, {"train.lr": RATES}, 1, None, {})
    with open_study(search, tmp_path) as study:
        begun = study.ask()
        rate = begun.suggest_float("train.lr", RATES.low, RATES.high, log=True)
        with pytest.raises(FolderInUse, match="another process is running search-mine"), ExitStack() as stack:
            stack.enter_context(open_study(search, tmp_path))

    # it ended without a word about its trial
    trials = search_in(tmp_path, search)

    assert [settings(trial) for trial in trials] == [{"train.lr": rate}]


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_in_another_folder_is_run_again_only_without_heartbeats(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, url = plan_search(config, {"train.lr": RATES}, 1, None, {}), f"sqlite:///{tmp_path / 'all.db'}"
    with open_study(search, tmp_path / "one", url) as study:
        begun = study.ask()
        rate = begun.suggest_float("train.lr", RATES.low, RATES.high, log=True)
        study._storage.record_heartbeat(begun._trial_id)
    assert search_in(tmp_path / "two", search, url) == []

    monkeypatch.setattr("fedpews.paper.search.LOST_AFTER", 1)
    trials = when(lambda: search_in(tmp_path / "two", search, url))

    assert [settings(trial) for trial in trials] == [{"train.lr": rate}]


def test_without_optuna_the_command_says_how_to_get_it(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    answer = sweep(config, "--grid", "train.lr=0.1..0.5", "--out", str(tmp_path))
    assert "pip install 'fedpews[search]'" in str(answer.exception)


# ---- PostgreSQL


@pytest.fixture
def postgres() -> Iterator[str]:
    """A real server with a database of its own, listening on a socket in a folder; its URL."""
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")
    installed = [path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    program = shutil.which("initdb") or (str(installed[-1] / "initdb") if installed else None)
    if program is None:
        pytest.skip("there is no PostgreSQL server here: apt install postgresql")
    programs = Path(program).resolve().parent
    # a socket's path must be short, and the server's user must be able to reach it
    folder = Path(tempfile.mkdtemp(prefix="fedpews-pg-"))
    # the server refuses to run as root
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        shutil.chown(folder, user)

    def run(program: str, *arguments: str) -> None:
        command = [str(programs / program), *arguments]
        subprocess.run(command, check=True, user=user, stdout=subprocess.DEVNULL, cwd=folder)

    data = str(folder / "data")
    run("initdb", "-D", data, "-U", "fedpews", "-A", "trust", "--no-sync")
    options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
    run("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql+psycopg://fedpews@/postgres?host={folder}"
    finally:
        run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
        shutil.rmtree(folder)


def test_several_folders_search_together_through_a_postgresql_server(
    postgres: str, config: str, tmp_path: Path
) -> None:
    grid = {"train.lr": RATES}

    first = search_in(tmp_path / "one", plan_search(config, grid, 2, None, {}), postgres)
    second = search_in(tmp_path / "two", plan_search(config, grid, 4, None, {}), postgres)

    assert second[:2] == first
    assert len(second) == 4
    # only the trials that were missing ran there
    assert len(list((tmp_path / "two").glob(f"runs/*/*/{layout.SUMMARY}"))) == 2


def test_a_storage_that_does_not_answer_is_told(config: str, tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")
    url = f"postgresql+psycopg://nobody@/none?host={tmp_path}"
    answer = sweep(config, "--grid", "train.lr=0.1..0.5", "--out", str(tmp_path), "--storage", url)
    assert isinstance(answer.exception, ConfigError)
    assert "--storage" in str(answer.exception)
