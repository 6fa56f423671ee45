"""Running and comparing: `fedpews run`, `list` and `compare`, and the command itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedpews.cli.complete import lists
from fedpews.cli.console import err, out
from fedpews.cli.data import data
from fedpews.cli.edge import explained
from fedpews.cli.flower import flower, run_site
from fedpews.cli.options import Config, DataDir, Log, Methods, Out, Quiet, Resume, Rounds, Seeds, Set
from fedpews.cli.pages import PAGES, write_joint_page
from fedpews.cli.recipes import RECIPES
from fedpews.cli.runs import resolve_runs, show_runs, show_table
from fedpews.cli.studies import STUDIES
from fedpews.cli.sweeps import SWEEPS
from fedpews.errors import ConfigError, nearest
from fedpews.ranks.place import Place

app = typer.Typer(
    name="fedpews",
    help="Federated learning among clients whose data have almost nothing in common.\n\n"
    "Start with:  fedpews run synthetic-32k --method fedavg --method fedavg+pews --rounds 150",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(data)
app.add_typer(flower)
app.command("site")(run_site)


def _version(asked: bool) -> None:
    if asked:
        import fedpews

        out.print(f"fedpews {fedpews.__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and end.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    context.obj = debug
    rank = Place.here()
    if rank is not None and rank.is_shared and context.invoked_subcommand != "run":
        raise ConfigError(
            f"torchrun started {rank.world} processes of this command, and only `fedpews run` shares its work among "
            f"them; start `fedpews {context.invoked_subcommand}` without torchrun"
        )


@app.command()
def run(
    config: Config,
    method: Methods = None,
    rounds: Rounds = None,
    seeds: Seeds = None,
    folder: Out = None,
    data_dir: DataDir = None,
    set_: Set = None,
    resume: Resume = False,
    quiet: Quiet = False,
    log: Log = None,
) -> None:
    """Train with one method or several, and show how they did.

    Every run writes a folder: config.toml, rounds.jsonl, summary.json, the models and a checkpoint; then one page
    about all of them, whose path is printed last. Kill it at any moment: with --resume it goes on to the same
    numbers. `fedpews watch` shows the page while it goes on.

    Over several machines or GPUs: `torchrun ... -m fedpews run CONFIG`, to the same numbers (docs/how-to/ranks.md).
    """
    runs = resolve_runs(config, method, rounds, seeds, folder, set_)
    rank = Place.here()
    if rank is not None and rank.rank > 0:
        from fedpews.ranks.running import work

        raise typer.Exit(work(rank, [experiment for experiment, _ in runs], data_dir))
    # torchrun starts the same command again when a rank has died
    resume = resume or (rank is not None and rank.restarts > 0)
    with _ranks(rank, runs[0][0]) as group:
        for experiment, place in runs:
            _run_one(experiment, place, data_dir, resume, quiet, log or [], group)
    places = [place for _, place in runs]
    show_runs(places)
    write_joint_page(places, folder, runs[0][0].method_label)


def _ranks(place: Place | None, experiment: Any) -> AbstractContextManager[Any]:
    """The ranks that share the run; None in a process that is alone."""
    if place is None or not place.is_shared:
        return nullcontext()
    from fedpews.ranks.running import leading

    return leading(place, experiment.runtime.device)


def _run_one(
    experiment: Any,
    folder: Path,
    data_dir: Path | None,
    resume: bool,
    quiet: bool,
    log: list[str],
    group: Any,
) -> None:
    from fedpews.report.progress import ProgressBar
    from fedpews.running import Watcher
    from fedpews.running import run as run_alone
    from fedpews.trackers import tracking

    if group is not None:
        from fedpews.ranks.running import lead
    run_experiment = run_alone if group is None else partial(lead, group)

    with ProgressBar(experiment.method_label, err, quiet) as bar:

        def begin(_: Any, done: int, engine: str) -> None:
            bar.begin(experiment.rounds, done)
            if not quiet:
                again = f", from round {done + 1}" if done else ""
                err.print(escape(f"{experiment.method_label}: {engine}{again}"), soft_wrap=True)

        def stopping() -> None:
            err.print("finishing this round, then saving; Ctrl-C again stops at once", soft_wrap=True)

        with tracking(log, Watcher(begin=begin, round=bar.round, stopping=stopping), folder) as watcher:
            run_experiment(experiment, out=folder, resume=resume, data_dir=data_dir, watcher=watcher)


@app.command(name="list")
def list_(
    what: Annotated[
        str,
        typer.Argument(help="methods, data, models, tasks, recipes, studies or keys", autocompletion=lists),
    ],
) -> None:
    """What there is to choose from."""
    kinds = {
        "methods": _methods,
        "data": _data,
        "models": _models,
        "tasks": _tasks,
        "recipes": _recipes,
        "studies": _studies,
        "keys": _keys,
    }
    if what not in kinds:
        raise ConfigError(f"there is no list of {what!r}; {nearest(what, kinds)}")
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(no_wrap=True)
    for cells in kinds[what]():
        grid.add_row(*map(escape, cells))
    out.print(grid)


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    plot: Annotated[
        Path | None, typer.Option(help="Also draw accuracy over rounds to this file (png, pdf, svg).")
    ] = None,
) -> None:
    """Put runs side by side; the first one is what the others are measured against."""
    show_table(folders, plot)


def _methods() -> Iterator[tuple[str, str]]:
    from fedpews.compose import METHODS, PERSONAL, SERVERS, describe

    yield from ((name, describe(name)) for name in METHODS)
    yield "", ""
    yield from ((f"+ {name}", describe(name)) for name in SERVERS)
    yield "", ""
    yield "+ pews", "FedPeWS: a warmup in which each client learns which neurons are its own"
    yield "+ pews-fixed", "FedPeWS-Fixed: the server gives every client a fixed part of each layer"
    yield "+ pews-auto", "FedPeWS-Auto: learned masks, no tuning; the warmup ends by itself"
    yield "+ pews-random", "the same with random masks, for comparison: once, or redrawn in every round"
    yield "", ""
    yield from ((f"+ {name}", describe(name)) for name in PERSONAL)


def _data() -> Iterator[tuple[str, str]]:
    import inspect

    from fedpews.data import PARTITIONS, SOURCES

    yield from ((name, source.description) for name, source in SOURCES.items())
    yield "A+B+...", "any of these side by side, their labels one after the other"
    yield "folder:PATH", "your own: a folder or .npz file per client, and one called test"
    yield "module:function", "your own: a function that returns the clients and the test set"
    yield "", ""
    yield from (
        (f"partition {name}", (inspect.getdoc(scheme) or "").splitlines()[0])
        for name, scheme in PARTITIONS.items()
    )


def _models() -> Iterator[tuple[str, str]]:
    from fedpews.models import describe_models

    yield from describe_models()
    yield "module:Class", "your own torch.nn.Module"


def _tasks() -> Iterator[tuple[str, ...]]:
    from fedpews.tasks.task import describe_tasks

    yield from describe_tasks()
    yield "", "your own: module:Task or path/to/file.py:Task (docs/tasks.md)"


def _recipes() -> Iterator[tuple[str, str]]:
    from fedpews.config import recipes

    for name, file in recipes().items():
        header = [
            line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#")
        ]
        yield name, header[1] if len(header) > 1 else ""
    yield "", ""
    yield "", "the paper's tables and figures: fedpews list studies"


def _studies() -> Iterator[tuple[str, str]]:
    from fedpews.paper.reproduce import load_study
    from fedpews.paper.study import studies

    for name in studies():
        study = load_study(name)
        yield name, f"{study.item}: {study.title}"


def _keys() -> Iterator[tuple[str, ...]]:
    from fedpews.experiment import config_keys, option_keys

    yield "key", "type", "default", ""
    for key in (*config_keys(), *option_keys()):
        yield key.name, key.type, key.default, key.text


for command in (*RECIPES, *PAGES, *STUDIES, *SWEEPS):
    app.command()(command)


def main() -> None:
    """The console command."""
    with explained("--debug" in sys.argv[1:]):
        app(prog_name="fedpews")
