"""The commands about many runs: reproduce and sweep. Heavy modules are imported when used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedpews.cli.console import err, out, print_table
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
    from fedpews.paper.claims import Outcome, Verdict
    from fedpews.paper.search import Search
    from fedpews.paper.study import Study
    from fedpews.paper.sweep import Grid

Name = Annotated[
    str,
    typer.Argument(
        help="A study (fedpews list studies), the word all, or a TOML file.", autocompletion=study_names
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a configuration key in every cell; the page records it."
    ),
]
Grids = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="KEY=V,V,...",
        help="A key and its values. Repeat the option for several keys. With --search also a range: "
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
    small: Annotated[
        bool, typer.Option("--small", help="Run the scaled-down version of a study that takes days.")
    ] = False,
    folder: Results = Path("results"),
    pages: Annotated[
        Path | None, typer.Option(help="Folder for the pages.", show_default="the --out folder")
    ] = None,
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Changes = None,
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
    """Run a table or figure of the paper and compare its numbers with ours.

    Only missing cells are run; studies share cells. You can stop the command at any
    time and continue with the same command. It writes a Markdown page with figures.
    """
    from fedpews.paper.cluster import connect
    from fedpews.paper.reproduce import reproduce as reproduce_study

    failed = 0
    with _resumable(), connect(on if run else None) as cluster:
        for outcome in reproduce_study(
            name,
            _runner(folder, data_dir, quiet),
            small=small,
            seeds=parse_seeds(seeds),
            changed=parse_settings(set_),
            pages=pages,
            only=cells,
            run=run,
            cluster=cluster,
        ):
            _show_outcome(outcome, (pages or folder) / f"{outcome.study.name}.md")
            failed += outcome.failed
    _end(failed, "cells")


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
    """Train with every combination of some settings, or search for the best one.

    A grid:
    fedpews sweep synthetic-32k --grid warmup.diversity=0.1,1,5 --grid train.lr=0.05,0.1

    A search:
    fedpews sweep synthetic-32k --search optuna --grid warmup.diversity=0.1..10:log
    """
    from fedpews.paper.search import plan_search
    from fedpews.paper.sweep import make_sweep

    keys, fixed = _settings(grid, method, {} if rounds is None else {"rounds": rounds}, set_)
    chosen, runner = parse_seeds(seeds), _runner(folder, data_dir, quiet)
    if search is not None:
        _run_search(plan_search(config, keys, trials, chosen, fixed), runner, storage, on)
    elif storage is not None:
        raise ConfigError("--storage needs --search optuna")
    else:
        _run_grid(make_sweep(config, keys, chosen, fixed), runner, on)


def _run_grid(study: Study, runner: Runner, on: str | None) -> None:
    from fedpews.paper.cluster import connect
    from fedpews.paper.page import best_cells, write_page
    from fedpews.paper.reproduce import run_study

    with _resumable(), connect(on) as cluster:
        outcome = run_study(study, runner, cluster=cluster)
    _show_outcome(outcome, write_page(outcome, runner.root))
    say(best_cells(outcome))
    if not study.measures[0].startswith("validation:"):
        say("these are test metrics; to choose a setting, use validation data: --set data.validation=0.2")
    _end(outcome.failed, "cells")


def _run_search(search: Search, runner: Runner, storage: str | None, on: str | None) -> None:
    from fedpews.paper.cluster import connect
    from fedpews.paper.search import (
        best_trial,
        describe_best,
        ended,
        has_failed,
        open_study,
        run_search,
        write_search,
    )

    with _resumable(), open_study(search, runner.root, storage) as study:
        with connect(on) as cluster:
            run_search(search, study, runner, cluster)
        page = write_search(search, study, runner.root)
        best, failed = best_trial(study), sum(map(has_failed, ended(study)))
    if best is not None:
        say(describe_best(search, best))
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
        raise ConfigError("--method and --grid method.name both set the methods; use one of them")
    if methods and len(methods) == 1:
        fixed = {"method.name": methods[0]} | fixed
    elif methods:
        values = {"method.name": methods, **values}
    return values, fixed


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
        err.print("stopped; finished cells are saved, and the same command continues", soft_wrap=True)
        raise typer.Exit(130) from None


def _end(failed: int, what: str) -> None:
    """End the command with an error if anything failed: its page has gaps."""
    if failed:
        raise RunFailed(f"{failed} {what} failed" + "; the same command runs them again" * (what == "cells"))


def _show_outcome(outcome: Outcome, page: Path) -> None:
    from fedpews.paper.measures import MEASURES
    from fedpews.paper.page import number_rows

    study = outcome.study
    out.print(f"[bold]{escape(study.item)}: {escape(study.title)}[/]")
    for sentence in outcome.study.scale:
        out.print(f"[yellow]not at the paper's scale:[/] {escape(sentence)}", soft_wrap=True)
    for measure in study.measures:
        brackets = "; in brackets the paper's" if study.paper.get(measure) else ""
        print_table(number_rows(outcome, measure), f"{MEASURES[measure].label}{brackets}")
    claim = ""
    measured = [verdict for verdict in outcome.verdicts if verdict.seeds]
    for verdict in measured:
        if verdict.claim != claim:
            claim = verdict.claim
            out.print(f"[bold]Claim:[/] {escape(claim)}", soft_wrap=True)
        out.print(f"  {_sentence(verdict)}", soft_wrap=True)
    if missing := len(outcome.verdicts) - len(measured):
        out.print(f"{missing} more comparisons are not measured yet")
    for result in outcome.table.values():
        if result.message:
            say(f"{study.label(result.cell)}: {result.status}: {result.message}")
    if page.exists():
        say(f"written to {page}")


def _sentence(verdict: Verdict) -> str:
    color = {True: "green", False: "red", None: "yellow"}[verdict.agrees]
    paper = f" (the paper: {verdict.paper})" if verdict.paper else ""
    p = "" if verdict.p is None else f", p = {verdict.p:.3f}"
    ours = f": {verdict.ours}{paper}, {verdict.seeds} seeds{p}"
    return f"[{color}]{escape(verdict.finding)}[/]  {escape(verdict.where + ours)}"
