"""What a study's figures show, and in which colours."""

from __future__ import annotations

from pathlib import Path

from fedpews.paper.cells import Runner
from fedpews.paper.figures import draw
from fedpews.paper.page import write_page
from fedpews.paper.reproduce import run_study
from fedpews.paper.study import Figure, Line, Quick, Scale, scaled
from fedpews.report.style import PALETTE, USUAL
from toy import TINY, study


def test_a_figure_of_rows_that_have_not_run_is_neither_drawn_nor_linked(tmp_path: Path) -> None:
    toy = study(figures=[Figure(options={"rows": ["fedavg"]}), Figure(options={"rows": ["pews"]})])
    outcome = run_study(toy, Runner(tmp_path), only="fedavg")

    text = write_page(outcome, tmp_path).read_text()

    assert "](toy.png)" in text
    assert "toy-2.png" not in text
    assert not (tmp_path / "toy-2.png").exists()


def test_a_figure_names_rows_that_quick_leaves_out(tmp_path: Path) -> None:
    toy = study(figures=[Figure(options={"rows": ["pews", "fedavg"]})], quick=Quick(rows=["fedavg"]))
    scale = Scale(quick=True)
    outcome = run_study(scaled(toy, scale), Runner(tmp_path), scale)

    (figure,) = draw(outcome.study, outcome.table)

    assert {line.get_label() for line in figure.axes[0].get_lines()} >= {"FedAvg"}
    assert "PeWS" not in {line.get_label() for line in figure.axes[0].get_lines()}


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

    (figure,) = draw(toy, outcome.table)

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

    (figure,) = draw(many, run_study(many, Runner(tmp_path)).table)

    lines = [line for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")]
    assert [line.get_label() for line in lines] == [rows[row].label for row in named]
    assert len({line.get_color() for line in lines}) == len(named)
