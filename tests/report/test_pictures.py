"""Figures, from records made by hand and from small runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from page_runs import federation, tiny

from command_line import fedpews
from fedpews.report.collect import collect
from fedpews.report.figures import draw, draw_split
from fedpews.report.plots import colors, curve, new_figure, plot_curves, plot_heatmap
from fedpews.report.runs import find_runs
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


def test_the_end_of_the_warmup_and_the_target_are_marked() -> None:
    axes = new_figure(4, 3).subplots()

    plot_curves(axes, {"a": [record(0, 1, 0.1), record(0, 2, 0.2)]}, target=0.5)

    lines = axes.lines
    assert [list(line.get_xdata()) for line in lines[1:]] == [[1, 1], [0, 1]]
    assert lines[2].get_ydata() == [50, 50]


def test_a_band_of_accuracy_stays_between_0_and_100() -> None:
    axes = new_figure(4, 3).subplots()

    # in round 2 mean 50 and standard deviation 50, in round 1 mean 55 and deviation 45
    plot_curves(axes, {"a": [record(0, 1, 0.1), record(1, 1, 1.0), record(0, 2, 0.0), record(1, 2, 1.0)]})

    corners = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert 0 <= corners.min() <= corners.max() <= 100


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


KINDS = ("curves", "bytes", "masks", "clients")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_runs_give_the_same_figure_to_the_byte(kind: str, runs_folder: Path, tmp_path: Path) -> None:
    written = []
    for name in ("a.svg", "b.svg"):
        done = fedpews("plot", str(runs_folder), "--kind", kind, "--out", str(tmp_path / name))
        assert done.code == 0, done.stderr
        written.append((tmp_path / name).read_bytes())

    assert written[0] == written[1]
    assert b"<svg" in written[0]


@pytest.mark.parametrize(("format", "start"), [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_figure_has_the_format_asked_for(
    format: str, start: bytes, runs_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "figure"

    done = fedpews("plot", str(runs_folder), "--format", format, "--out", str(path))

    assert done.code == 0, done.stderr
    assert path.read_bytes().startswith(start)


def test_masks_are_drawn_without_interpolation_one_cell_for_each_neuron(runs_folder: Path) -> None:
    figure = draw(find_runs([runs_folder]), "masks")

    (image,) = figure.axes[0].images
    assert image.get_interpolation() == "none"
    assert image.get_array().shape == (3, 11)  # three clients, 6 + 5 neurons
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["Oslo", "Lima", "Pune"]


def test_a_label_has_the_same_colour_in_every_figure_and_on_the_page(runs_folder: Path) -> None:
    runs = find_runs([runs_folder])
    page = {run["label"]: run["light"] for run in collect(runs)["runs"]}

    for kind in ("curves", "bytes", "clients"):
        axes = draw(runs, kind).axes[0]
        drawn = dict(
            zip(axes.get_legend_handles_labels()[1], axes.get_legend_handles_labels()[0], strict=True)
        )
        assert {label: line.get_color() for label, line in drawn.items()} == page


def test_a_method_keeps_its_colour_whoever_stands_beside_it() -> None:
    assert (
        colors(["fedavg", "fedavg+pews"])["fedavg+pews"] == colors(["x", "y", "fedavg+pews"])["fedavg+pews"]
    )
    assert len(set(colors(["a", "b", "fedavg", "fedavg+pews", "c"]).values())) == 5


def test_an_unknown_kind_names_those_there_are(runs_folder: Path) -> None:
    done = fedpews("plot", str(runs_folder), "--kind", "pie")

    assert done.code == 2
    assert ", ".join(KINDS) in done.stderr


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_result_draws_the_same_figures(kind: str, on_disk: bool, tmp_path: Path) -> None:
    result = run(tiny(seeds=[0]), clients=federation(), out=tmp_path / "run" if on_disk else None)

    figure = result.plot(tmp_path / "figure.png", kind=kind)

    assert figure.axes
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_dollar_signs_in_a_label_are_no_formula(tmp_path: Path) -> None:
    figure = new_figure(4, 3)
    plot_curves(figure.subplots(), {"$\\frac$": [record(0, 1, 0.5)]})

    figure.savefig(tmp_path / "figure.png")
