"""`fedpews stats` and `fedpews flower stats`: how different the clients' data are, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpews.cli.data import print_table
from fedpews.cli.flower import Folder, ReadApp, ServerTest, flower, follow
from fedpews.cli.options import Config, DataDir, Set, parse_settings, say
from fedpews.flower import check_flwr

if TYPE_CHECKING:
    from fedpews.data.statistics import Statistics

PAGE = "statistics.html"


def stats(
    config: Config,
    page: Annotated[Path, typer.Option("--out", help="Output file.")] = Path(PAGE),
    data_dir: DataDir = None,
    set_: Set = None,
) -> None:
    """Compare the clients' data before training: classes, inputs, distances, advice.

    It uses only what real sites would send. data.min_count and data.count_noise
    suppress small counts.
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
    run_folder: Annotated[Path, typer.Option("--out", help="Folder for statistics.json and the page.")],
    test: ServerTest = None,
    data_dir: DataDir = None,
) -> None:
    """Compare the data of the approved sites from sums over their training samples."""
    check_flwr("fedpews flower stats")
    from fedpews.flower.statistics import read_statistics

    follow(folder, app, run_folder, {"stats": True}, test, data_dir)
    show(read_statistics(run_folder), run_folder / PAGE)


def show(statistics: Statistics, page: Path) -> None:
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

    print_table(site_rows(statistics), "Sites", ("samples", "classes", "bytes sent"))
    features = feature_rows(statistics)
    print_table(features[:21], "Mean ± deviation", features[0][1:])
    if len(features) > 21:
        say(f"and {len(features) - 21} more features, in the page")
    names = list(statistics.sites)
    for kind, matrix in (("labels", label_distances(statistics)), ("inputs", input_distances(statistics))):
        if matrix is not None and len(matrix) > 1:
            title = f"Distances of {kind} (0 the same, 1 nothing in common)"
            print_table(distance_rows(matrix, names), title, names)
    say(" ".join(advise(statistics)))
    say(f"look at {write_page(statistics, page)}")
