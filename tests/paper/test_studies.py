"""Studies: cells on disk, pages, sweeps."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedpews.cli import app
from fedpews.errors import ClientDiverged, ConfigError, Interrupted, RunFailed
from fedpews.experiment import Experiment
from fedpews.paper import cells as cells_module
from fedpews.paper.cells import Runner
from fedpews.paper.claims import conclude
from fedpews.paper.page import write_index, write_page
from fedpews.paper.reproduce import reproduce, run_study
from fedpews.paper.study import Cell, Figure, Line, Small, adapted, canonical, cells, load_study
from fedpews.paper.sweep import make_sweep, parse_grid
from fedpews.report.compare import markdown
from toy import TINY, study


@pytest.fixture(autouse=True)
def _no_html(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of single runs have tests of their own, and take most of a tiny run's time."""
    monkeypatch.setattr("fedpews.report.html.write_report", lambda folders, path: path)


def test_a_finished_cell_is_not_run_twice_and_more_seeds_run_only_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[list[int]] = []
    real = cells_module._run

    def count(folder: Path, cell: Cell, experiment: Experiment, *rest: Any) -> None:
        runs.append(experiment.seeds)
        real(folder, cell, experiment, *rest)

    monkeypatch.setattr(cells_module, "_run", count)
    small = study(columns={"a": Line(set=TINY)}, paper={})
    run_study(small, Runner(tmp_path))
    run_study(small, Runner(tmp_path))
    assert runs == [[0, 1], [0, 1]]  # two cells, once each

    run_study(small.model_copy(update={"seeds": [0, 1, 2]}), Runner(tmp_path))

    assert runs[2:] == [[2], [2]]
    assert len(list((tmp_path / "runs").glob("*/*/summary.json"))) == 4


def test_a_stopped_cell_goes_on(tmp_path: Path) -> None:
    (cell,) = cells(
        study(columns={"a": Line(set=TINY)}, rows={"fedavg": study().rows["fedavg"]}, paper={}, claims=[])
    )
    Runner(tmp_path).run(cell)
    (folder,) = (tmp_path / "runs").glob("*/*")
    whole = (folder / "rounds.jsonl").read_text()
    (folder / "summary.json").unlink()  # as if killed before the end
    assert Runner(tmp_path).read(cell).status == "not run"

    assert Runner(tmp_path).run(cell).status == "done"
    assert (folder / "rounds.jsonl").read_text() == whole


def test_missing_data_and_a_failing_run_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPEWS_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("FEDPEWS_DATA", raising=False)
    columns = {
        "missing": Line(set=TINY | {"data": {"name": "cifar-mnist", "partition": "source"}}),
        "failing": Line(set=TINY | {"train": {"steps": 20, "lr": 1e30}}),
        "good": Line(set=TINY),
    }

    outcome = run_study(study(columns=columns, paper={}), Runner(tmp_path))

    statuses = {cell: result.status for cell, result in outcome.table.items()}
    assert statuses["fedavg", "missing"] == "data missing"
    assert "cifar" in outcome.table["fedavg", "missing"].message
    assert statuses["fedavg", "failing"] == "diverged"
    assert statuses["fedavg", "good"] == statuses["pews", "good"] == "done"
    assert outcome.failed == 4
    page = write_page(outcome, tmp_path).read_text()
    assert "data missing" in page


def test_a_seed_that_diverges_leaves_the_other_seeds_of_its_cell_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, tried = cells_module._run, []

    def one_diverges(folder: Path, cell: Cell, experiment: Experiment, runner: Runner) -> None:
        tried.append(list(experiment.seeds))
        if 1 in experiment.seeds:
            raise RunFailed("stopped") from ClientDiverged("client 0 diverges in round 1 of seed 1")
        train(folder, cell, experiment, runner)

    monkeypatch.setattr(cells_module, "_run", one_diverges)
    cell = cells(study(columns={"a": Line(set=TINY)}, paper={}, seeds=[0, 1, 2]))[0]

    result = Runner(tmp_path).run(cell)

    assert tried == [[0, 1, 2], [0], [1], [2]]
    assert (sorted(result.runs), result.status) == ([0, 2], "diverged")
    assert "seed 1" in result.message


def test_an_interruption_ends_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise Interrupted("stopped")

    monkeypatch.setattr(cells_module, "_run", stop)
    command = ["reproduce", "table1", "--out", str(tmp_path)]

    with pytest.raises(Interrupted):
        run_study(study(), Runner(tmp_path))
    answer = CliRunner().invoke(app, command)

    assert answer.exit_code == 130
    assert "the same command continues" in answer.output


def test_equal_experiments_are_the_same_cell() -> None:
    plain = Experiment(method={"name": "fedavg"}, warmup={"diversity": 3.0, "fraction": 0.5})
    assert canonical(plain) == canonical(Experiment(method={"name": "fedavg"}))

    tau = Experiment(rounds=200, warmup={"fraction": 0.125})
    assert canonical(tau) == canonical(Experiment(rounds=200, warmup={"rounds": 25}))
    assert canonical(tau) != canonical(Experiment(rounds=200, warmup={"rounds": 25, "ramp": 5}))

    names = {Cell("r", "c", plain.model_copy(update={"seeds": seeds})).name for seeds in ([0], [1, 2])}
    assert len(names) == 1


def test_no_page_is_written_of_cells_that_have_not_run(tmp_path: Path) -> None:
    list(reproduce("sota", Runner(tmp_path), run=False))

    assert not list(tmp_path.iterdir())


# ---- pages and sweeps


def test_changed_settings_are_in_every_cell_and_on_the_page(tmp_path: Path) -> None:
    changed = adapted(study(), [3, 4], {"train.lr": 0.5, "runtime.workers": 1})
    outcome = conclude(changed, [])

    assert {cell.experiment.train.lr for cell in cells(changed)} == {0.5}
    assert outcome.command == "fedpews reproduce toy --seeds 3,4 --set train.lr=0.5"
    assert (
        "**Not at the paper's scale**: changed: train.lr = 0.5." in write_page(outcome, tmp_path).read_text()
    )


def test_the_page_shows_both_numbers_and_the_index_sums_the_claims(tmp_path: Path) -> None:
    toy = study()
    outcome = run_study(toy, Runner(tmp_path))

    text = write_page(outcome, tmp_path).read_text()

    assert "[75 ± 2]" in text
    assert (tmp_path / "toy.png").exists()
    facts = json.loads((tmp_path / "toy.json").read_text())
    assert facts["cells"] == "4 of 4"
    index = write_index(tmp_path).read_text()
    assert "| higher | Table 0 | +5.00 points / +6.00 points |" in index
    assert "`fedpews reproduce toy`" in index


def test_a_page_names_the_machine_that_ran_and_not_the_one_that_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = study(columns={"a": Line(set=TINY)}, paper={}, seeds=[0])
    monkeypatch.setattr("fedpews.saving.describe_machine", lambda device: "64 cores (arm64), one H100")
    run_study(toy, Runner(tmp_path, tmp_path / "published"))
    monkeypatch.undo()

    for runs in (tmp_path, tmp_path / "nothing"):
        outcome = run_study(toy, Runner(runs, tmp_path / "published"), run=False)
        text = write_page(outcome, tmp_path / "pages").read_text()

        assert "Seeds 0; measured on 64 cores (arm64), one H100. " in text


def test_notes_beside_a_page_become_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "toy.notes.md").write_text("It is the seeds.")

    page = write_page(conclude(study(), []), tmp_path)

    assert "It is the seeds." in page.read_text()


def test_a_sweep_is_a_table_of_all_combinations(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(Experiment(**TINY, method={"name": "fedavg+pews"}).to_toml())
    grid = dict(parse_grid(text) for text in ("warmup.diversity=0.5,5", "train.lr=0.01,0.1"))

    outcome = run_study(make_sweep(str(config), grid), Runner(tmp_path))

    assert len(outcome.table) == 4
    assert all(result.status == "done" for result in outcome.table.values())
    rates = {cell.experiment.train.lr for cell in cells(outcome.study)}
    assert rates == {0.01, 0.1}
    assert write_page(outcome, tmp_path).exists()


@pytest.mark.parametrize("keys", [("method.name", "train.lr"), ("train.lr", "method.name")])
def test_a_sweep_over_methods_sets_an_option_of_one_of_them(keys: tuple[str, str]) -> None:
    grid = {"method.name": ["fedavg", "fedprox"], "train.lr": [0.01, 0.1]}
    made = make_sweep(
        "synthetic-3.2k", {key: grid[key] for key in keys}, [0], {"fedprox.mu": 0.5, "rounds": 3}
    )
    options = {
        (each.method_label, each.train.lr, each.rounds): each.method.model_extra
        for each in (cell.experiment for cell in cells(made))
    }
    assert options == {
        (name, rate, 3): expected
        for name, expected in (("fedavg", {}), ("fedprox", {"mu": 0.5}))
        for rate in (0.01, 0.1)
    }


def test_a_sweep_of_one_method_takes_its_option_by_name() -> None:
    made = make_sweep(
        "synthetic-3.2k", {"train.lr": [0.01]}, [0], {"method.name": "fedprox", "fedprox.mu": 0.5}
    )
    assert [cell.experiment.method.model_extra for cell in cells(made)] == [{"mu": 0.5}]


@pytest.mark.parametrize("text", ["", "train.lr", "=1,2", "train.lr="])
def test_a_grid_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse_grid(text)


def test_the_index_of_a_sweep_does_not_speak_of_the_paper(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(Experiment(**TINY).to_toml())
    page = write_page(conclude(make_sweep(str(config), {"train.lr": [0.01, 0.1]}), []), tmp_path)
    index = (tmp_path / "README.md").read_text()
    assert index.startswith("# Results\n")
    assert "[train.lr on mine](sweep-mine.md)" in index
    for text in (index, page.read_text()):
        assert "paper" not in text
        assert "scale" not in text.lower()


def test_the_index_shows_the_figure_that_a_page_shows(tmp_path: Path) -> None:
    page = write_page(conclude(study(name="table1"), []), tmp_path)
    page.write_text("no figure")
    assert "<img" not in write_index(tmp_path).read_text()

    page.write_text("![curves](table1.png)")
    assert '[<img src="table1.png" width="180" alt="' in write_index(tmp_path).read_text()


def test_the_index_of_the_papers_studies_says_so(tmp_path: Path) -> None:
    write_page(conclude(study(name="table1"), []), tmp_path)
    assert (tmp_path / "README.md").read_text().startswith("# The paper's results, as measured here\n")


def test_the_sweep_command_names_the_highest(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(Experiment(**TINY, method={"name": "fedavg+pews"}).to_toml())
    command = ["sweep", str(config), "--grid", "train.lr=0.01,0.1", "--out", str(tmp_path), "--quiet"]

    answer = CliRunner().invoke(app, command)

    assert answer.exit_code == 0, answer.output
    assert "highest final accuracy %: train.lr = 0." in answer.output


def test_a_sweep_over_methods_names_the_best_by_validation_data(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(Experiment(**TINY).to_toml())
    command = [
        "sweep",
        str(config),
        "--method",
        "fedavg",
        "--method",
        "fedavg+pews",
        "--grid",
        "train.lr=0.01,0.1",
    ]
    options = ["--rounds", "3", "--set", "data.validation=0.5", "--out", str(tmp_path), "--quiet"]

    answer = CliRunner().invoke(app, [*command, *options])

    assert answer.exit_code == 0, answer.output
    best = "highest accuracy on validation data after the last round %: method.name = fedavg"
    assert best in " ".join(answer.output.split())
    assert "test data" not in answer.output
    ran = [Experiment.load(file) for file in tmp_path.glob("runs/*/*/config.toml")]
    assert {(each.method_label, each.train.lr, each.rounds) for each in ran} == {
        (method, rate, 3) for method in ("fedavg", "fedavg+pews") for rate in (0.01, 0.1)
    }


def test_the_command_on_a_sweeps_page_is_one_that_makes_it_again(tmp_path: Path) -> None:
    config = tmp_path / "my runs.toml"
    config.write_text(Experiment(**TINY, method={"name": "fedavg"}).to_toml())
    command = ["sweep", str(config), "--grid", "train.lr=0.01,0.1", "--seeds", "0", "--set", "rounds=1"]
    assert CliRunner().invoke(app, [*command, "--out", str(tmp_path / "a"), "--quiet"]).exit_code == 0
    (page,) = (tmp_path / "a").glob("sweep-*.md")

    line = next(line for line in page.read_text().splitlines() if line.startswith("    fedpews "))
    again = CliRunner().invoke(app, [*shlex.split(line)[1:], "--out", str(tmp_path / "b"), "--quiet"])

    assert again.exit_code == 0, again.output
    assert shlex.split(line)[1:] == command


def test_an_unknown_study_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match="table1"):
        load_study("tabel1")


def test_a_table_in_markdown() -> None:
    assert markdown([["a", "b"], ["1", "x|y"]]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"


def test_an_unknown_kind_of_figure_is_found_when_the_study_is_read(tmp_path: Path) -> None:
    file = tmp_path / "odd.toml"
    file.write_text(
        'item = "x"\ntitle = "x"\nbase = "synthetic-32k"\nrows.a.label = "a"\ncolumns.b.label = "b"\n'
        'figures = [{ kind = "pie" }]\n'
    )

    with pytest.raises(ConfigError, match="pie"):
        load_study(str(file))
    assert Figure().kind == "curves"


def test_seeds_go_over_several_draws_of_the_data(tmp_path: Path) -> None:
    small = study(columns={"a": Line(set=TINY)}, paper={}, seeds=[0, 1, 2, 3], draws=3)

    outcome = run_study(small, Runner(tmp_path))

    folders = sorted(path.name for path in (tmp_path / "runs").glob("*fedavg-*/*"))
    assert folders == ["draw-0-seeds-0-3", "draw-1-seeds-1", "draw-2-seeds-2"]
    assert list(outcome.table["fedavg", "a"].runs) == [0, 1, 2, 3]
    draws = [
        Experiment.load(path).data.seed
        for path in sorted((tmp_path / "runs").glob("*fedavg-*/*/config.toml"))
    ]
    assert draws == [0, 1, 2]


def test_an_index_over_a_file_that_is_none_of_ours_names_it(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"name": "other"}')

    with pytest.raises(ConfigError, match=r"other\.json is damaged"):
        write_index(tmp_path)


def test_only_the_cells_asked_for_are_run_in_their_order(tmp_path: Path) -> None:
    lines: list[str] = []
    outcome = run_study(study(), Runner(tmp_path, log=lines.append), only="pews:b,fedavg:a")
    assert [text.partition(": ")[2].partition(", 2")[0] for text in lines][:2] == [
        "PeWS, B, 3 rounds",
        "FedAvg, A",
    ]
    assert outcome.table["fedavg", "b"].status == "not run"
    with pytest.raises(ConfigError, match="has no such cell; it has fedavg:a, pews:a"):
        run_study(study(), Runner(tmp_path), only="fedavg:z")


def test_a_column_alone_stands_for_all_its_cells(tmp_path: Path) -> None:
    outcome = run_study(study(), Runner(tmp_path), only=":a")
    statuses = {cell: result.status for cell, result in outcome.table.items()}
    assert {row: statuses[row, "a"] for row in ("fedavg", "pews")} == {"fedavg": "done", "pews": "done"}
    assert {statuses["fedavg", "b"], statuses["pews", "b"]} == {"not run"}


def test_fixed_masks_that_zero_what_is_unowned_or_are_evaluated_whole_are_cells_of_their_own() -> None:
    study = load_study("calibration-images")
    names = {(cell.row, cell.column): cell.name for cell in cells(study)}
    fixed = [names[row, "f128"] for row in ("fixed", "fixed-all", "fixed-zero")]
    assert len(set(fixed)) == 3


def test_the_small_version_has_its_own_name_seeds_cells_and_page(tmp_path: Path) -> None:
    toy = study(
        columns={"a": Line(set=TINY), "b": Line(set=TINY)},
        paper={"final": {"fedavg": ["1", "2"], "pews": ["3", "4"]}},
        small=Small(
            seeds=[0], set={"train.lr": 0.5}, columns={"b": {"train.lr": 0.25}}, cells="fedavg,pews:b"
        ),
    )
    small = adapted(toy, None, {}, small=True)

    assert (small.name, small.seeds, small.command) == ("toy-small", [0], "fedpews reproduce toy --small")
    assert [(c.row, c.column, c.experiment.train.lr) for c in cells(small)] == [
        ("fedavg", "a", 0.5),
        ("fedavg", "b", 0.25),
        ("pews", "b", 0.25),
    ]
    assert small.paper_number("final", "pews", "b") == "4"
    assert small.scale == ["changed (--small): train.lr = 0.5", "changed in b: train.lr = 0.25"]
    assert adapted(study(), None, {}, small=True).name == "toy"  # no small version


def test_small_runs_the_cells_of_the_small_version(tmp_path: Path) -> None:
    (outcome,) = reproduce("sota", Runner(tmp_path), small=True, run=False)
    assert outcome.study.name == "sota-small"
    data = {cell.experiment.data.name for cell in cells(outcome.study)}
    assert data == {"cifar-mnist", "pathmnist+octmnist+bloodmnist"}
