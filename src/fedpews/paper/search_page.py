"""What a search ends with: the best settings as a configuration, and a page with Optuna's figures."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedpews.paper.cells import Runner
from fedpews.paper.page import Facts, markdown
from fedpews.paper.search import NOTE, SETTINGS, VALIDATION, Search, counted, in_words
from fedpews.results.files import write_atomically
from fedpews.results.records import evaluated, value_of
from fedpews.tasks.names import show

if TYPE_CHECKING:
    from optuna import Study

SHOWN = 50
"""Trials in the page's table, the best first."""
ENOUGH = 10
"""Finished trials for importance: the best tenth of fewer is a single trial, which says nothing."""
STATES = {"COMPLETE": "done", "PRUNED": "given up", "FAIL": "failed"}


@dataclass(frozen=True)
class Tried:
    """A trial that has ended."""

    number: int
    settings: Mapping[str, Any]
    state: str  # of STATES
    value: float | None
    note: str = ""


@dataclass(frozen=True)
class SearchOutcome:
    """The trials of a search, the best first."""

    search: Search
    tried: list[Tried]
    importance: Mapping[str, float]
    """Of each key, with sum 1; empty with too few trials."""
    best_test: float | None = None
    """The metric of the best settings on test data, which choose nothing."""

    @property
    def ranked(self) -> list[Tried]:
        sign = -1 if self.search.base.goal.higher_is_better else 1
        return sorted(self.tried, key=lambda t: (t.value is None, 0.0 if t.value is None else sign * t.value))

    @property
    def best(self) -> Tried | None:
        return next((trial for trial in self.ranked if trial.value is not None), None)

    @property
    def failed(self) -> int:
        return sum(trial.state == "failed" and not trial.note.startswith("busy") for trial in self.tried)


def conclude_search(search: Search, study: Study, runner: Runner) -> SearchOutcome:
    """Every trial that has ended, and how much each key matters."""
    tried = [
        Tried(
            trial.number,
            trial.user_attrs.get(SETTINGS, {}),
            STATES[trial.state.name],
            trial.value if trial.state.name == "COMPLETE" else None,
            trial.user_attrs.get(NOTE, ""),
        )
        for trial in counted(study)
        if trial.state.name in STATES
    ]
    outcome = SearchOutcome(search, tried, _importance(study))
    if outcome.best is None:
        return outcome
    runs = runner.read(search.cell(outcome.best.number, outcome.best.settings)).runs
    finals = [value_of(evaluated(run)[-1], search.base.goal.metric) for run in runs.values()]
    known = [value for value in finals if value is not None]
    return replace(outcome, best_test=fmean(known) if known else None)


def _importance(study: Study) -> dict[str, float]:
    import optuna

    values = [trial.value for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    if len(values) < ENOUGH or len(set(values)) == 1:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few trials make it rough
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        importance = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(share) for key, share in importance.items()}


def write_search(outcome: SearchOutcome, study: Study, folder: Path) -> tuple[Path, Path | None]:
    """NAME.md with its figures, and NAME.best.toml if any trial is done; the paths of both."""
    search, best = outcome.search, outcome.best
    folder.mkdir(parents=True, exist_ok=True)
    toml, figures = None, []
    if best is not None:
        figures = _draw(outcome, study, folder)
        toml = folder / f"{search.name}.best.toml"
        head = f"# The best of {len(outcome.tried)} trials on validation data, by\n# {search.command}\n\n"
        write_atomically(toml, (head + search.experiment(best.settings).to_toml()).encode())
    page = folder / f"{search.name}.md"
    page.write_text(_page(outcome, figures))
    Facts(
        name=search.name,
        item="Search",
        title=f"{' × '.join(search.grid)} on {search.name.removeprefix('search-')}",
        command=search.command,
        seeds=len(search.base.seeds),
        cells=f"{len(outcome.tried)} of {search.trials}",
    ).write(folder)
    return page, toml


def _draw(outcome: SearchOutcome, study: Study, folder: Path) -> list[str]:
    """Optuna's figures as files: the trials in order, the importance of keys, and the two that matter most."""
    import matplotlib
    from matplotlib import pyplot
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization import matplotlib as plots

    search, name = outcome.search, f"{outcome.search.base.goal.metric} on validation data"
    keys = sorted(search.grid, key=lambda key: -outcome.importance.get(key, 0.0))[:2]
    files = []

    def save(kind: str, axes: Any) -> None:
        files.append(f"{search.name}-{kind}.png")
        axes.figure.savefig(folder / files[-1], dpi=110, bbox_inches="tight")
        pyplot.close(axes.figure)

    # Optuna's plots change the global style, and are called experimental
    with matplotlib.rc_context({"backend": "agg"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save("history", plots.plot_optimization_history(study, target_name=name))
        if outcome.importance:
            save("importance", plots.plot_param_importances(study, evaluator=PedAnovaImportanceEvaluator()))
        if len(keys) == 2:
            save("map", plots.plot_contour(study, keys, target_name=name))
        else:
            save("map", plots.plot_slice(study, keys, target_name=name))
    return files


def _page(outcome: SearchOutcome, figures: list[str]) -> str:
    search, best, metric = outcome.search, outcome.best, outcome.search.base.goal.metric
    validation = f" ({VALIDATION:.0%} of each client's training samples)" if search.adds_validation else ""
    text = [
        f"# Search: {' × '.join(search.grid)}",
        "",
        f"    {search.command}",
        "",
        f"Seeds {', '.join(map(str, search.base.seeds))}. Settings are chosen by {metric} on validation data"
        f"{validation} after the last round; the test data choose nothing.",
        "",
    ]
    if best is None:
        text += ["No trial is done.", ""]
    else:
        text += [
            f"**Best:** {in_words(best.settings)}, {metric} {show(metric, best.value)} on validation data "
            f"and {show(metric, outcome.best_test)} on test data: `fedpews run {search.name}.best.toml`.",
            "",
        ]
    for figure in figures:
        text += [f"![{' × '.join(search.grid)}]({figure})", ""]
    if outcome.importance:
        rows = [["key", "importance"], *([key, f"{share:.2f}"] for key, share in outcome.importance.items())]
        text += ["## What matters", "", "By PED-ANOVA, of reaching the best tenth of the trials.", ""]
        text += [markdown(rows), ""]
    head = ["trial", *search.grid, f"{metric} (validation)", "status"]
    rows = [
        [
            str(trial.number),
            *(in_words({key: trial.settings.get(key)}).partition(" = ")[2] for key in search.grid),
            "" if trial.value is None else show(metric, trial.value),
            f"{trial.state}: {trial.note}" if trial.note else trial.state,
        ]
        for trial in outcome.ranked[:SHOWN]
    ]
    text += ["## Trials", "", markdown([head, *rows]), ""]
    if len(outcome.tried) > SHOWN:
        text += [f"The {SHOWN} best of {len(outcome.tried)}.", ""]
    return "\n".join(text)
