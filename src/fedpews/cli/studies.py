"""The commands about studies: reproduce and plan. Heavy modules are imported when used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedpews.cli.complete import study_names
from fedpews.cli.console import out
from fedpews.cli.options import DataDir, On, Quiet, Seeds
from fedpews.cli.outcomes import (
    count_failed,
    end,
    make_runner,
    on_cluster,
    read_scale,
    resumable,
    show_outcome,
)

if TYPE_CHECKING:
    from fedpews.paper.plan import Planned
    from fedpews.paper.study import Study

Out = Annotated[Path, typer.Option("--out", help="Where run folders and pages are kept.")]
Quick = Annotated[bool, typer.Option("--quick", help="A scaled-down version that still shows the effect.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key in every cell; the page says so."),
]
StandIn = Annotated[
    list[str] | None,
    typer.Option(metavar="DATA=OTHER", help="Use another data set where one is asked for; the page says so."),
]


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="A study (fedpews list studies), all, or a TOML file.", autocompletion=study_names
        ),
    ],
    quick: Quick = False,
    folder: Out = Path("results"),
    pages: Annotated[
        Path | None, typer.Option(help="Where pages are written.", show_default="the --out folder")
    ] = None,
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Set = None,
    stand_in: StandIn = None,
    cells: Annotated[
        str | None,
        typer.Option(
            metavar="ROW[:COLUMN],...", help="Run only these cells, in this order; the page shows all."
        ),
    ] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="--no-run: only show what is there.")] = True,
    on: On = None,
    quiet: Quiet = False,
) -> None:
    """Run a table or figure of the paper, and show our numbers beside its own.

    Runs what is missing: stop it at any moment and give the same command again. A finished cell is not run again,
    and studies share cells. Writes a Markdown page with the figures.
    """
    from fedpews.paper.reproduce import reproduce as reproduce_study

    failed, scale = 0, read_scale(quick, seeds, set_, stand_in)
    runner = make_runner(folder, data_dir, quiet)
    with resumable(), on_cluster(on if run else None) as cluster:
        for outcome in reproduce_study(
            name, runner, scale, pages=pages, only=cells, run=run, cluster=cluster
        ):
            show_outcome(outcome, (pages or folder) / f"{outcome.study.name}.md")
            failed += count_failed(outcome)
    end(failed)


def plan(
    name: Annotated[str, typer.Argument(help="A study, all, or a TOML file.", autocompletion=study_names)],
    quick: Quick = False,
    folder: Out = Path("results"),
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Set = None,
    stand_in: StandIn = None,
) -> None:
    """What `reproduce` would run and how long it would take here, from a short probe of each kind of run.

    Lists the cells first. Probes are kept in the --out folder (runs/probes.json): stop it at any moment.
    """
    from fedpews.paper.plan import plan as plan_study
    from fedpews.paper.reproduce import load_study
    from fedpews.paper.study import scaled, studies

    scale, runner = read_scale(quick, seeds, set_, stand_in), make_runner(folder, data_dir, quiet=False)
    total = 0.0
    with resumable():
        for each in list(studies()) if name == "all" else [name]:
            study = scaled(load_study(each), scale)
            planned: list[Planned] = []
            try:
                for line in plan_study(study, runner, scale):
                    planned.append(line)
            finally:
                # also what was measured before it was stopped
                _show_plan(study, planned)
            total += sum(line.seconds or 0.0 for line in planned)
    if name == "all":
        out.print(f"all: about {_time(total)}, less where studies share cells")


def _show_plan(study: Study, planned: list[Planned]) -> None:
    title = f"{study.item}: {study.title}"
    grid = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("cell", "rounds", "seeds to run", "minutes"):
        grid.add_column(column)
    for line in planned:
        cell = line.cell
        time = "" if line.seconds is None else f"{line.seconds / 60:.1f}"
        grid.add_row(
            escape(study.label(cell)),
            str(cell.experiment.rounds),
            ", ".join(map(str, line.missing)) or "none, finished",
            time or escape(line.problem),
        )
    out.print(grid)
    left = sum(line.seconds or 0.0 for line in planned)
    rounds = sum(line.cell.experiment.rounds * len(line.missing) for line in planned)
    out.print(escape(f"{study.name}: {rounds} rounds, about {_time(left)} on this machine"))


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


STUDIES = (reproduce, plan)
"""The commands of this file."""
