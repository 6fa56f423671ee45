"""A search for settings with Optuna: what is searched, and its trials. Settings are chosen on validation data only."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shlex
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from filelock import FileLock, Timeout

from fedpews.callbacks import stop_signal
from fedpews.config import config_name
from fedpews.errors import (
    ConfigError,
    DataMissing,
    FolderInUse,
    Interrupted,
    RunFailed,
    first_line,
    need_extra,
)
from fedpews.experiment import Experiment, known_keys
from fedpews.paper.cells import CellResult, Runner, reporting
from fedpews.paper.cluster import Cluster
from fedpews.paper.measures import ValidationMeans
from fedpews.paper.study import Cell, canonical
from fedpews.paper.sweep import Grid, Range, command

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

VALIDATION = 0.2
"""The part of each client's training samples for validation, where the configuration says nothing."""
REPORTS = 100
"""A trial reports about this many of its rounds: every report is a write to the storage."""
GRACE = 0.25
"""The part of the rounds behind the warmup in which no trial is pruned: a warmup pays late."""
ALL_FAIL = 3
"""After this many failures without a success the search ends: the settings are not the reason."""
HEARTBEAT, LOST_AFTER = 60, 180
"""Seconds between two heartbeats of a trial, and without one until another process runs the trial again."""

SETTINGS, NOTE, FOLDER = "settings", "note", "folder"
"""Attributes of a trial: its keys with their values, why it failed or was pruned, and where it runs."""


class Hopeless(Interrupted):
    """A trial is pruned: its run stays as it is, and could be resumed."""


class Failed(Exception):
    """A trial has failed, with the reason in its note."""


@dataclass(frozen=True)
class Search:
    """A search. The same search continues its study in the storage; a different one has a study of its own."""

    config: str
    grid: Grid
    seeds: tuple[int, ...] | None
    fixed: Mapping[str, Any]
    trials: int
    adds_validation: bool = False
    """Whether validation data are split off although the configuration does not ask for any."""

    @property
    def name(self) -> str:
        return f"search-{config_name(self.config)}"

    @property
    def study_name(self) -> str:
        """In the storage: from all that makes two searches different, except the number of trials."""
        space = {key: str(given) for key, given in self.grid.items()}
        text = json.dumps([self.base.fingerprint(), space], sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    @cached_property
    def base(self) -> Experiment:
        return Experiment.load(self.config, self._changes)

    @property
    def _changes(self) -> dict[str, Any]:
        seeds = {} if self.seeds is None else {"seeds": list(self.seeds)}
        validation = {"data.validation": VALIDATION} if self.adds_validation else {}
        return {**validation, **self.fixed, **seeds}

    def experiment(self, settings: Mapping[str, Any]) -> Experiment:
        """The experiment with these values of the keys that are searched."""
        return canonical(Experiment.load(self.config, {**self._changes, **settings}))

    def cell(self, number: int, settings: Mapping[str, Any]) -> Cell:
        return Cell(f"trial {number}", "search", self.experiment(settings))

    @property
    def command(self) -> str:
        """The command that makes it again."""
        return f"{command(self.config, self.grid, self.seeds, self.fixed)} --search optuna --trials {self.trials}"


def plan_search(
    config: str, grid: Grid, trials: int, seeds: Sequence[int] | None, fixed: Mapping[str, Any]
) -> Search:
    """A search, checked before anything runs; it splits off validation data if the configuration has none."""
    if not grid:
        names = ", ".join(list(known_keys())[:3])
        raise ConfigError(f"a search needs at least one --grid key=low..high; keys are {names}, ...")
    if trials < 1:
        raise ConfigError(f"--trials {trials}: give at least 1")
    base = Experiment.load(config, dict(fixed))
    if "data.validation" in grid:
        raise ConfigError(
            "data.validation decides on which data the search chooses, so it cannot be searched"
        )
    if base.stop.on == "test" and (base.stop.patience is not None or base.stop.best):
        raise ConfigError(
            "stop.on is 'test': a search chooses on validation data only; set stop.on=validation"
        )
    chosen = None if seeds is None else tuple(seeds)
    search = Search(config, grid, chosen, dict(fixed), trials, base.data.validation is None)
    # every key must exist and accept its values; a combination can still be impossible, which is a failed trial
    ends = {
        key: [given.low, given.high] if isinstance(given, Range) else given for key, given in grid.items()
    }
    for key, values in ends.items():
        for value in values:
            try:
                search.experiment({other: some[0] for other, some in ends.items()} | {key: value})
            except ConfigError as error:
                raise ConfigError(f"--grid {shlex.quote(key)}={value}: {error}") from error
    return search


def suggest(trial: Trial, grid: Grid) -> dict[str, Any]:
    """A value for every key, as Optuna suggests it."""
    settings: dict[str, Any] = {}
    for key, given in grid.items():
        if not isinstance(given, Range):
            # Optuna takes no lists
            names = {value if isinstance(value, str | int | float) else str(value): value for value in given}
            settings[key] = names[trial.suggest_categorical(key, list(names))]
        elif isinstance(given.low, int) and isinstance(given.high, int):
            settings[key] = trial.suggest_int(
                key, given.low, given.high, log=given.log, step=int(given.step or 1)
            )
        else:
            settings[key] = trial.suggest_float(key, given.low, given.high, log=given.log, step=given.step)
    return settings


def in_words(settings: Mapping[str, Any]) -> str:
    """
    >>> in_words({"train.lr": 0.0123456, "method.name": "fedavg"})
    'train.lr = 0.01235, method.name = fedavg'
    """
    return ", ".join(
        f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {value}"
        for key, value in settings.items()
    )


@contextmanager
def open_study(search: Search, root: Path, storage: str | None = None) -> Iterator[Study]:
    """The study of a search in its storage, created if it does not exist; one process at a time in a folder.

    Args:
        storage: a URL that Optuna's RDBStorage takes; by default an SQLite file in the folder.
    """
    optuna = need_extra("search", "optuna", "--search optuna")
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    root = root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(root / f".{search.name}.lock", timeout=0).acquire()
    except Timeout:
        raise FolderInUse(
            f"another process is running {search.name} in {root}; use --on for several trials at once, or --storage "
            "and another folder"
        ) from None
    with lock, warnings.catch_warnings():
        # heartbeats are as old as Optuna 2.9, and still called experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        retry = optuna.storages.RetryHeartbeatStaleTrialCallback()
        try:
            database = optuna.storages.RDBStorage(
                storage or f"sqlite:///{root / search.name}.db",
                heartbeat_interval=HEARTBEAT,
                grace_period=LOST_AFTER,
                heartbeat_stale_trial_callback=retry,
            )
            study = optuna.create_study(
                storage=database,
                study_name=search.study_name,
                direction="maximize" if search.base.goal.higher_is_better else "minimize",
                pruner=optuna.pruners.MedianPruner(),
                load_if_exists=True,
            )
        except Exception as error:
            # database drivers have errors of their own, which cannot be named here
            raise ConfigError(f"--storage {storage or root}: {first_line(error)}") from error
        try:
            optuna.storages.fail_stale_trials(study)
            running = study.get_trials(states=(TrialState.RUNNING,))
            for trial in running:
                # this process has the lock of the folder, so the process that ran the trial there is dead
                if storage is None or trial.user_attrs.get(FOLDER) == _folder(root):
                    study.tell(trial.number, state=TrialState.FAIL)
                    retry(study, trial)
            # The same search draws the same trials. One that continues must not draw its first trials again, nor
            # two that run at the same time the same ones.
            alone = storage is None or not running
            study.sampler = optuna.samplers.TPESampler(seed=len(study.trials) if alone else None)
            yield study
        finally:
            database.engine.dispose()


def _folder(root: Path) -> str:
    return f"{platform.node()}:{root}"


def counted(study: Study) -> list[FrozenTrial]:
    """The trials that have begun, except those whose process died or was stopped: they run again."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name != "WAITING" and not (trial.state.name == "FAIL" and NOTE not in trial.user_attrs)
    ]


def run_search(search: Search, study: Study, runner: Runner, cluster: Cluster | None = None) -> None:
    """Run trials until there are enough: one after the other here, or as many at once as there are workers."""
    # trials with the same settings share a run folder
    locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
    errors: list[BaseException] = []

    def objective(trial: Trial) -> float:
        import optuna

        settings = suggest(trial, search.grid)
        trial.set_user_attr(SETTINGS, settings)
        trial.set_user_attr(FOLDER, _folder(runner.root.resolve()))
        try:
            cell = search.cell(trial.number, settings)
            runner.log(f"trial {trial.number}: {in_words(settings)}")
            report = _reporter(trial, cell.experiment)
            with locks[cell.name]:
                if cluster is None:
                    result = replace(runner, callbacks=reporting(runner.callbacks, report)).run(cell)
                else:
                    result = cluster.run(runner, cell, report, stop)
            return _value(result, report)
        except (Hopeless, RunFailed) as error:
            # also settings that diverge: the sampler learns from a pruned trial
            note, failure = str(error), optuna.TrialPruned()
        except (Interrupted, KeyboardInterrupt, DataMissing) as error:
            study.enqueue_trial(trial.params)
            errors.append(error)
            raise
        except (ConfigError, Failed) as error:
            note, failure = str(error), Failed()
        trial.set_user_attr(NOTE, note)
        raise failure

    def ended(study: Study, trial: FrozenTrial) -> None:
        state, note = trial.state.name, trial.user_attrs.get(NOTE, "")
        metric = f"{search.base.goal.metric} {trial.value or 0.0:.4f} on validation data"
        runner.log(
            f"trial {trial.number}: " + {"COMPLETE": metric, "PRUNED": f"given up: {note}"}.get(state, note)
        )
        trials = counted(study)
        if len(trials) >= ALL_FAIL and all(trial.state.name == "FAIL" for trial in trials):
            raise RunFailed(f"the first {len(trials)} trials all failed; the last: {note}")
        if len(trials) >= search.trials:
            study.stop()

    left = search.trials - len(counted(study))
    if left <= 0:
        return
    # a run in this process handles signals itself
    workers, signals = 1, cast("AbstractContextManager[threading.Event]", nullcontext(threading.Event()))
    if cluster is not None:
        workers, signals = (
            max(1, cluster.size),
            stop_signal([lambda: runner.log("stopping; trials are saved")]),
        )
        runner.log(f"trials at once: {workers}, as many as there are workers now")
    with signals as stop:
        study.optimize(objective, left, n_jobs=workers, callbacks=[ended], catch=(Failed,))
    # Optuna does not raise the errors of its last threads
    for error in errors:
        raise error


def _reporter(trial: Trial, experiment: Experiment) -> Callable[[int, float], None]:
    """A function that reports the validation metric after a round, and raises Hopeless to prune the trial."""
    every, W = math.ceil(experiment.rounds / REPORTS), experiment.warmup_rounds
    first = W + math.ceil(GRACE * (experiment.rounds - W))
    reported: set[int] = set()

    def report(round: int, value: float) -> None:
        # the same rounds in every trial, since they are compared round by round
        if round % every or round in reported or not math.isfinite(value):
            return
        reported.add(round)
        trial.report(value, round)
        if first <= round < experiment.rounds and trial.should_prune():
            raise Hopeless("no better than the median of the others")

    return report


def _value(result: CellResult, report: Callable[[int, float], None]) -> float:
    """The validation metric of a finished cell after the last round; also reports the rounds that nobody saw."""
    if result.missing:
        if result.status == "stopped":
            raise Interrupted(result.message)
        if result.status == "data missing":
            raise DataMissing(result.message)
        if result.error == RunFailed.__name__:
            raise RunFailed(result.message)
        raise Failed(f"{result.status}: {result.message}")
    means = ValidationMeans(result.cell.experiment.goal.metric, list(result.runs))
    records = sorted(result.records, key=lambda record: record["round"])
    rounds = groupby(records, lambda record: record["round"])
    values = [pair for _, same in rounds for pair in means.add(list(same))]
    if not values:
        raise Failed("the validation metric is undefined")
    for pair in values:
        try:
            report(*pair)
        except Hopeless:
            continue  # it is finished anyway
    return values[-1][1]
