"""The command about settings: sweep, over a grid or by a search. Heavy modules are imported when used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
)
from fedpews.cli.studies import count_failed, end, make_runner, on_cluster, resumable, show_outcome
from fedpews.errors import ConfigError

if TYPE_CHECKING:
    from fedpews.paper.cells import Runner
    from fedpews.paper.search import Search
    from fedpews.paper.study import Study
    from fedpews.paper.sweep import Grid


Grids = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        "--set-grid",
        metavar="KEY=V,V,...",
        help="A key and its values; several: all pairs. With --search also a range: train.lr=0.001..0.1:log, "
        "warmup.rounds=10..100, or in steps: warmup.rounds=10..100:10.",
    ),
]
SearchBy = Annotated[
    str | None,
    typer.Option(
        metavar="optuna",
        help="Search instead of trying everything: TPE, hopeless trials are given up early. Chooses on validation "
        "data only.",
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Where a search keeps its trials: any database URL that Optuna takes, for several machines.",
        show_default="an SQLite file in the --out folder",
    ),
]


def sweep(
    config: Annotated[str, typer.Argument(help="A recipe's name or a TOML file.", autocompletion=configs)],
    grid: Grids = None,
    method: Methods = None,
    rounds: Rounds = None,
    folder: Results = Path("results"),
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Set = None,
    search: SearchBy = None,
    trials: Annotated[int, typer.Option(help="How many trials a search has, finished ones included.")] = 30,
    storage: Storage = None,
    on: On = None,
    quiet: Quiet = False,
) -> None:
    """Train with every combination of some settings, or search for the best ones.

    For instance:  fedpews sweep synthetic-32k --grid warmup.diversity=0.1,1,5 --grid warmup.fraction=0.1,0.2

    Or:  fedpews sweep synthetic-32k --search optuna --trials 40 --grid warmup.diversity=0.1..10:log --grid
    warmup.rounds=10..100
    """
    if search not in (None, "optuna"):
        raise ConfigError(f"--search {search!r}: there is optuna")
    if search is None and storage is not None:
        raise ConfigError("--storage is where a search keeps its trials; add --search optuna")
    keys, fixed = _settings(grid, method, rounds, set_)
    chosen, runner = None if seeds is None else parse_seeds(seeds), make_runner(folder, data_dir, quiet)
    if search is None:
        from fedpews.paper.sweep import make_sweep

        _run_grid(make_sweep(config, keys, chosen, fixed), runner, on)
    else:
        from fedpews.paper.search import VALIDATION, plan_search

        planned = plan_search(config, keys, trials, chosen, fixed)
        if planned.fixed != fixed:
            runner.log(
                f"{config} has no validation data: {VALIDATION:.0%} of each client's training samples become it "
                "(data.validation)"
            )
        _run_search(planned, runner, storage, on)


def _run_grid(study: Study, runner: Runner, on: str | None) -> None:
    from fedpews.paper.page import best_cells, write_page
    from fedpews.paper.reproduce import run_study

    with resumable(), on_cluster(on) as cluster:
        outcome = run_study(study, runner, cluster=cluster)
    show_outcome(outcome, write_page(outcome, runner.root, runner.data_dir))
    say(best_cells(outcome))
    if not study.measures[0].startswith("validation:"):
        say("this is on the test data; to choose by it, use validation data: --set data.validation=0.2")
    end(count_failed(outcome))


def _run_search(search: Search, runner: Runner, storage: str | None, on: str | None) -> None:
    from fedpews.paper.search import ended, has_failed, open_study, run_search
    from fedpews.paper.search_page import best_trial, describe_best, importance, write_search

    with resumable(), open_study(search, runner.root, storage) as study:
        with on_cluster(on) as cluster:
            run_search(search, study, runner, cluster)
        page = write_search(search, study, runner.root)
        best, shares, failed = best_trial(study), importance(study), sum(map(has_failed, ended(study)))
    if best is not None:
        say(describe_best(search, best))
        text = ", ".join(f"{key} {share:.2f}" for key, share in shares.items())
        say(f"importance: {text or 'too few trials to say'}")
        say(f"run it with: fedpews run {page.with_suffix('.best.toml')}")
    say(f"written to {page}")
    end(failed, "trials")


def _settings(
    grid: list[str] | None, methods: list[str] | None, rounds: int | None, set_: list[str] | None
) -> tuple[Grid, dict[str, Any]]:
    """The keys that vary, and those that are the same everywhere. Several methods are a key that varies."""
    from fedpews.paper.sweep import parse_grid

    fixed: dict[str, Any] = {} if rounds is None else {"rounds": rounds}
    fixed |= parse_settings(set_)
    values: Grid = dict(parse_grid(text) for text in grid or [])
    if methods and "method.name" in values:
        raise ConfigError("methods are given by --method and by --grid method.name; leave one out")
    if methods and len(methods) == 1:
        fixed = {"method.name": methods[0]} | fixed
    elif methods:
        values = {"method.name": methods, **values}
    return values, fixed
