"""`fedpews stats` and `fedpews flower stats`: how different the clients' data are, before any training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedpews.cli.console import out
from fedpews.cli.flower import Folder, ReadApp, ServerTest, flower, follow
from fedpews.cli.options import Config, DataDir, Set, parse_settings, say
from fedpews.flower import check_flwr

if TYPE_CHECKING:
    from fedpews.data.statistics import Statistics

PAGE = "statistics.html"


def stats(
    config: Config,
    page: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path(PAGE),
    data_dir: DataDir = None,
    set_: Set = None,
) -> None:
    """Compare the clients' data before training: classes, inputs, distances and advice.

    Only what sites would send is used: data.min_count and data.count_noise say what is suppressed.
    """
    from fedpews.build import load_data
    from fedpews.data.statistics import Privacy, gather
    from fedpews.data.table import FEDERATED
    from fedpews.experiment import Experiment

    experiment = Experiment.load(config, parse_settings(set_))
    if experiment.data.scaling == FEDERATED:  # scaled values would hide how the clients differ
        plain = experiment.data.model_copy(update={"scaling": None})
        experiment = experiment.model_copy(update={"data": plain})
    data = load_data(experiment, data_dir=data_dir)
    show(gather(data, Privacy(experiment.data.min_count, experiment.data.count_noise)), page)


@flower.command("stats")
def flower_stats(
    folder: Folder,
    app: ReadApp,
    run_folder: Annotated[Path, typer.Option("--out", help="A folder for statistics.json and the page.")],
    test: ServerTest = None,
    data_dir: DataDir = None,
) -> None:
    """The same across the approved sites: each sends sums of its training samples, twice, and nothing else."""
    check_flwr("fedpews flower stats")
    from fedpews.flower.statistics import read_statistics

    follow(folder, app, run_folder, {"stats": True}, test, data_dir)
    show(read_statistics(run_folder), run_folder / PAGE)


def show(found: Statistics, page: Path) -> None:
    """Print the tables and write the page."""
    from fedpews.report.statistics import (
        advise,
        distance_rows,
        feature_rows,
        input_distances,
        label_distances,
        site_rows,
        write_page,
    )

    _grid("Sites", site_rows(found))
    _grid("Mean ± deviation", feature_rows(found)[:21])
    if len(found.features) > 20:
        out.print(f"and {len(found.features) - 20} more features, in the page")
    for title, matrix in (("labels", label_distances(found)), ("inputs", input_distances(found))):
        if matrix is not None and len(matrix) > 1:
            _grid(
                f"Distances of {title} (0 the same, 1 nothing in common)",
                distance_rows(matrix, [*found.sites]),
            )
    say(" ".join(advise(found)))
    say(f"look at {write_page(found, page)}")


def _grid(title: str, rows: Sequence[Sequence[str]]) -> None:
    grid = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(rows[0]):
        grid.add_column(escape(name), overflow="fold", justify="left" if number == 0 else "right")
    for row in rows[1:]:
        grid.add_row(*map(escape, row))
    out.print(grid)
