"""What a search ends with: the best settings as a configuration, and a page with Optuna's figures."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.paper.page import Facts, markdown
from fedpews.paper.search import NOTE, SETTINGS, TEST, Search, ended, in_words, number
from fedpews.results.files import write_atomically
from fedpews.tasks.names import show

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

ENOUGH = 10
"""Finished trials for importance: the best tenth of fewer is a single trial, which says nothing."""


def ranked(study: Study) -> list[FrozenTrial]:
    """The trials that have ended, the best first; pruned ones are last."""
    sign = -1 if study.direction.name == "MAXIMIZE" else 1

    def rank(trial: FrozenTrial) -> tuple[bool, float]:
        is_pruned = trial.state.name == "PRUNED"
        return is_pruned, 0.0 if is_pruned else sign * (trial.value or 0.0)

    return sorted(ended(study), key=rank)


def best_trial(study: Study) -> FrozenTrial | None:
    """The best finished trial; None if there is none."""
    return next((trial for trial in ranked(study) if trial.state.name == "COMPLETE"), None)


def importance(study: Study) -> dict[str, float]:
    """How much each key matters, with sum 1, by PED-ANOVA; empty with too few trials."""
    import optuna

    values = [trial.value for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    if len(values) < ENOUGH or len(set(values)) == 1:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few trials make it rough
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(share) for key, share in shares.items()}


def describe_best(search: Search, best: FrozenTrial) -> str:
    """The best settings and their metric on both kinds of data."""
    metric = search.base.goal.metric
    test = show(metric, best.user_attrs.get(TEST))
    return (
        f"best: {in_words(best.user_attrs[SETTINGS])}, {metric} {show(metric, best.value)} on validation data, "
        f"{test} on test data"
    )


def write_search(search: Search, study: Study, folder: Path) -> Path:
    """Write NAME.md with its figures, and NAME.best.toml if any trial is finished; the path of the page."""
    best, trials, shares = best_trial(study), ranked(study), importance(study)
    base, keys = search.base, " × ".join(search.grid)
    finding, figures = "No trial is finished.", []
    if best is not None:
        sentence = describe_best(search, best)
        finding = f"**{sentence[0].upper()}{sentence[1:]}**: `fedpews run {search.name}.best.toml`."
        figures = _draw(search, study, shares, folder)
        comment = f"# The best of {len(trials)} trials on validation data, by\n# {search.command}\n\n"
        toml = comment + search.experiment(best.user_attrs[SETTINGS]).to_toml()
        write_atomically(folder / f"{search.name}.best.toml", toml.encode())
    head = ["trial", *search.grid, f"{base.goal.metric} (validation)", "status"]
    rows = [_row(search, trial) for trial in trials]
    text = [
        f"# Search: {keys}",
        finding,
        *(f"![{keys}]({figure})" for figure in figures),
        f"    {search.command}",
        f"Seeds {', '.join(map(str, base.seeds))}. Settings are chosen by {base.goal.metric} on validation data "
        f"({base.data.validation:.0%} of each client's training samples) after the last round; the test data choose "
        "nothing.",
        "## Trials",
        markdown([head, *rows]),
    ]
    page = folder / f"{search.name}.md"
    page.write_text("\n\n".join(text) + "\n")
    Facts(
        name=search.name,
        item="Search",
        title=f"{keys} on {search.name.removeprefix('search-')}",
        command=search.command,
        seeds=len(base.seeds),
        cells=f"{len(trials)} of {search.trials}",
    ).write(folder)
    return page


def _row(search: Search, trial: FrozenTrial) -> list[str]:
    is_done, note = trial.state.name == "COMPLETE", trial.user_attrs.get(NOTE, "")
    values = [number(trial.user_attrs[SETTINGS][key]) for key in search.grid]
    metric = show(search.base.goal.metric, trial.value) if is_done else ""
    return [str(trial.number), *values, metric, "done" if is_done else f"pruned: {note}"]


def _draw(search: Search, study: Study, shares: Mapping[str, float], folder: Path) -> list[str]:
    """Optuna's figures as files: the trials in order, the importance of keys, and the two that matter most."""
    import matplotlib
    from matplotlib import pyplot
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization import matplotlib as plots

    name = f"{search.base.goal.metric} on validation data"
    keys = sorted(search.grid, key=lambda key: -shares.get(key, 0.0))[:2]
    # Optuna's plots change the global style, and are called experimental
    with matplotlib.rc_context({"backend": "agg"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes: dict[str, Any] = {"history": plots.plot_optimization_history(study, target_name=name)}
        if shares:
            axes["importance"] = plots.plot_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
        plot = plots.plot_contour if len(keys) == 2 else plots.plot_slice
        axes["map"] = plot(study, keys, target_name=name)
        for kind, drawn in axes.items():
            drawn.figure.savefig(folder / f"{search.name}-{kind}.png", dpi=110, bbox_inches="tight")
            pyplot.close(drawn.figure)
    return [f"{search.name}-{kind}.png" for kind in axes]
