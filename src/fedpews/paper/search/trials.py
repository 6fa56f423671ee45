"""The trials of a search: which one is next, whether one is hopeless, how each ended."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError, DataMissing, RunFailed, first_line, need_extra
from fedpews.paper.cells import Found
from fedpews.paper.search.holders import LOST_AFTER, Holder, attribute, holding, is_lost
from fedpews.paper.search.space import Search, distributions, in_words, settings_of
from fedpews.paper.study import Cell
from fedpews.paper.validation import Values

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

BY, MESSAGE, WHY = "by", "message", "pruned because"
"""Attributes of a trial: its holder, why it failed, why it was given up."""

REPORTS = 100
"""A trial reports about so many of its rounds: every report is a write to the storage."""
GRACE = 0.25
"""The part of the rounds behind the warmup in which no trial is judged: a warmup pays late."""
ALL_FAIL = 3
"""So many failures without a single success end the search: it is not the settings."""


@dataclass
class Begun:
    """A trial that runs."""

    trial: Trial
    cell: Cell
    settings: dict[str, Any]
    reported: set[int] = field(default_factory=set)
    is_hopeless: bool = False

    @property
    def label(self) -> str:
        return f"trial {self.trial.number}: {in_words(self.settings)}"


class Trials:
    """A study in a storage, as one process sees it; see `open_trials`."""

    def __init__(self, study: Study, search: Search, holder: Holder) -> None:
        self.study, self.search, self._holder = study, search, holder
        self._space = distributions(search.grid)

    def next(self) -> Begun | None:
        """The next trial, or None when there are as many as were asked for."""
        self.take_over()
        while len(self.counted()) < self.search.trials:
            trial = self.study.ask(self._space)
            trial.set_user_attr(BY, self._holder.name)
            settings = settings_of(self.search.grid, trial.params)
            try:
                return Begun(trial, self.search.cell(trial.number, settings), settings)
            except ConfigError as error:  # of values that do not go together
                self._fail(trial, str(error))
        return None

    def counted(self) -> list[FrozenTrial]:
        """The trials that were begun, but for those whose process died: they are run again."""
        from optuna.trial import TrialState

        return [
            trial
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state != TrialState.WAITING and not _was_killed(trial)
        ]

    def take_over(self) -> None:
        """Queue the trials again whose process is gone."""
        from optuna.trial import TrialState

        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        seen = self.study.user_attrs if running else {}
        for trial in running:
            name = trial.user_attrs.get(BY)
            if name is None:
                # killed between being asked for and being signed
                begun = trial.datetime_start
                lost = begun is None or time.time() - begun.timestamp() > LOST_AFTER
            else:
                lost = is_lost(self._holder, name, seen.get(attribute(name)))
            if not lost:
                continue
            try:
                self.study.tell(trial.number, state=TrialState.FAIL)
            except (ValueError, RuntimeError):  # another process was quicker
                continue
            self.study.enqueue_trial(trial.params)

    def report(self, begun: Begun, values: Sequence[tuple[int, float]]) -> bool:
        """Write what a trial has come to so far, as (round, validation metric); whether it is hopeless."""
        experiment = begun.cell.experiment
        every = math.ceil(experiment.rounds / REPORTS)
        W = experiment.warmup_rounds
        judged_from = W + math.ceil(GRACE * (experiment.rounds - W))
        for round, value in values:
            # the same rounds in every trial, since they are compared round by round
            if round % every or round in begun.reported or not math.isfinite(value):
                continue
            begun.reported.add(round)
            begun.trial.report(value, round)
            if round >= judged_from and round < experiment.rounds and begun.trial.should_prune():
                begun.is_hopeless = True
        return begun.is_hopeless

    def end(self, begun: Begun, found: Found) -> str:
        """Write how a trial ended; in words."""
        from optuna.trial import TrialState

        if not found.missing:
            values = curve(found)
            if not values:
                return self._fail(begun.trial, "the validation metric is undefined")
            begun.is_hopeless = False
            self.report(begun, values)
            self.study.tell(begun.trial, values[-1][1])
            return f"{begun.cell.experiment.goal.metric} {values[-1][1]:.4f} on validation data"
        # a loss that is no longer finite is what such settings lead to, and the sampler is to learn from it
        if begun.is_hopeless or found.error == RunFailed.__name__:
            why = "no better than the median of the others" if begun.is_hopeless else found.message
            begun.trial.set_user_attr(WHY, why)
            self.study.tell(begun.trial, state=TrialState.PRUNED)
            return f"given up: {why}"
        if found.status == "data missing":
            # leaves the trial unsigned for, so that it is run again where the data are
            raise DataMissing(found.message)
        told = self._fail(begun.trial, f"{found.status}: {found.message}")
        counted = self.counted()
        if len(counted) >= ALL_FAIL and all(trial.state == TrialState.FAIL for trial in counted):
            raise RunFailed(f"the first {len(counted)} trials all failed; the last: {found.message}")
        return told

    def _fail(self, trial: Trial, message: str) -> str:
        from optuna.trial import TrialState

        trial.set_user_attr(MESSAGE, message)
        self.study.tell(trial, state=TrialState.FAIL)
        return message


def curve(found: Found) -> list[tuple[int, float]]:
    """The validation metric of a finished cell after each round, over its seeds."""
    values = Values(found.cell.experiment.goal.metric, list(found.runs))
    records = sorted((r for run in found.runs.values() for r in run), key=lambda record: record["round"])
    return [
        pair
        for _, same in groupby(records, lambda record: record["round"])
        for pair in values.add(list(same))
    ]


def _was_killed(trial: FrozenTrial) -> bool:
    from optuna.trial import TrialState

    return trial.state == TrialState.FAIL and MESSAGE not in trial.user_attrs


@contextmanager
def open_trials(search: Search, root: Path, storage: str | None = None) -> Iterator[Trials]:
    """The study of a search in its storage, made if it is not there.

    Args:
        storage: a URL that Optuna's RDBStorage takes; by default a journal file beside the results.
    """
    optuna = need_extra("search", "optuna", "--search optuna")
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    root.mkdir(parents=True, exist_ok=True)
    try:
        opened = _storage(root / f"{search.name}.journal", storage)
        study = optuna.create_study(
            storage=opened,
            study_name=search.study_name,
            direction="maximize" if search.base.goal.higher_is_better else "minimize",
            load_if_exists=True,
        )
    except Exception as error:
        # database drivers have errors of their own, which cannot be named here
        raise ConfigError(f"--storage {storage or root}: {first_line(error)}") from error
    study.pruner = optuna.pruners.MedianPruner()
    with ExitStack() as stack:
        if storage is not None:
            stack.callback(opened.engine.dispose)
        holder = stack.enter_context(holding(root, study.set_user_attr))
        trials = Trials(study, search, holder)
        trials.take_over()
        known = study.get_trials(deepcopy=False)
        # The same search gives the same trials; but one that goes on must not draw its first ones again, nor two that
        # go on side by side the same.
        alone = not any(trial.state == TrialState.RUNNING for trial in known)
        study.sampler = optuna.samplers.TPESampler(seed=len(known) if alone else None)
        yield trials


def _storage(journal: Path, url: str | None) -> Any:
    import optuna
    from optuna.storages import journal as journals

    if url is not None:
        return optuna.storages.RDBStorage(url)
    # Windows lets only administrators make symbolic links
    lock = journals.JournalFileOpenLock(str(journal)) if os.name == "nt" else None
    return optuna.storages.JournalStorage(journals.JournalFileBackend(str(journal), lock))
