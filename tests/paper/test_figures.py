"""What a study's figures show, and in which colours."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from fedpews.errors import ConfigError
from fedpews.paper.cells import CellResult, Runner
from fedpews.paper.claims import Outcome
from fedpews.paper.figures import draw
from fedpews.paper.page import write_page
from fedpews.paper.reproduce import run_study
from fedpews.paper.study import Figure, Line, cells, load_study
from fedpews.report.plots import OUTCOMES, PALETTE, USUAL
from toy import TINY, study


def test_a_figure_of_rows_that_have_not_run_is_neither_drawn_nor_linked(tmp_path: Path) -> None:
    toy = study(figures=[Figure(options={"rows": ["fedavg"]}), Figure(options={"rows": ["pews"]})])
    outcome = run_study(toy, Runner(tmp_path), only="fedavg")

    text = write_page(outcome, tmp_path).read_text()

    assert "](toy.png)" in text
    assert "toy-2.png" not in text
    assert not (tmp_path / "toy-2.png").exists()


def test_a_row_has_one_colour_in_all_panels_and_a_usual_method_its_own(tmp_path: Path) -> None:
    rows = {
        "other": Line(
            label="SCAFFOLD, λ", set={"method": {"name": "scaffold"}, "train": {"lr": 0.5}}, columns=["a"]
        ),
        "late": Line(label="late", set={"method": {"name": "fedavg"}, "train": {"lr": 0.5}}),
        "second": Line(label="second", set={"method": {"name": "fedavg"}, "train": {"lr": 0.1}}),
    }
    toy = study(rows=rows, paper={}, claims=[], seeds=[0])
    outcome = run_study(toy, Runner(tmp_path))

    (figure,) = draw(outcome)

    first, second = (
        {line.get_label(): line.get_color() for line in axes.get_lines()} for axes in figure.axes
    )
    assert first["SCAFFOLD, λ"] == PALETTE[USUAL["scaffold"]].light
    # the first row of FedAvg has its colour, the second one of its own
    assert first["late"] == second["late"] == PALETTE[USUAL["fedavg"]].light
    assert first["second"] == second["second"]
    assert len({first[label] for label in ("SCAFFOLD, λ", "late", "second")}) == 3


def test_rows_of_one_figure_have_colours_of_their_own_also_where_a_study_has_more_rows_than_colours(
    tmp_path: Path,
) -> None:
    rates = [0.001 * (i + 1) for i in range(len(PALETTE) + 4)]
    rows = {f"r{i}": Line(label=f"lr {lr:.3f}", set={"train.lr": lr}) for i, lr in enumerate(rates)}
    named = list(rows)[:2] + list(rows)[-6:]
    many = study(rows=rows, columns={"a": Line(set=TINY)}, paper={}, claims=[], seeds=[0])
    many = many.model_copy(update={"figures": [Figure(options={"rows": named})]})

    (figure,) = draw(run_study(many, Runner(tmp_path)))

    lines = [line for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")]
    assert [line.get_label() for line in lines] == [rows[row].label for row in named]
    assert len({line.get_color() for line in lines}) == len(named)


def test_gains_are_blue_orange_or_grey_and_framed_over_the_best_of_a_column() -> None:
    rows = {
        name: Line(label=name, set={"train.lr": lr})
        for name, lr in zip("abcd", (0.1, 0.2, 0.3, 0.4), strict=True)
    }
    than = {"c": "a", "d": "b"}
    rows["e"] = Line(label="e", set={"train.lr": 0.5}, columns=["not run"])  # in no column that is drawn
    than["e"] = "e"
    columns = {
        name: Line(label=name, set=TINY | {"rounds": k})
        for k, name in enumerate(("not run", "up", "down", "even", "few"), 2)
    }
    toy = study(rows=rows, columns=columns, paper={}, claims=[], seeds=list(range(8)))
    toy = toy.model_copy(update={"figures": [Figure(kind="gains", options={"than": than})]})
    # c over a in each column; d gains nothing over b, which is better than a in the last two columns
    gain = {"up": 0.2, "down": -0.1, "even": 0.0, "few": 0.3}

    def accuracy(row: str, column: str, seed: int) -> float:
        noise = 0.01 * (-1) ** seed
        if row in "bd":
            return 0.5 + 0.2 * (column in ("even", "few"))
        return 0.6 + noise * seed + (gain[column] + noise if row == "c" else 0.0)

    results = {
        (cell.row, cell.column): CellResult(
            cell,
            {
                s: [{"accuracy": accuracy(cell.row, cell.column, s)}]
                for s in range(4 if cell.column == "few" else 8)
            },
            "done",
        )
        for cell in cells(toy)
        if cell.column != "not run"
    }
    (figure,) = draw(Outcome(toy, results))

    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["up", "down", "even", "few"]
    patches = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    fills = {
        (round(patch.get_x() + 0.5), round(patch.get_y() + 0.5)): to_hex(patch.get_facecolor())
        for patch in patches
        if patch.get_fill()
    }
    first = [fills[column, 0] for column in range(4)]
    assert first == [OUTCOMES["better"], OUTCOMES["worse"], OUTCOMES["undecided"], "#ffffff"]
    assert {fills[column, 1] for column in range(3)} == {OUTCOMES["undecided"]}
    framed = {(round(p.get_x() + 0.47), round(p.get_y() + 0.47)) for p in patches if not p.get_fill()}
    assert framed == {(0, 0), (1, 0), (2, 1), (3, 1)}
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "+20.0" in texts
    assert "-10.0" in texts


def test_a_figure_of_gains_names_rows_that_exist(tmp_path: Path) -> None:
    wrong = (
        'item = "i"\ntitle = "t"\nbase = "synthetic-32k"\n'
        'figures = [{ kind = "gains", options.than = { a = "b" } }]\n[rows.a]\n[columns.c]\n'
    )
    (tmp_path / "wrong.toml").write_text(wrong)
    with pytest.raises(ConfigError, match="names 'b', which is no row"):
        load_study(str(tmp_path / "wrong.toml"))
