"""Studies: cells on disk, verdicts with hand numbers, pages, sweeps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedpews.cli import app
from fedpews.errors import ConfigError, Interrupted
from fedpews.experiment import Experiment
from fedpews.studies import cells as cells_module
from fedpews.studies.activations import layer_sums, own_share
from fedpews.studies.cells import read_cell, run_cell
from fedpews.studies.measures import MEASURES, spread
from fedpews.studies.page import conclude, markdown, write_index, write_page
from fedpews.studies.plan import plan
from fedpews.studies.reproduce import reproduce, run_study
from fedpews.studies.study import (
    Cell,
    Claim,
    Figure,
    Line,
    Quick,
    Scale,
    Study,
    canonical,
    cells,
    load_study,
    scaled,
    used,
)
from fedpews.studies.sweep import make_sweep, parse_grid
from fedpews.studies.verdicts import judge

TINY = {
    "rounds": 2,
    "train": {"steps": 1},
    "data": {"train_per_class": 4, "test_per_class": 2},
    "model": {"hidden": [4, 4]},
    "warmup": {"rounds": 1},
    "runtime": {"engine": "eager"},
}


@pytest.fixture(autouse=True)
def _no_html(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of single runs have tests of their own, and take most of a tiny run's time."""
    monkeypatch.setattr("fedpews.report.html.write_report", lambda folders, path: path)


def study(**changes: Any) -> Study:
    values: dict[str, Any] = {
        "name": "toy",
        "item": "Table 0",
        "title": "a toy",
        "base": "synthetic-32k",
        "seeds": [0, 1],
        "measures": ["final", "rounds"],
        "rows": {
            "fedavg": Line(label="FedAvg", set={"method": {"name": "fedavg"}}),
            "pews": Line(label="PeWS", set={"method": {"name": "fedavg+pews"}}),
        },
        "columns": {"a": Line(label="A", set=TINY), "b": Line(label="B", set=TINY | {"rounds": 3})},
        "paper": {"final": {"fedavg": ["70 ± 1", "60"], "pews": ["75 ± 2", "66"]}},
        "claims": [Claim(text="higher", rows=["pews"], than="fedavg")],
    }
    return Study(**(values | changes))


# ---- verdicts, by hand


@pytest.mark.parametrize(
    ("gains", "by", "outcome"),
    [
        ([1.0, -1.0, 6.0, 2.0], 0.0, "holds"),  # 3 of 4, mean +2
        ([1.0, -1.0, 6.0], 0.0, "unclear"),  # 2 of 3, mean +2
        ([1.0, 1.0, -9.0], 0.0, "does not hold"),  # 2 of 3, but the mean is against it
        ([1.0, 2.0, 3.0], 5.0, "does not hold"),  # all of them, but less than it speaks of
        ([-1.0, -2.0], 0.0, "does not hold"),
        ([1.0, -2.0], 0.0, "tied"),
    ],
)
def test_a_claim_holds_when_three_quarters_of_the_paired_seeds_and_the_mean_are_for_it(
    gains: list[float], by: float, outcome: str
) -> None:
    claim = Claim(text="higher", rows=["pews"], than="fedavg", columns=["a"], by=by)
    readings = {
        ("final", "fedavg", "a"): dict.fromkeys(range(len(gains)), 70.0),
        ("final", "pews", "a"): {
            **{seed: 70.0 + gain for seed, gain in enumerate(gains)},
            99: 1.0,
        },  # no partner
    }

    (verdict,) = judge(study(claims=[claim]), readings)

    assert verdict.outcome == outcome
    assert verdict.pairs == len(gains)
    assert verdict.paper == "+5.00 points"  # 75 − 70


@pytest.mark.parametrize(
    ("mine", "other", "outcome", "ours"),
    [
        ([100.0, 90.0], [120.0, 130.0], "holds", "30.0 rounds less"),  # (20 + 40) / 2
        ([100.0, 90.0], [math.inf, math.inf], "holds", "only it arrives"),
        ([100.0, 90.0], [120.0, math.inf], "holds", "20.0 rounds less; only it arrives in 1 seed"),
        ([math.inf, math.inf], [math.inf, math.inf], "tied", "neither arrives"),
        ([120.0, 90.0], [100.0, 110.0], "tied", "0.0 rounds less"),
        ([math.inf, 150.0], [100.0, 110.0], "does not hold", "40.0 rounds more; only the other in 1 seed"),
    ],
)
def test_fewer_rounds_are_better_and_never_arriving_is_worst(
    mine: list[float], other: list[float], outcome: str, ours: str
) -> None:
    claim = Claim(text="faster", rows=["pews"], than="fedavg", measure="rounds", columns=["a"])
    readings = {
        ("rounds", "pews", "a"): dict(enumerate(mine)),
        ("rounds", "fedavg", "a"): dict(enumerate(other)),
    }

    (verdict,) = judge(study(claims=[claim]), readings)

    assert (verdict.outcome, verdict.ours) == (outcome, ours)


def test_near_asks_for_a_small_mean_difference() -> None:
    claim = Claim(text="same", kind="near", rows=["pews"], than="fedavg", columns=["a"], within=1.0)
    close = {("final", "pews", "a"): {0: 71.0, 1: 69.5}, ("final", "fedavg", "a"): {0: 70.0, 1: 70.0}}
    far = {("final", "pews", "a"): {0: 73.0, 1: 69.5}, ("final", "fedavg", "a"): {0: 70.0, 1: 70.0}}

    assert judge(study(claims=[claim]), close)[0].outcome == "holds"  # mean +0.25
    assert judge(study(claims=[claim]), far)[0].outcome == "does not hold"  # mean +1.25


def test_shrinks_compares_the_gain_in_the_first_column_with_the_last() -> None:
    claim = Claim(text="shrinks", kind="shrinks", rows=["pews"], than="fedavg")
    readings = {
        ("final", "pews", "a"): {0: 75.0, 1: 75.0},
        ("final", "fedavg", "a"): {0: 70.0, 1: 70.0},
        ("final", "pews", "b"): {0: 81.0, 1: 81.0},
        ("final", "fedavg", "b"): {0: 80.0, 1: 80.0},
    }

    (verdict,) = judge(study(claims=[claim]), readings)

    assert (verdict.outcome, verdict.ours) == ("holds", "+5.00 points → +1.00 points")


def test_between_looks_at_the_mean() -> None:
    claim = Claim(text="fails", kind="between", rows=["fedavg"], columns=["a"], low=0, high=75)

    assert judge(study(claims=[claim]), {("final", "fedavg", "a"): {0: 70.0, 1: 78.0}})[0].outcome == "holds"


def test_a_row_with_one_column_is_compared_in_every_column() -> None:
    rows = dict(study().rows)
    rows["fedavg"] = rows["fedavg"].model_copy(update={"columns": ["a"]})
    readings = {
        ("final", "fedavg", "a"): {0: 70.0},
        ("final", "pews", "a"): {0: 71.0},
        ("final", "pews", "b"): {0: 69.0},
    }

    verdicts = judge(study(rows=rows, paper={}), readings)

    assert [verdict.outcome for verdict in verdicts] == ["one seed for it", "one seed against it"]


# ---- measures, by hand


def records(accuracies: list[float], warm: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "seed": 0,
            "round": t,
            "accuracy": accuracy,
            "seconds": 3.0 if t <= warm else 2.0,
            "phase": "warmup" if t <= warm else "train",
            "density": 0.4,
            **({"client_density": [0.3, 0.5]} if t <= warm else {}),
            "bytes_up": 50 if t <= warm else 100,
        }
        for t, accuracy in enumerate(accuracies, 1)
    ]


def test_measures_of_a_run() -> None:
    run = records([0.2, 0.5, 0.9, 0.8, 0.7], warm=2)

    read = {
        name: measure.read(run, 0.75)
        for name, measure in MEASURES.items()
        if name not in ("own_share", "coverage")
    }

    assert read["final"] == pytest.approx(70)
    assert read["best"] == pytest.approx(90)
    assert read["late"] == pytest.approx(70)  # a tenth of five rounds is the last one
    assert MEASURES["late"].read(records([0.0] * 18 + [0.4, 0.6]), 0.75) == pytest.approx(50)
    assert read["first_share"] == pytest.approx(37.5)  # 0.3 / (0.3 + 0.5)
    assert read["rounds"] == 3
    assert read["seconds"] == 8  # 3 + 3 + 2
    assert read["omega"] == 1.5  # 3 / 2
    assert read["density"] == pytest.approx(0.4)
    assert read["upload"] == 0.5
    assert MEASURES["rounds"].read(run, 0.95) == math.inf
    assert math.isnan(MEASURES["omega"].read(records([0.1], warm=0), 0.5))


def test_a_spread_counts_the_seeds_that_did_not_arrive() -> None:
    assert spread([100.0, 120.0, math.inf], 1) == "110.0 ± 14.1 (2 of 3 seeds)"  # √(2·10²/1) = 14.14


# ---- activations


def test_layer_sums_are_what_the_next_layer_reads() -> None:
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
    params = {name: value.detach() for name, value in model.named_parameters()}
    params["0.weight"] = torch.tensor([[1.0], [-1.0]])

    (sums,) = layer_sums(model, params, torch.tensor([[2.0], [3.0], [-1.0]]))

    assert sums.tolist() == [5.0, 1.0]  # relu(x), relu(−x) summed over 2, 3, −1


def test_a_closed_part_neither_fires_nor_feeds_the_next_layer() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(2, 2, bias=False), nn.ReLU())))
    ones = {name: torch.ones(2, 2) for name, _ in model.named_parameters()}

    first, second = layer_sums(model, ones, torch.tensor([[1.0, 2.0]]), part=(0, 2))

    assert first.tolist() == [3.0, 0.0]
    assert second.tolist() == [3.0, 0.0]  # 3 + 0, not 3 + 3


def test_own_share_is_the_part_of_the_activation_in_a_clients_own_half() -> None:
    first, second = [torch.tensor([3.0, 1.0])], [torch.tensor([1.0, 1.0])]

    assert own_share([first, second]) == pytest.approx((0.75 + 0.5) / 2)


# ---- cells on disk


def test_a_finished_cell_is_not_run_twice_and_more_seeds_run_only_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[list[int]] = []
    real = cells_module._run

    def count(folder: Path, cell: Cell, *rest: Any) -> None:
        runs.append(cell.experiment.seeds)
        real(folder, cell, *rest)

    monkeypatch.setattr(cells_module, "_run", count)
    small = study(columns={"a": Line(set=TINY)}, paper={})
    run_study(small, tmp_path)
    run_study(small, tmp_path)
    assert runs == [[0, 1], [0, 1]]  # two cells, once each

    run_study(small.model_copy(update={"seeds": [0, 1, 2]}), tmp_path)

    assert runs[2:] == [[2], [2]]
    assert len(list((tmp_path / "runs").glob("*/*/summary.json"))) == 4


def test_a_stopped_cell_goes_on(tmp_path: Path) -> None:
    (cell,) = cells(
        study(columns={"a": Line(set=TINY)}, rows={"fedavg": study().rows["fedavg"]}, paper={}, claims=[])
    )
    run_cell(tmp_path, cell, None)
    (folder,) = (tmp_path / "runs").glob("*/*")
    whole = (folder / "rounds.jsonl").read_text()
    (folder / "summary.json").unlink()  # as if killed before the end
    assert read_cell(tmp_path, cell).status == "not run"

    assert run_cell(tmp_path, cell, None).status == "done"
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

    outcome = run_study(study(columns=columns, paper={}), tmp_path)

    statuses = {place: found.status for place, found in outcome.table.items()}
    assert statuses["fedavg", "missing"] == "data missing"
    assert "cifar" in outcome.table["fedavg", "missing"].message
    assert statuses["fedavg", "failing"] == "failed"
    assert statuses["fedavg", "good"] == statuses["pews", "good"] == "done"
    page = write_page(outcome, tmp_path).read_text()
    assert "data missing" in page


def test_an_interruption_ends_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise Interrupted("stopped")

    monkeypatch.setattr(cells_module, "_run", stop)
    command = ["reproduce", "table1", "--quick", "--out", str(tmp_path)]

    with pytest.raises(Interrupted):
        run_study(study(), tmp_path)
    answer = CliRunner().invoke(app, command)

    assert answer.exit_code == 130
    assert "the same command goes on" in answer.output


def test_equal_experiments_are_the_same_cell() -> None:
    plain = Experiment(method={"name": "fedavg"}, warmup={"diversity": 3.0, "fraction": 0.5})
    assert canonical(plain) == canonical(Experiment(method={"name": "fedavg"}))

    tau = Experiment(rounds=200, warmup={"fraction": 0.125})
    assert canonical(tau) == canonical(Experiment(rounds=200, warmup={"rounds": 25}))

    names = {Cell("r", "c", plain.model_copy(update={"seeds": seeds})).name for seeds in ([0], [1, 2])}
    assert len(names) == 1


def test_what_is_not_there_yet_is_shown_without_running(tmp_path: Path) -> None:
    (outcome,) = reproduce("table1", tmp_path, Scale(quick=True), run=False)

    assert not (tmp_path / "runs").exists()
    text = (tmp_path / "table1.md").read_text()
    assert "not run" in text
    assert "Not at the paper's scale" in text
    assert outcome.command == "fedpews reproduce table1 --quick"


# ---- scale, pages, sweep, plan


def test_quick_keeps_the_papers_numbers_beside_their_cells() -> None:
    quick = scaled(study(quick=Quick(columns=["b"], seeds=[0])), Scale(quick=True))

    assert quick.paper_number("final", "pews", "b") == "66"
    assert quick.seeds == [0]
    assert [claim.text for claim in quick.claims] == ["higher"]


def test_a_stand_in_replaces_a_data_set_and_is_said() -> None:
    scale = Scale(stand_in={"synthetic-32k": "synthetic-3.2k"})

    assert {cell.experiment.data.name for cell in cells(study(), scale)} == {"synthetic-3.2k"}
    assert scale.describe(study()) == ["synthetic-3.2k stands in for synthetic-32k"]
    assert used(study(), scale) == scale
    assert used(study(), Scale(stand_in={"cifar-mnist": "mnist"})).stand_in is None


def test_the_page_shows_both_numbers_and_the_index_sums_the_claims(tmp_path: Path) -> None:
    toy = study()
    outcome = run_study(toy, tmp_path, data_dir=None)

    text = write_page(outcome, tmp_path).read_text()

    assert "[75 ± 2]" in text
    assert (tmp_path / "toy.png").exists()
    facts = json.loads((tmp_path / "toy.json").read_text())
    assert facts["cells"] == "4 of 4"
    index = write_index(tmp_path).read_text()
    assert "| higher | Table 0 | +5.00 points / +6.00 points |" in index
    assert "`fedpews reproduce toy`" in index


def test_notes_beside_a_page_become_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "toy.notes.md").write_text("It is the seeds.")

    page = write_page(conclude(study(), Scale(), []), tmp_path)

    assert "It is the seeds." in page.read_text()


def test_a_sweep_is_a_table_of_all_combinations(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(Experiment(**TINY, method={"name": "fedavg+pews"}).to_toml())
    grid = dict(parse_grid(text) for text in ("warmup.diversity=0.5,5", "train.lr=0.01,0.1"))

    outcome = run_study(make_sweep(str(config), grid), tmp_path)

    assert len(outcome.table) == 4
    assert all(found.status == "done" for found in outcome.table.values())
    rates = {cell.experiment.train.lr for cell in cells(outcome.study)}
    assert rates == {0.01, 0.1}
    assert write_page(outcome, tmp_path).exists()


@pytest.mark.parametrize("text", ["", "train.lr", "=1,2", "train.lr="])
def test_a_grid_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse_grid(text)


def test_a_plan_tells_what_is_left_and_about_how_long(tmp_path: Path) -> None:
    small = study(columns={"a": Line(set=TINY)}, paper={})
    done, *_ = cells(small)
    run_cell(tmp_path, done, None)

    first, second = plan(small, tmp_path)

    assert (first.missing, first.seconds) == ((), 0.0)
    assert second.missing == (0, 1)
    assert second.seconds is not None
    assert 0 < second.seconds < 60


def test_the_sweep_command_names_the_highest(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(Experiment(**TINY, method={"name": "fedavg+pews"}).to_toml())
    command = ["sweep", str(config), "--grid", "train.lr=0.01,0.1", "--out", str(tmp_path), "--quiet"]

    answer = CliRunner().invoke(app, command)

    assert answer.exit_code == 0, answer.output
    assert "highest: train.lr = 0.1" in answer.output or "highest: train.lr = 0.01" in answer.output


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
