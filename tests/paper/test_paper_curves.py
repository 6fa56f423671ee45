"""The paper's curves as numbers: shipped, drawn beside ours, compared with ours."""

from __future__ import annotations

import math

import pytest

from fedpews.paper.figures import curve_of, distance, paper_curves, plot_paper
from fedpews.paper.study import load_study, studies
from fedpews.report.plots import new_figure, plot_curves


def records(*accuracies: float) -> list[dict[str, object]]:
    return [
        {"seed": 0, "round": round, "accuracy": accuracy, "phase": "train"}
        for round, accuracy in enumerate(accuracies, 1)
    ]


def test_every_curve_has_rising_rounds_and_percentages() -> None:
    for figure in paper_curves().values():
        for rounds, values in figure.values():
            assert len(rounds) == len(values) > 10
            assert rounds == sorted(set(rounds))
            # read off a picture, so a little beyond 100 is possible
            assert all(0 <= value < 101 for value in values)


def test_what_a_study_says_is_drawn_exists() -> None:
    for name in studies():
        study = load_study(name)
        for column, line in study.columns.items():
            assert line.drawn is None or line.drawn in paper_curves(), (name, column)
        shown = {row.drawn for row in study.rows.values() if row.drawn}
        known = {m for c in study.columns.values() for m in paper_curves().get(c.drawn or "", {})}
        assert shown <= known, name


def test_the_distance_is_over_the_rounds_that_both_have() -> None:
    # ours 50 and 60 % at rounds 1 and 2, theirs 53 and 56 at 1 and 2, and 90 at 9: √((3² + 4²)/2)
    assert distance(records(0.5, 0.6), ([1, 2, 9], [53.0, 56.0, 90.0])) == pytest.approx(math.sqrt(12.5))


def test_a_papers_curve_takes_the_colour_of_the_first_row_it_belongs_to() -> None:
    study = load_study("calibration")
    assert curve_of(study, "pews", "four") == curve_of(study, "lower", "four")
    axes = new_figure(4, 3).subplots()
    rows = ["pews", "lower"]
    plot_curves(axes, {study.row_label(row): records(0.5, 0.6) for row in rows})
    plot_paper(axes, study, "four", rows)
    ours, _, theirs = axes.get_lines()
    assert theirs.get_label() == "the paper: FedPeWS"
    assert theirs.get_color() == ours.get_color()
