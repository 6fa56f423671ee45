"""The command about settings: sweep, over a grid or by a search. Everything heavy is imported when used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedpews.cli.complete import configs
from fedpews.cli.console import err, out
from fedpews.cli.options import DataDir, Methods, On, Quiet, Rounds, Seeds, Set, parse_seeds
from fedpews.cli.outcomes import count_failed, elsewhere, end, goes_on, show_outcome, watch_run
from fedpews.errors import ConfigError

if TYPE_CHECKING:
    from fedpews.studies.page import Outcome
    from fedpews.studies.sweep import Grid


def sweep(
    config: Annotated[str, typer.Argument(help="A recipe's name or a TOML file.", autocompletion=configs)],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            "--set-grid",
            metavar="KEY=V,V,...",
            help="A key and its values; several: all pairs. With --search also a range: train.lr=0.001..0.1:log, "
            "warmup.rounds=10..100, or in steps: warmup.rounds=10..100:10.",
        ),
    ] = None,
    method: Methods = None,
    rounds: Rounds = None,
    folder: Annotated[Path, typer.Option("--out", help="Where run folders and pages are kept.")] = Path(
        "results"
    ),
    seeds: Seeds = None,
    data_dir: DataDir = None,
    set_: Set = None,
    on: On = None,
    quiet: Quiet = False,
) -> None:
    """Try every combination of some settings, and show a table and a heat map.

    For instance:  fedpews sweep synthetic-32k --grid warmup.diversity=0.1,1,5 --grid warmup.fraction=0.1,0.2
    """
    from fedpews.studies.page import write_page
    from fedpews.studies.reproduce import run_study
    from fedpews.studies.sweep import make_sweep

    chosen = None if seeds is None else parse_seeds(seeds)
    values, fixed = _settings(grid, method, rounds, set_)
    study = make_sweep(config, values, chosen, fixed)
    with goes_on(), elsewhere(on, quiet) as others:
        outcome = run_study(
            study,
            folder,
            data_dir=data_dir,
            tell=lambda text: None if quiet else err.print(escape(text), soft_wrap=True),
            watch=lambda experiment: watch_run(experiment, quiet),
            elsewhere=others,
        )
    show_outcome(outcome, write_page(outcome, folder, data_dir))
    _name_best(outcome)
    end(count_failed(outcome))


def _settings(
    grid: list[str] | None, methods: list[str] | None, rounds: int | None, set_: list[str] | None
) -> tuple[Grid, dict[str, Any]]:
    """The keys that vary, and those that are the same everywhere. Several methods are a key that varies."""
    from fedpews.configs import parse_setting
    from fedpews.studies.sweep import parse_grid

    fixed: dict[str, Any] = {} if rounds is None else {"rounds": rounds}
    fixed |= dict(parse_setting(text) for text in set_ or [])
    values: Grid = dict(parse_grid(text) for text in grid or [])
    if methods and "method.name" in values:
        raise ConfigError("methods are given by --method and by --grid method.name; leave one out")
    if methods and len(methods) == 1:
        fixed = {"method.name": methods[0]} | fixed
    elif methods:
        values = {"method.name": methods, **values}
    return values, fixed


def _name_best(outcome: Outcome) -> None:
    """One line: which cell did best, and by which data."""
    from fedpews.studies.measures import MEASURES

    name = outcome.study.measures[0]
    measure = MEASURES[name]
    means = {
        place: sum(values.values()) / len(values)
        for place in outcome.table
        if (values := outcome.readings[name, *place])
    }
    if not means:
        return
    best = (max if measure.higher_is_better else min)(means, key=means.__getitem__)
    settings = ", ".join(part for part in best if part != "all")
    word = "highest" if measure.higher_is_better else "lowest"
    seeds = len(outcome.table[best].runs)
    out.print(
        f"{word}: {escape(settings)}, {measure.label} {means[best]:.{measure.digits}f} over {seeds} seeds",
        soft_wrap=True,
    )
    if not name.startswith("validation:"):
        out.print(
            "this is on the test data; to choose by it, hold some out: --set data.validation=0.2",
            soft_wrap=True,
        )


SWEEPS = (sweep,)
"""The commands of this file."""
