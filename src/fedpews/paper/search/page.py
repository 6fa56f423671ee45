"""What a search ends with: the best settings as a configuration, and a page with its figure."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedpews.report.heatmap import plot_heatmap
from fedpews.report.style import new_figure
from fedpews.results.files import write_atomically
from fedpews.results.records import evaluated, value_of
from fedpews.paper.cells import read_cell
from fedpews.paper.page import markdown, write_index
from fedpews.paper.search.space import VALIDATION, Search, in_words, settings_of
from fedpews.paper.search.trials import MESSAGE, WHY, Trials
from fedpews.paper.sweep import Range
from fedpews.tasks.names import show

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study

BINS = 5
"""Of a range, in the heat map."""
SHOWN = 50
"""Trials in the page's table, the best first."""


@dataclass(frozen=True)
class Tried:
    """A trial that has ended."""

    number: int
    settings: Mapping[str, Any]
    state: str  # done, given up, failed
    value: float | None
    note: str = ""


@dataclass(frozen=True)
class SearchOutcome:
    """A search as it stands."""

    search: Search
    tried: list[Tried]
    importance: Mapping[str, float]
    """Of each key, adding up to one; empty with too few trials to say."""
    best_test: float | None = None
    """The metric of the best settings on test data, which nothing was chosen by."""

    @property
    def best(self) -> Tried | None:
        done = [one for one in self.tried if one.state == "done" and one.value is not None]
        goal = self.search.base.goal
        sign = 1 if goal.higher_is_better else -1
        return max(done, key=lambda one: sign * (one.value or 0.0), default=None)

    @property
    def failed(self) -> int:
        return sum(one.state == "failed" and not one.note.startswith("busy") for one in self.tried)


def conclude_search(trials: Trials, root: Path) -> SearchOutcome:
    """What is known now: every trial that has ended, and how much each key matters."""
    from optuna.trial import TrialState

    search, names = trials.search, {"COMPLETE": "done", "PRUNED": "given up", "FAIL": "failed"}
    tried = [
        Tried(
            trial.number,
            settings_of(search.grid, trial.params),
            names[trial.state.name],
            trial.value if trial.state == TrialState.COMPLETE else None,
            str(trial.user_attrs.get(MESSAGE, trial.user_attrs.get(WHY, ""))),
        )
        for trial in trials.counted()
        if trial.state.name in names
    ]
    outcome = SearchOutcome(search, tried, _importance(trials.study))
    best = outcome.best
    if best is None:
        return outcome
    found = read_cell(root, search.cell(best.number, best.settings))
    metric = search.base.goal.metric
    finals = [value_of(evaluated(run)[-1], metric) for run in found.runs.values()]
    known = [value for value in finals if value is not None]
    return SearchOutcome(search, tried, outcome.importance, fmean(known) if known else None)


def write_search(outcome: SearchOutcome, folder: Path) -> tuple[Path, Path | None]:
    """NAME.md with its figure, and NAME.best.toml if any trial came to its end; the paths of both."""
    search, best = outcome.search, outcome.best
    folder.mkdir(parents=True, exist_ok=True)
    toml = None
    if best is not None:
        draw_search(outcome).savefig(folder / f"{search.name}.png", dpi=110)
        toml = folder / f"{search.name}.best.toml"
        header = (
            f"# The best of {len(outcome.tried)} trials on validation data, found by\n# {search.command}\n\n"
        )
        write_atomically(toml, (header + search.experiment(best.settings).to_toml()).encode())
    page = folder / f"{search.name}.md"
    page.write_text(_page(outcome))
    facts = {
        "name": search.name,
        "item": "Search",
        "title": f"{' × '.join(search.grid)} on {search.name.removeprefix('search-')}",
        "command": search.command,
        "scale": [],
        "seeds": len(search.base.seeds),
        "cells": f"{len(outcome.tried)} of {search.trials}",
        "verdicts": [],
    }
    (folder / f"{search.name}.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    write_index(folder)
    return page, toml


def _page(outcome: SearchOutcome) -> str:
    search, best, metric = outcome.search, outcome.best, outcome.search.base.goal.metric
    seeds = ", ".join(map(str, search.base.seeds))
    text = [
        f"# Search: {' × '.join(search.grid)}",
        "",
        f"    {search.command}",
        "",
        f"Seeds {seeds}. Settings are chosen by {metric} on validation data after the last round"
        + (f", {VALIDATION:.0%} of each client's training samples held out" if search.adds_validation else "")
        + "; the test data choose nothing.",
        "",
    ]
    if best is None:
        text += ["No trial has come to its end.", ""]
    else:
        text += [
            f"**Best:** {in_words(best.settings)}, {metric} {show(metric, best.value)} on validation data "
            f"and {show(metric, outcome.best_test)} on test data: `fedpews run {search.name}.best.toml`.",
            "",
            f"![{' × '.join(search.grid)}]({search.name}.png)",
            "",
        ]
    if outcome.importance:
        rows = [["key", "importance"], *([key, f"{part:.2f}"] for key, part in outcome.importance.items())]
        text += ["## What matters", "", "By PED-ANOVA, of reaching the best tenth of the trials.", ""]
        text += [markdown(rows), ""]
    text += ["## Trials", "", markdown(_rows(outcome)), ""]
    if len(outcome.tried) > SHOWN:
        text += [f"The {SHOWN} best of {len(outcome.tried)}.", ""]
    return "\n".join(text)


def _rows(outcome: SearchOutcome) -> list[list[str]]:
    goal = outcome.search.base.goal
    sign = -1 if goal.higher_is_better else 1

    def rank(one: Tried) -> tuple[bool, float]:
        return one.value is None, 0.0 if one.value is None else sign * one.value

    keys = list(outcome.search.grid)
    head = ["trial", *keys, f"{goal.metric} (validation)", "status"]
    rows = [
        [
            str(one.number),
            *(in_words({key: one.settings[key]}).partition(" = ")[2] for key in keys),
            "" if one.value is None else show(goal.metric, one.value),
            f"{one.state}: {one.note}" if one.note else one.state,
        ]
        for one in sorted(outcome.tried, key=rank)
    ]
    return [head, *rows[:SHOWN]]


def _importance(study: Study) -> dict[str, float]:
    import optuna
    from optuna.trial import TrialState

    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    # the best tenth of fewer is a single trial, which says nothing
    if len(done) < 10 or len({trial.value for trial in done}) == 1:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    with warnings.catch_warnings():
        # that few trials make it rough; that is on the page
        warnings.simplefilter("ignore")
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(part) for key, part in found.items()}


def draw_search(outcome: SearchOutcome) -> Figure:
    """How the best value rose, how much each key matters, and the two that matter most against each other."""
    search, metric = outcome.search, outcome.search.base.goal.metric
    keys = sorted(search.grid, key=lambda key: -outcome.importance.get(key, 0.0))
    figure = new_figure(12, 3.8)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 0.8, 1.3))
    _history(left, outcome, metric)
    parts = [outcome.importance.get(key, 0.0) for key in keys]
    middle.barh(range(len(keys)), parts, color="C0")
    middle.set_yticks(range(len(keys)), keys)
    middle.invert_yaxis()
    middle.set(title="importance", xlim=(0, 1))
    if not outcome.importance:
        middle.text(0.5, 0.5, "too few trials to say", ha="center", va="center", transform=middle.transAxes)
    done = [one for one in outcome.tried if one.value is not None]
    if len(keys) == 1:
        _against(right, search, keys[0], done, metric)
    else:
        _map(right, search, keys[0], keys[1], done)
        right.set_title(f"mean {metric} on validation data", fontsize=10)
    return figure


def _history(axes: Any, outcome: SearchOutcome, metric: str) -> None:
    better = max if outcome.search.base.goal.higher_is_better else min
    done = [(one.number, one.value) for one in outcome.tried if one.value is not None]
    best = [better(value for _, value in done[: i + 1]) for i in range(len(done))]
    axes.scatter([number for number, _ in done], [value for _, value in done], s=18, label="a trial")
    axes.step([number for number, _ in done], best, where="post", color="C1", label="the best so far")
    lost = [one.number for one in outcome.tried if one.state == "given up"]
    low = min(value for _, value in done)
    axes.scatter(lost, [low] * len(lost), s=18, marker="x", color="0.6", label="given up")
    axes.set(xlabel="trial", title=f"{metric} on validation data")
    axes.legend(fontsize=8)


def _against(axes: Any, search: Search, key: str, done: Sequence[Tried], metric: str) -> None:
    given = search.grid[key]
    values = [one.value for one in done]
    if isinstance(given, Range):
        axes.scatter([one.settings[key] for one in done], values, s=18)
        axes.set_xscale("log" if given.log else "linear")
    else:
        names = [str(value) for value in given]
        axes.scatter([names.index(str(one.settings[key])) for one in done], values, s=18)
        axes.set_xticks(range(len(names)), names)
    axes.set(xlabel=key, title=f"{metric} on validation data")


def _map(axes: Any, search: Search, down: str, across: str, done: Sequence[Tried]) -> None:
    (rows, row_of), (columns, column_of) = (_bins(search, key) for key in (down, across))
    cells: dict[tuple[int, int], list[float]] = {}
    for one in done:
        place = row_of(one.settings[down]), column_of(one.settings[across])
        cells.setdefault(place, []).append(one.value or 0.0)
    means = [
        [fmean(cells[i, j]) if (i, j) in cells else math.nan for j in range(len(columns))]
        for i in range(len(rows))
    ]
    plot_heatmap(axes, means, rows, columns, digits=3)
    axes.grid(False)
    axes.tick_params(axis="x", rotation=30)
    axes.set(xlabel=across, ylabel=down)


def _bins(search: Search, key: str) -> tuple[list[str], Any]:
    """The names of a key's places in the heat map, and the place of a value."""
    given = search.grid[key]
    if not isinstance(given, Range):
        names = [str(value) for value in given]
        return names, lambda value: names.index(str(value))
    scale = math.log if given.log else float
    low, high = scale(given.low), scale(given.high)
    whole = isinstance(given.low, int)
    count = min(BINS, int(given.high - given.low) + 1) if whole else BINS

    def bin_of(value: float) -> int:
        return min(count - 1, int((scale(value) - low) / (high - low) * count))

    if whole:
        members = [list(group) for _, group in groupby(range(int(given.low), int(given.high) + 1), bin_of)]
        names = [" to ".join(dict.fromkeys((str(one[0]), str(one[-1])))) for one in members]
        return names, lambda value: next(i for i, one in enumerate(members) if value <= one[-1])
    edges = [low + (high - low) * i / count for i in range(count + 1)]
    back = math.exp if given.log else float
    return [f"{back(a):.3g} to {back(b):.3g}" for a, b in pairwise(edges)], bin_of
