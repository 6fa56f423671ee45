"""`fedpews data` and `fedpews stats`: data sets on this machine, their partition, and how much clients differ."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpews.cli.console import out, print_table
from fedpews.cli.flower import Folder, ReadApp, ServerTest, flower, follow
from fedpews.cli.options import Config, DataDir, Set, parse_settings, say
from fedpews.errors import ConfigError
from fedpews.flower import check_flwr

if TYPE_CHECKING:
    from fedpews.data.catalogue import Status
    from fedpews.data.statistics import Statistics

SHOWN = 30
"""Clients that are listed, a line for each."""

NAMED = 12
"""Classes of a client that are shown by name."""

PAGE = "statistics.html"

data = typer.Typer(
    name="data",
    help="List and download data sets; show how they are partitioned.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@data.command()
def status(
    data_dir: DataDir = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also compare the files with the published checksums.")
    ] = False,
) -> None:
    """Show which data sets are on this machine; download nothing."""
    from fedpews.data import catalogue

    _print_status(catalogue.status(data_dir, check=check))
    paths = ", then ".join(map(str, catalogue.roots(data_dir)))
    say(f"searched {paths}")
    out.print("`fedpews data get NAME` downloads a missing data set; a run downloads it automatically.")


@data.command()
def get(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Data sets to download (fedpews list data).")
    ],
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder to download to.", show_default="the cache")
    ] = None,
) -> None:
    """Download missing data sets to the cache or another folder."""
    from fedpews.data import catalogue

    _print_status(catalogue.get(names, data_dir))


@data.command()
def show(
    config: Config,
    data_dir: DataDir = None,
    set_: Set = None,
    picture: Annotated[
        Path | None,
        typer.Option("--out", help="Also plot the classes of each client to this file (png, pdf, svg)."),
    ] = None,
) -> None:
    """Show the samples and classes of each client in this configuration."""
    from fedpews.build import load_data
    from fedpews.experiment import Experiment

    experiment = Experiment.load(config, parse_settings(set_))
    federation = load_data(experiment, data_dir=data_dir)
    counts: list[list[int]] = federation.counts().tolist()
    sizes = [sum(row) for row in counts]
    say(
        f"{federation.name}: {len(counts):,} clients, {sum(sizes):,} training and {len(federation.test_y):,} "
        f"test samples, {federation.outputs}, inputs {_shape(federation.shape)}"
    )
    by_class = federation.task.classes_of(federation.y) is not None
    rows = [["client", "samples", *(("classes", "which") if by_class else ())]]
    for name, row in list(zip(federation.names, counts, strict=True))[:SHOWN]:
        labels = [label for label, count in enumerate(row) if count]
        which = [str(len(labels)), _which(labels, federation.class_names)] if by_class else []
        rows.append([name, f"{sum(row):,}", *which])
    print_table(rows)
    if len(counts) > SHOWN:
        ordered = sorted(sizes)
        out.print(
            f"and {len(counts) - SHOWN:,} more; a client has {ordered[0]:,} to {ordered[-1]:,} samples, "
            f"half of them at least {ordered[len(ordered) // 2]:,}"
        )
    if picture is not None:
        from fedpews.report.figures import draw_split

        try:
            draw_split(counts, federation.class_names, federation.client_names, picture)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--out {picture}: the picture cannot be written: {error}") from error
        say(f"drawn to {picture}")


def _shape(shape: Any) -> str:
    """The shape of an input in words; of a tuple or dict, that of each entry.

    >>> _shape((3, 28, 28)), _shape({"ids": (12,), "mask": (12,)})
    ('3×28×28', 'ids 12, mask 12')
    """
    if isinstance(shape, dict):
        return ", ".join(f"{name} {_shape(inner)}" for name, inner in shape.items())
    if shape and isinstance(shape[0], tuple):
        return ", ".join(map(_shape, shape))
    return "×".join(map(str, shape))


def _print_status(entries: Sequence[Status]) -> None:
    rows = [["data set", "state", "MB", "where"]]
    for entry in entries:
        size = f"{entry.bytes / 1e6:.1f}" if entry.paths else ""
        where = commonpath([path.parent for path in entry.paths]) if entry.paths else ""
        if entry.published is not None:
            where += ", as published" if entry.published else ", not the published files"
        if entry.state == "incomplete":
            where += f", lacks {', '.join(entry.lacking)}"
        rows.append([entry.name, "made here" if entry.state == "made" else entry.state, size, where])
    print_table(rows)


def _which(labels: Sequence[int], names: Sequence[str]) -> str:
    """The classes of a client: their names, or their numbers where they have no other names."""
    if all(name.isdigit() for name in names):
        return _ranges(labels)
    more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
    return ", ".join(names[label] for label in labels[:NAMED]) + more


def _ranges(numbers: Sequence[int]) -> str:
    """Rising whole numbers in words, with ranges.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def stats(
    config: Config,
    page: Annotated[Path, typer.Option("--out", help="Output file.")] = Path(PAGE),
    data_dir: DataDir = None,
    set_: Set = None,
) -> None:
    """Compare the clients' data before training: classes, inputs, distances, advice.

    It uses only the sums that real sites would send. data.min_count suppresses small
    counts, and data.count_noise adds noise to counts.
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
    _show_statistics(gather(data, Privacy(experiment.data.min_count, experiment.data.count_noise)), page)


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
    _show_statistics(read_statistics(run_folder), run_folder / PAGE)


def _show_statistics(statistics: Statistics, page: Path) -> None:
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

    print_table(site_rows(statistics), "Sites")
    features = feature_rows(statistics)
    print_table(features[:21], "Mean ± deviation", features[0][1:])
    if len(features) > 21:
        say(f"and {len(features) - 21} more features on the page")
    names = list(statistics.sites)
    for kind, matrix in (("labels", label_distances(statistics)), ("inputs", input_distances(statistics))):
        if matrix is not None and len(matrix) > 1:
            title = f"Distances of {kind} (0: equal, 1: nothing in common)"
            print_table(distance_rows(matrix, names), title, names)
    say(" ".join(advise(statistics)))
    say(f"look at {write_page(statistics, page)}")
