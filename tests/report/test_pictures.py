"""Figures and the HTML page, from records made by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedpews.experiment import Experiment
from fedpews.report.curves import curve, draw_curves, new_figure, plot_curves
from fedpews.report.heatmap import plot_heatmap
from fedpews.report.html import write_report
from fedpews.report.split import draw_split
from fedpews.running import run


def record(seed: int, round: int, accuracy: float, clients: int = 2) -> dict[str, Any]:
    return {
        "seed": seed,
        "round": round,
        "phase": "warmup" if round == 1 else "train",
        "accuracy": accuracy,
        "client_accuracy": [accuracy] * clients,
    }


def test_a_curve_is_the_mean_over_the_seeds_that_all_have_the_round() -> None:
    records = [record(0, 1, 0.2), record(0, 2, 0.4), record(0, 3, 0.9), record(1, 1, 0.4), record(1, 2, 0.6)]

    rounds, mean, spread = curve(records)

    assert rounds == [1, 2]
    assert mean == pytest.approx([30, 50])
    assert spread == pytest.approx([10, 10])


def test_a_smoothed_curve_is_a_running_mean() -> None:
    axes = new_figure(4, 3).subplots()

    plot_curves(axes, {"a": [record(0, t, t / 10) for t in range(1, 4)]}, smooth=2)

    assert axes.lines[0].get_ydata() == pytest.approx([10, 15, 25])


def test_the_end_of_the_warmup_and_the_target_are_marked() -> None:
    figure = draw_curves({"a": [record(0, 1, 0.1), record(0, 2, 0.2)]}, target=0.5)

    lines = figure.axes[0].lines
    assert [list(line.get_xdata()) for line in lines[1:]] == [[1, 1], [0, 1]]
    assert lines[2].get_ydata() == [50, 50]


def test_dots_of_a_split_have_the_area_of_the_count() -> None:
    figure = draw_split([[400, 100, 0], [0, 0, 200]])

    (dots,) = figure.axes[0].collections
    assert dots.get_offsets().tolist() == [[0, 0], [0, 1], [1, 2]]
    sizes = dots.get_sizes()
    assert sizes[0] / sizes[1] == pytest.approx(4)
    assert sizes[0] / sizes[2] == pytest.approx(2)


def test_a_heat_map_writes_every_known_number_and_leaves_holes() -> None:
    axes = new_figure(4, 3).subplots()

    plot_heatmap(axes, [[71.23, math.nan], [75.0, 72.0]], ["a", "b"], ["x", "y"])

    assert [text.get_text() for text in axes.texts] == ["71.2", "75.0", "72.0"]


def test_a_report_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    for method in ("fedavg", "fedavg+pews"):
        experiment = Experiment(
            rounds=3,
            seeds=[0, 1],
            method={"name": method},
            warmup={"rounds": 1},
            train={"steps": 1},
            data={"train_per_class": 4, "test_per_class": 2},
            model={"hidden": [4, 4]},
            runtime={"engine": "eager"},
        )
        run(experiment, out=tmp_path / method)

    page = write_report([tmp_path], tmp_path / "report.html").read_text()

    assert page.count("<svg") == 10  # accuracy, 2 losses, 2 of clients, 3 of masks, owners, bytes
    assert "http" not in page.replace("http://www.w3.org", "")  # XML names, never fetched
    assert (
        '<tr class="differs"><td><code>method.name</code></td><td>fedavg</td><td>fedavg+pews</td></tr>'
        in page
    )
    assert "fedavg+pews reaches 99 %" in page


def test_a_run_without_warmup_says_so(tmp_path: Path) -> None:
    experiment = Experiment(
        rounds=1,
        method={"name": "fedavg"},
        train={"steps": 1},
        data={"train_per_class": 4, "test_per_class": 2},
        runtime={"engine": "eager"},
    )
    run(experiment, out=tmp_path)

    assert "No warmup" in write_report([tmp_path], tmp_path / "report.html").read_text()
