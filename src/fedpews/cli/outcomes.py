"""Shared by the commands about studies: how cells are run and watched, and how results are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedpews.cli.console import err, out
from fedpews.cli.options import parse_seeds
from fedpews.errors import ConfigError, Interrupted, RunFailed

if TYPE_CHECKING:
    from fedpews.experiment import Experiment
    from fedpews.paper.cells import Runner
    from fedpews.paper.claims import Verdict
    from fedpews.paper.cluster import Cluster
    from fedpews.paper.page import Outcome
    from fedpews.paper.study import Scale
    from fedpews.running import Watcher


def make_runner(folder: Path, data_dir: Path | None, quiet: bool) -> Runner:
    """Runs cells in this process, with a progress bar and a line for each cell."""
    from fedpews.paper.cells import Runner

    def log(text: str) -> None:
        if not quiet:
            err.print(escape(text), soft_wrap=True)

    return Runner(folder, data_dir=data_dir, watch=lambda experiment: watch_run(experiment, quiet), log=log)


def show_outcome(outcome: Outcome, page: Path) -> None:
    from fedpews.paper.measures import MEASURES
    from fedpews.paper.page import number_rows

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
    for result in outcome.table.values():
        if result.message:
            text = f"{study.label(result.cell)}: {result.status}: {result.message}"
            out.print(escape(text), soft_wrap=True)
    out.print(escape(f"written to {page}"), soft_wrap=True)


def _sentence(verdict: Verdict) -> str:
    color = {True: "green", False: "red", None: "yellow"}[verdict.agrees]
    paper = f" (the paper: {verdict.paper})" if verdict.paper else ""
    p = "" if verdict.p is None else f", p = {verdict.p:.3f}"
    ours = f": {verdict.ours}{paper}, {verdict.seeds} seeds{p}" if verdict.seeds else paper
    return f"[{color}]{escape(verdict.finding)}[/]  {escape(verdict.where + ours)}"


def _grid(title: str, rows: Sequence[Sequence[str]]) -> None:
    grid = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for head in rows[0]:
        grid.add_column(escape(head), overflow="fold")
    for row in rows[1:]:
        grid.add_row(*map(escape, row))
    out.print(grid)


@contextmanager
def watch_run(experiment: Experiment, quiet: bool) -> Iterator[Watcher]:
    from fedpews.report.progress import ProgressBar
    from fedpews.running import Watcher

    with ProgressBar(experiment.method_label, err, quiet) as bar:

        def begin(_: Any, done: int, *engine: str) -> None:
            bar.begin(experiment.rounds, done)

        yield Watcher(begin=begin, round=bar.round)


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
    quick: bool, seeds: str | None, settings: list[str] | None, stand_in: list[str] | None
) -> Scale:
    from fedpews.config import parse_setting
    from fedpews.paper.study import Scale

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
