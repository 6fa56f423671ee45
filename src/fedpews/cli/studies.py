"""The commands about studies: reproduce and plan; what they share with sweep. Heavy modules are imported when used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedpews.cli.console import err, out
from fedpews.cli.options import (
    DataDir,
    On,
    Quiet,
    Results,
    Seeds,
    parse_seeds,
    parse_settings,
    say,
    study_names,
)
from fedpews.cli.runs import progress
from fedpews.errors import ConfigError, Interrupted, RunFailed

if TYPE_CHECKING:
    from fedpews.callbacks import Callback
    from fedpews.experiment import Experiment
    from fedpews.paper.cells import Runner
    from fedpews.paper.claims import Verdict
    from fedpews.paper.cluster import Cluster
    from fedpews.paper.page import Outcome
    from fedpews.paper.plan import Planned
    from fedpews.paper.study import Scale, Study

Small = Annotated[
    bool, typer.Option("--small", help="The scaled-down version of studies that take days; its page says so.")
]
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
    small: Small = False,
    folder: Results = Path("results"),
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
            metavar="ROW[:COLUMN],...",
            help="Run only these cells, in this order; :COLUMN is a whole column. The page shows all.",
        ),
    ] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="--no-run: only show what is there.")] = True,
    on: On = None,
    quiet: Quiet = False,
) -> None:
    """Run a table or figure of the paper and compare our numbers with it.

    Runs what is missing: stop it at any moment and give the same command again. A finished cell is not run again,
    and studies share cells. Writes a Markdown page with the figures.
    """
    from fedpews.paper.reproduce import reproduce as reproduce_study

    failed, scale = 0, read_scale(small, seeds, set_, stand_in)
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
    small: Small = False,
    folder: Results = Path("results"),
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Set = None,
    stand_in: StandIn = None,
) -> None:
    """Estimate how long `reproduce` takes on this machine, from a short probe of each kind of run.

    Lists the cells first. Probes are kept in the --out folder (runs/probes.json): stop it at any moment.
    """
    from fedpews.paper.plan import plan as plan_study
    from fedpews.paper.reproduce import load_study
    from fedpews.paper.study import scaled, studies

    scale, runner = read_scale(small, seeds, set_, stand_in), make_runner(folder, data_dir, quiet=False)
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
    rows = [
        (
            study.label(line.cell),
            str(line.cell.experiment.rounds),
            ", ".join(map(str, line.missing)) or "none, finished",
            line.problem if line.seconds is None else f"{line.seconds / 60:.1f}",
        )
        for line in planned
    ]
    _print_table(f"{study.item}: {study.title}", [("cell", "rounds", "seeds to run", "minutes"), *rows])
    left = sum(line.seconds or 0.0 for line in planned)
    rounds = sum(line.cell.experiment.rounds * len(line.missing) for line in planned)
    out.print(escape(f"{study.name}: {rounds} rounds, about {_time(left)} on this machine"))


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def make_runner(folder: Path, data_dir: Path | None, quiet: bool) -> Runner:
    """Runs cells in this process, with a progress bar and a line for each cell."""
    from fedpews.paper.cells import Runner

    def log(text: str) -> None:
        if not quiet:
            err.print(escape(text), soft_wrap=True)

    def bar(experiment: Experiment) -> AbstractContextManager[Callback]:
        return progress(experiment, quiet, names_engine=False)

    return Runner(folder, data_dir=data_dir, progress=bar, log=log)


def show_outcome(outcome: Outcome, page: Path) -> None:
    from fedpews.paper.measures import MEASURES
    from fedpews.paper.page import number_rows

    study = outcome.study
    out.print(f"[bold]{escape(study.item)}: {escape(study.title)}[/]")
    for sentence in outcome.scale.describe(study):
        out.print(f"[yellow]not at the paper's scale:[/] {escape(sentence)}", soft_wrap=True)
    for measure in study.measures:
        brackets = "; in brackets the paper's" if study.paper.get(measure) else ""
        _print_table(f"{MEASURES[measure].label}{brackets}", number_rows(outcome, measure))
    for claim in dict.fromkeys(verdict.claim for verdict in outcome.verdicts):
        out.print(f"[bold]Claim:[/] {escape(claim)}", soft_wrap=True)
        for verdict in outcome.verdicts:
            if verdict.claim == claim:
                out.print(f"  {_sentence(verdict)}", soft_wrap=True)
    for result in outcome.table.values():
        if result.message:
            say(f"{study.label(result.cell)}: {result.status}: {result.message}")
    if page.exists():
        say(f"written to {page}")


def _sentence(verdict: Verdict) -> str:
    color = {True: "green", False: "red", None: "yellow"}[verdict.agrees]
    paper = f" (the paper: {verdict.paper})" if verdict.paper else ""
    p = "" if verdict.p is None else f", p = {verdict.p:.3f}"
    ours = f": {verdict.ours}{paper}, {verdict.seeds} seeds{p}" if verdict.seeds else paper
    return f"[{color}]{escape(verdict.finding)}[/]  {escape(verdict.where + ours)}"


def _print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text; the first one is the header."""
    grid = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for head in rows[0]:
        grid.add_column(escape(head), overflow="fold")
    for row in rows[1:]:
        grid.add_row(*map(escape, row))
    out.print(grid)


@contextmanager
def on_cluster(address: str | None) -> Iterator[Cluster | None]:
    """The cluster at an address; None without one."""
    if address is None:
        yield None
        return
    from fedpews.paper.cluster import connect

    with connect(address) as cluster:
        yield cluster


def count_failed(outcome: Outcome) -> int:
    """Cells that failed now, without those that are known to diverge from earlier runs."""
    return sum(
        result.status in ("failed", "diverged") and result.error != "" for result in outcome.table.values()
    )


def end(failed: int, what: str = "cells") -> None:
    """End the command with an error if anything failed: its page has gaps."""
    if failed:
        raise RunFailed(f"{failed} {what} failed" + "; the same command tries them again" * (what == "cells"))


@contextmanager
def resumable() -> Iterator[None]:
    """Say, when the command is stopped, that the same command resumes it."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        err.print("stopped; what is finished is kept, the same command goes on from here", soft_wrap=True)
        raise typer.Exit(130) from None


def read_scale(
    small: bool, seeds: str | None, settings: list[str] | None, stand_in: list[str] | None
) -> Scale:
    from fedpews.paper.study import Scale

    others: dict[str, str] = {}
    for text in stand_in or []:
        name, equals, other = text.partition("=")
        if not equals or not name or not other:
            raise ConfigError(f"--stand-in {text!r}: give it as DATA=OTHER")
        others[name] = other
    return Scale(
        small,
        None if seeds is None else tuple(parse_seeds(seeds)),
        parse_settings(settings) or None,
        others or None,
    )
