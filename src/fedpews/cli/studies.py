"""The commands about studies: reproduce, plan, sweep. Everything heavy is imported when used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedpews.cli.complete import configs, study_names
from fedpews.cli.console import err, out
from fedpews.cli.options import DataDir, Quiet, Seeds, parse_seeds
from fedpews.errors import ConfigError, Interrupted

if TYPE_CHECKING:
    from fedpews.experiment import Experiment
    from fedpews.running import Watcher
    from fedpews.studies.page import Outcome
    from fedpews.studies.study import Scale
    from fedpews.studies.verdicts import Verdict

Out = Annotated[Path, typer.Option("--out", help="Where run folders and pages are kept.")]
Quick = Annotated[bool, typer.Option("--quick", help="A scaled-down version that still shows the effect.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key in every cell; said on the page."),
]
StandIn = Annotated[
    list[str] | None,
    typer.Option(metavar="DATA=OTHER", help="Use another data set where one is asked for; said on the page."),
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
    quiet: Quiet = False,
) -> None:
    """Run a table or figure of the paper, and show our numbers beside its own.

    Runs what is missing: stop it at any moment and give the same command again. A finished cell is not run twice,
    and studies share cells. Writes a Markdown page with the figures.
    """
    from fedpews.studies.reproduce import reproduce as reproduce_study

    outcomes = reproduce_study(
        name,
        folder,
        _scale(quick, seeds, set_, stand_in),
        pages=pages,
        only=cells,
        data_dir=data_dir,
        run=run,
        tell=lambda text: None if quiet else err.print(escape(text), soft_wrap=True),
        watch=lambda experiment: _watcher(experiment, quiet),
    )
    with _goes_on():
        for outcome in outcomes:
            _show(outcome, (pages or folder) / f"{outcome.study.name}.md")


def plan(
    name: Annotated[str, typer.Argument(help="A study, all, or a TOML file.", autocompletion=study_names)],
    quick: Quick = False,
    folder: Out = Path("results"),
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Set = None,
    stand_in: StandIn = None,
) -> None:
    """What `reproduce` would run and how long it would take here, from a short probe."""
    from fedpews.studies.plan import plan as plan_study
    from fedpews.studies.study import load_study, scaled, studies

    scale = _scale(quick, seeds, set_, stand_in)
    total = 0.0
    for one in list(studies()) if name == "all" else [name]:
        study = scaled(load_study(one), scale)
        planned = plan_study(
            study, folder, scale, data_dir, lambda text: err.print(escape(text), soft_wrap=True)
        )
        title = f"{study.item}: {study.title}"
        grid = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("cell", "rounds", "seeds to run", "minutes"):
            grid.add_column(column)
        for line in planned:
            cell = line.cell
            time = "" if line.seconds is None else f"{line.seconds / 60:.1f}"
            grid.add_row(
                f"{study.row_label(cell.row)}, {study.column_label(cell.column)}",
                str(cell.experiment.rounds),
                ", ".join(map(str, line.missing)) or "none, finished",
                time or escape(line.problem),
            )
        out.print(grid)
        left = sum(line.seconds or 0.0 for line in planned)
        rounds = sum(line.cell.experiment.rounds * len(line.missing) for line in planned)
        out.print(f"{study.name}: {rounds} rounds, about {_time(left)} on this machine")
        total += left
    if name == "all":
        out.print(f"all: about {_time(total)}, less where studies share cells")


def sweep(
    config: Annotated[str, typer.Argument(help="A recipe's name or a TOML file.", autocompletion=configs)],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid", "--set-grid", metavar="KEY=V,V,...", help="A key and its values; several: all pairs."
        ),
    ] = None,
    folder: Out = Path("results"),
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Set = None,
    quiet: Quiet = False,
) -> None:
    """Try every combination of some settings, and show a table and a heat map.

    For instance:  fedpews sweep synthetic-32k --grid warmup.diversity=0.1,1,5 --grid warmup.fraction=0.1,0.2
    """
    from fedpews.studies.page import write_page
    from fedpews.studies.reproduce import run_study
    from fedpews.studies.sweep import make_sweep, parse_grid

    scale = _scale(False, None, set_, None)
    study = make_sweep(
        config, dict(parse_grid(text) for text in grid or []), None if seeds is None else parse_seeds(seeds)
    )
    with _goes_on():
        outcome = run_study(
            study,
            folder,
            scale,
            data_dir=data_dir,
            tell=lambda text: None if quiet else err.print(escape(text), soft_wrap=True),
            watch=lambda experiment: _watcher(experiment, quiet),
        )
    _show(outcome, write_page(outcome, folder, data_dir))
    best = max(outcome.table, key=lambda place: _mean(outcome.readings["final", *place].values()))
    if outcome.table[best].runs:
        settings = ", ".join(part for part in best if part != "all")
        mean = _mean(outcome.readings["final", *best].values())
        out.print(f"highest: {escape(settings)}, {mean:.2f} % over {len(outcome.table[best].runs)} seeds")


def _show(outcome: Outcome, page: Path) -> None:
    from fedpews.studies.measures import MEASURES
    from fedpews.studies.page import number_rows

    study = outcome.study
    out.print(f"[bold]{escape(study.item)}: {escape(study.title)}[/]")
    for sentence in outcome.scale.describe(study):
        out.print(f"[yellow]not at the paper's scale:[/] {escape(sentence)}", soft_wrap=True)
    for measure in study.measures:
        brackets = "; in brackets the paper's" if study.paper.get(measure) else ""
        _grid(f"{MEASURES[measure].label}{brackets}", number_rows(outcome, measure))
    for claim in dict.fromkeys(verdict.claim for verdict in outcome.verdicts):
        out.print(f"[bold]Claim:[/] {escape(claim)}", soft_wrap=True)
        for verdict in outcome.verdicts:
            if verdict.claim == claim:
                out.print(f"  {_sentence(verdict)}", soft_wrap=True)
    for found in outcome.table.values():
        if found.message:
            place = f"{study.row_label(found.cell.row)}, {study.column_label(found.cell.column)}"
            out.print(f"{escape(place)}: {found.status}: {escape(found.message)}", soft_wrap=True)
    out.print(f"written to {page}", soft_wrap=True)


def _sentence(verdict: Verdict) -> str:
    color = {True: "green", False: "red", None: "yellow"}[verdict.agrees]
    paper = f" (the paper: {verdict.paper})" if verdict.paper else ""
    p = "" if verdict.p is None else f", p = {verdict.p:.3f}"
    found = f": {verdict.ours}{paper}, {verdict.seeds} seeds{p}" if verdict.seeds else paper
    return f"[{color}]{escape(verdict.finding)}[/]  {escape(verdict.where + found)}"


def _grid(title: str, rows: Sequence[Sequence[str]]) -> None:
    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for head in rows[0]:
        grid.add_column(escape(head), overflow="fold")
    for row in rows[1:]:
        grid.add_row(*map(escape, row))
    out.print(grid)


@contextmanager
def _watcher(experiment: Experiment, quiet: bool) -> Iterator[Watcher]:
    from fedpews.report.progress import ProgressBar
    from fedpews.running import Watcher

    with ProgressBar(experiment.method_label, err, quiet) as bar:

        def begin(_: Any, done: int, *engine: str) -> None:
            bar.begin(experiment.rounds, done)

        yield Watcher(begin=begin, round=bar.round)


@contextmanager
def _goes_on() -> Iterator[None]:
    """A stopped study goes on with the same command."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        err.print("stopped; what is finished is kept, the same command goes on from here", soft_wrap=True)
        raise typer.Exit(130) from None


def _scale(quick: bool, seeds: str | None, settings: list[str] | None, stand_in: list[str] | None) -> Scale:
    from fedpews.configs import parse_setting
    from fedpews.studies.study import Scale

    others: dict[str, str] = {}
    for text in stand_in or []:
        name, equals, other = text.partition("=")
        if not equals or not name or not other:
            raise ConfigError(f"--stand-in {text!r}: give it as DATA=OTHER")
        others[name] = other
    return Scale(
        quick,
        None if seeds is None else tuple(parse_seeds(seeds)),
        dict(parse_setting(text) for text in settings or []) or None,
        others or None,
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else -1.0


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


STUDIES = (reproduce, plan, sweep)
"""The commands of this file."""
