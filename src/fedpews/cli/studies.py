"""The commands about many runs: reproduce, plan and sweep. Heavy modules are imported when used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedpews.cli.console import err, out
from fedpews.cli.options import (
    DataDir,
    Methods,
    On,
    Quiet,
    Results,
    Rounds,
    Seeds,
    Set,
    configs,
    parse_seeds,
    parse_settings,
    say,
    study_names,
)
from fedpews.cli.runs import progress
from fedpews.errors import ConfigError, Interrupted, RunFailed

if TYPE_CHECKING:
    from fedpews.paper.cells import Runner
    from fedpews.paper.claims import Verdict
    from fedpews.paper.page import Outcome
    from fedpews.paper.plan import Planned
    from fedpews.paper.search import Search
    from fedpews.paper.study import Scale, Study
    from fedpews.paper.sweep import Grid

Name = Annotated[
    str,
    typer.Argument(help="A study (fedpews list studies), all, or a TOML file.", autocompletion=study_names),
]
Small = Annotated[
    bool, typer.Option("--small", help="Run the scaled-down version of studies that take days.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a configuration key in every cell; the page records it."
    ),
]
StandIn = Annotated[
    list[str] | None,
    typer.Option(metavar="DATA=OTHER", help="Replace a data set by another; the page records it."),
]
Grids = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="KEY=V,V,...",
        help="A key and its values. Repeat the option for all combinations. With --search also a range: "
        "train.lr=0.001..0.1:log, warmup.rounds=10..100, or in steps: warmup.rounds=10..100:10.",
    ),
]


class Sampler(StrEnum):
    """What a search uses."""

    optuna = "optuna"


SearchBy = Annotated[
    Sampler | None,
    typer.Option(
        help="Search with TPE and pruning instead of a full grid. Uses validation data only.",
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Database of the search: any URL that Optuna accepts. Several machines can share it.",
        show_default="an SQLite file in the --out folder",
    ),
]


def reproduce(
    name: Name,
    small: Small = False,
    folder: Results = Path("results"),
    pages: Annotated[
        Path | None, typer.Option(help="Folder for the pages.", show_default="the --out folder")
    ] = None,
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Changes = None,
    stand_in: StandIn = None,
    cells: Annotated[
        str | None,
        typer.Option(
            metavar="ROW[:COLUMN],...",
            help="Run only these cells, in this order; :COLUMN runs a whole column.",
        ),
    ] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="--no-run only shows finished cells.")] = True,
    on: On = None,
    quiet: Quiet = False,
) -> None:
    """Run a table or figure of the paper and show our numbers beside it.

    Only missing cells are run, and studies share cells. You can stop it at any
    time; the same command continues. Writes a Markdown page with figures.
    """
    from fedpews.paper.cluster import connect
    from fedpews.paper.reproduce import reproduce as reproduce_study

    failed, scale = 0, _scale(small, seeds, set_, stand_in)
    runner = _runner(folder, data_dir, quiet)
    with _resumable(), connect(on if run else None) as cluster:
        for outcome in reproduce_study(
            name, runner, scale, pages=pages, only=cells, run=run, cluster=cluster
        ):
            _show_outcome(outcome, (pages or folder) / f"{outcome.study.name}.md")
            failed += outcome.failed
    _end(failed, "cells")


def plan(
    name: Name,
    small: Small = False,
    folder: Results = Path("results"),
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Changes = None,
    stand_in: StandIn = None,
) -> None:
    """Estimate how long `reproduce` takes on this machine.

    Lists the cells and times a few rounds of each kind of run. The times are
    kept in the --out folder (runs/probes.json).
    """
    from fedpews.paper.plan import plan as plan_study
    from fedpews.paper.reproduce import load_study
    from fedpews.paper.study import scaled, studies

    scale, runner = _scale(small, seeds, set_, stand_in), _runner(folder, data_dir, quiet=False)
    total = 0.0
    with _resumable():
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


def sweep(
    config: Annotated[
        str, typer.Argument(help="A recipe (fedpews list recipes) or a TOML file.", autocompletion=configs)
    ],
    grid: Grids = None,
    method: Methods = None,
    rounds: Rounds = None,
    folder: Results = Path("results"),
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Set = None,
    search: SearchBy = None,
    trials: Annotated[int, typer.Option(help="Number of trials of a search, including finished ones.")] = 30,
    storage: Storage = None,
    on: On = None,
    quiet: Quiet = False,
) -> None:
    """Train with all combinations of some settings, or search for the best.

    A grid:
    fedpews sweep synthetic-32k --grid warmup.diversity=0.1,1,5 --grid train.lr=0.05,0.1

    A search:
    fedpews sweep synthetic-32k --search optuna --grid warmup.diversity=0.1..10:log
    """
    from fedpews.paper.search import plan_search
    from fedpews.paper.sweep import make_sweep

    keys, fixed = _settings(grid, method, {} if rounds is None else {"rounds": rounds}, set_)
    chosen, runner = None if seeds is None else parse_seeds(seeds), _runner(folder, data_dir, quiet)
    if search is not None:
        _run_search(plan_search(config, keys, trials, chosen, fixed), runner, storage, on)
    elif storage is not None:
        raise ConfigError("--storage is where a search keeps its trials; add --search optuna")
    else:
        _run_grid(make_sweep(config, keys, chosen, fixed), runner, on)


def _run_grid(study: Study, runner: Runner, on: str | None) -> None:
    from fedpews.paper.cluster import connect
    from fedpews.paper.page import best_cells, write_page
    from fedpews.paper.reproduce import run_study

    with _resumable(), connect(on) as cluster:
        outcome = run_study(study, runner, cluster=cluster)
    _show_outcome(outcome, write_page(outcome, runner.root, runner.data_dir))
    say(best_cells(outcome))
    if not study.measures[0].startswith("validation:"):
        say("this is on the test data; to choose by it, use validation data: --set data.validation=0.2")
    _end(outcome.failed, "cells")


def _run_search(search: Search, runner: Runner, storage: str | None, on: str | None) -> None:
    from fedpews.paper.cluster import connect
    from fedpews.paper.search import ended, has_failed, open_study, run_search
    from fedpews.paper.search_page import best_trial, describe_best, importance, write_search

    with _resumable(), open_study(search, runner.root, storage) as study:
        with connect(on) as cluster:
            run_search(search, study, runner, cluster)
        page = write_search(search, study, runner.root)
        best, shares, failed = best_trial(study), importance(study), sum(map(has_failed, ended(study)))
    if best is not None:
        say(describe_best(search, best))
        text = ", ".join(f"{key} {share:.2f}" for key, share in shares.items())
        say(f"importance: {text or 'too few trials to say'}")
        say(f"run it with: fedpews run {page.with_suffix('.best.toml')}")
    say(f"written to {page}")
    _end(failed, "trials")


def _settings(
    grid: list[str] | None, methods: list[str] | None, fixed: dict[str, Any], set_: list[str] | None
) -> tuple[Grid, dict[str, Any]]:
    """The keys that vary, and those that are the same everywhere. Several methods are a key that varies."""
    from fedpews.paper.sweep import parse_grid

    fixed = fixed | parse_settings(set_)
    values: Grid = dict(parse_grid(text) for text in grid or [])
    if methods and "method.name" in values:
        raise ConfigError("methods are given by --method and by --grid method.name; leave one out")
    if methods and len(methods) == 1:
        fixed = {"method.name": methods[0]} | fixed
    elif methods:
        values = {"method.name": methods, **values}
    return values, fixed


def _scale(small: bool, seeds: str | None, set_: list[str] | None, stand_in: list[str] | None) -> Scale:
    from fedpews.paper.study import Scale

    chosen = None if seeds is None else tuple(parse_seeds(seeds))
    return Scale(small, chosen, parse_settings(set_), parse_settings(stand_in))


def _runner(folder: Path, data_dir: Path | None, quiet: bool) -> Runner:
    """Runs cells in this process, with a progress bar and a line for each cell."""
    from fedpews.paper.cells import Runner

    def log(text: str) -> None:
        if not quiet:
            err.print(escape(text), soft_wrap=True)

    bar = lambda experiment: progress(experiment, quiet, names_engine=False)  # noqa: E731
    return Runner(folder, data_dir=data_dir, progress=bar, log=log)


@contextmanager
def _resumable() -> Iterator[None]:
    """Say, when the command is stopped, that the same command resumes it."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        err.print("stopped; what is finished is kept, the same command goes on from here", soft_wrap=True)
        raise typer.Exit(130) from None


def _end(failed: int, what: str) -> None:
    """End the command with an error if anything failed: its page has gaps."""
    if failed:
        raise RunFailed(f"{failed} {what} failed" + "; the same command tries them again" * (what == "cells"))


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
    say(f"{study.name}: {rounds} rounds, about {_time(left)} on this machine")


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _show_outcome(outcome: Outcome, page: Path) -> None:
    from fedpews.paper.measures import MEASURES
    from fedpews.paper.page import number_rows

    study = outcome.study
    out.print(f"[bold]{escape(study.item)}: {escape(study.title)}[/]")
    for sentence in outcome.scale.describe(study):
        out.print(f"[yellow]not at the paper's scale:[/] {escape(sentence)}", soft_wrap=True)
    for measure in study.measures:
        brackets = "; in brackets the paper's" if study.paper.get(measure) else ""
        _print_table(f"{MEASURES[measure].label}{brackets}", number_rows(outcome, measure))
    claim = ""
    for verdict in outcome.verdicts:
        if verdict.claim != claim:
            claim = verdict.claim
            out.print(f"[bold]Claim:[/] {escape(claim)}", soft_wrap=True)
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
