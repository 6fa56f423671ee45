"""A search for settings with Optuna: what is searched, its trials, and the best settings as a configuration.

Settings are chosen on validation data only.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

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
from fedpews.paper.cells import CellResult, Runner, report_validation
from fedpews.paper.cluster import Cluster
from fedpews.paper.page import Facts
from fedpews.paper.study import Cell, canonical
from fedpews.paper.sweep import Grid, Range, command
from fedpews.report.compare import markdown
from fedpews.results.files import write_atomically
from fedpews.results.records import evaluated, value_of
from fedpews.tasks.names import show

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

VALIDATION = 0.2
"""The fraction of each client's training samples for validation, if the configuration does not set one."""
REPORTS = 100
"""A trial reports about this many of its rounds: every report is a write to the storage."""
GRACE = 0.25
"""The fraction of the rounds after the warmup in which no trial is pruned: a warmup pays off late."""
ALL_FAIL = 3
"""The search ends after this many trials if all of them failed: the settings are not the reason."""
HEARTBEAT, LOST_AFTER = 60, 180
"""Seconds between two heartbeats of a trial, and without one until another process repeats the trial."""

SETTINGS, TEST, NOTE = "settings", "test", "note"
"""Attributes of a trial: its keys with their values, its metric on test data, and why it was pruned."""


class Pruned(Interrupted):
    """A trial is pruned. Its run stays as it is, and could be resumed."""


@dataclass(frozen=True)
class Search:
    """A search. The same search continues its study in the storage; a different one has a separate study."""

    config: str
    grid: Grid
    seeds: Sequence[int] | None
    fixed: Mapping[str, Any]
    trials: int
    adds_validation: bool = False
    """Whether ``fixed`` splits off validation data, because the configuration has none."""

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
        return self._load({})

    def experiment(self, settings: Mapping[str, Any]) -> Experiment:
        """The experiment with these values of the keys that are searched."""
        return canonical(self._load(settings))

    def _load(self, settings: Mapping[str, Any]) -> Experiment:
        seeds = {} if self.seeds is None else {"seeds": list(self.seeds)}
        return Experiment.load(self.config, {**self.fixed, **seeds, **settings})

    @property
    def command(self) -> str:
        """The command that runs it again."""
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
            "data.validation defines the data that the search chooses on, so it cannot be searched"
        )
    if base.stop.on == "test" and (base.stop.patience is not None or base.stop.best):
        raise ConfigError(
            "stop.on is 'test': a search chooses on validation data only; set stop.on=validation"
        )
    has_validation = base.data.validation is not None
    changed = fixed if has_validation else {**fixed, "data.validation": VALIDATION}
    search = Search(config, grid, seeds, changed, trials, adds_validation=not has_validation)
    # every key must exist and accept its values; a combination can still be impossible, which fails its trial
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
            step = int(given.step or 1)
            settings[key] = trial.suggest_int(key, given.low, given.high, log=given.log, step=step)
        else:
            settings[key] = trial.suggest_float(key, given.low, given.high, log=given.log, step=given.step)
    return settings


def in_words(settings: Mapping[str, Any]) -> str:
    """
    >>> in_words({"train.lr": 0.0123456, "method.name": "fedavg"})
    'train.lr = 0.01235, method.name = fedavg'
    """
    return ", ".join(f"{key} = {number(value)}" for key, value in settings.items())


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def open_study(search: Search, root: Path, storage: str | None = None) -> Iterator[Study]:
    """The study of a search in its storage, created if it does not exist; one process at a time in a folder.

    Args:
        storage: a URL that Optuna's RDBStorage takes; by default an SQLite file in the folder.
    """
    optuna = need_extra("search", "optuna", "--search optuna")
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
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
                storage or f"sqlite:///{root.resolve() / search.name}.db",
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
            if storage is None:
                # this process has the lock of the folder, so the processes that ran these trials are dead
                for trial in study.get_trials(states=(TrialState.RUNNING,)):
                    study.tell(trial.number, state=TrialState.FAIL)
                    retry(study, trial)
                # A new search samples the same trials each time. One that continues must not repeat its first trials.
                study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
            yield study
        finally:
            database.engine.dispose()


def ended(study: Study) -> list[FrozenTrial]:
    """The trials that count: finished or pruned. Those whose process died or was stopped run again."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in ("COMPLETE", "PRUNED")]


def has_failed(trial: FrozenTrial) -> bool:
    """Whether a trial was pruned because of an error."""
    return str(trial.user_attrs.get(NOTE, "")).startswith("failed")


def run_search(search: Search, study: Study, runner: Runner, cluster: Cluster | None = None) -> None:
    """Run trials until there are enough: one after the other here, or as many at once as there are workers."""
    import optuna

    # trials with the same settings share a run folder
    locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
    errors: list[BaseException] = []
    stop = threading.Event()

    def objective(trial: Trial) -> float:
        settings = suggest(trial, search.grid)
        trial.set_user_attr(SETTINGS, settings)
        try:
            cell = Cell(f"trial {trial.number}", "search", search.experiment(settings))
            runner.log(f"trial {trial.number}: {in_words(settings)}")
            report = _reporter(trial, cell.experiment)
            with locks[cell.name]:
                if cluster is None:
                    callback = report_validation(cell.experiment, report)
                    result = replace(runner, callbacks=[callback]).run(cell)
                else:
                    result = cluster.run(runner, cell, report, stop)
            return _value(trial, result)
        except (Pruned, ConfigError) as error:
            # the sampler learns from a pruned trial, also if its settings diverge or are impossible
            trial.set_user_attr(NOTE, str(error) if isinstance(error, Pruned) else f"failed: {error}")
            raise optuna.TrialPruned from error
        except (Interrupted, KeyboardInterrupt, DataMissing) as error:
            study.enqueue_trial(trial.params)
            errors.append(error)
            raise

    def after(study: Study, trial: FrozenTrial) -> None:
        metric = f"{search.base.goal.metric} {trial.value or 0.0:.4f} on validation data"
        note = trial.user_attrs.get(NOTE, "")
        runner.log(f"trial {trial.number}: {f'pruned: {note}' if note else metric}")
        trials = ended(study)
        if len(trials) >= ALL_FAIL and all(map(has_failed, trials)):
            raise RunFailed(f"the first {len(trials)} trials all failed; the last: {note}")

    if search.adds_validation:
        share = f"{VALIDATION:.0%} of each client's training samples"
        runner.log(f"{search.config} has no validation data: {share} become it (data.validation)")
    states = optuna.trial.TrialState
    counted = (states.COMPLETE, states.PRUNED, states.RUNNING)
    left = search.trials - len(study.get_trials(states=counted))
    if left <= 0:
        return
    # other processes may add trials to the same storage
    callbacks = [after, optuna.study.MaxTrialsCallback(search.trials, states=counted)]
    if cluster is None:
        study.optimize(objective, left, callbacks=callbacks)
        return
    workers = max(1, cluster.size)
    runner.log(f"trials at once: {workers}, as many as there are workers now")
    with stop_signal([stop.set, lambda: runner.log("stopping; trials are saved")]):
        study.optimize(objective, left, n_jobs=workers, callbacks=callbacks)
    # Optuna does not raise the errors of its last threads
    for error in errors:
        raise error


def _reporter(trial: Trial, experiment: Experiment) -> Callable[[int, float], None]:
    """A function that reports the validation metric after a round, and raises Pruned."""
    every, W = math.ceil(experiment.rounds / REPORTS), experiment.warmup_rounds
    first = W + math.ceil(GRACE * (experiment.rounds - W))

    def report(round: int, value: float) -> None:
        # the same rounds in every trial, since they are compared round by round
        if round % every or not math.isfinite(value):
            return
        trial.report(value, round)
        if first <= round < experiment.rounds and trial.should_prune():
            raise Pruned("no better than the median of the others")

    return report


def _value(trial: Trial, result: CellResult) -> float:
    """The validation metric of a finished cell, mean over seeds; the same on test data becomes an attribute."""
    if result.missing:
        if result.status == "data missing":
            raise DataMissing(result.message)
        busy_or_diverged = result.status in ("busy", "diverged")
        raise (Pruned if busy_or_diverged else ConfigError)(result.message)
    metric = result.cell.experiment.goal.metric
    last = [evaluated(run)[-1] for run in result.runs.values()]
    values = [value for record in last if (value := record["validation"].get(metric)) is not None]
    if len(values) < len(last):
        raise ConfigError("the validation metric is undefined")
    test = [value for record in last if (value := value_of(record, metric)) is not None]
    trial.set_user_attr(TEST, fmean(test) if test else None)
    return fmean(values)


def best_trial(study: Study) -> FrozenTrial | None:
    """The best finished trial; None if there is none."""
    finished = any(trial.state.name == "COMPLETE" for trial in ended(study))
    return study.best_trial if finished else None


def describe_best(search: Search, best: FrozenTrial) -> str:
    """The best settings and their metric on both kinds of data."""
    metric = search.base.goal.metric
    test = show(metric, best.user_attrs.get(TEST))
    return (
        f"best: {in_words(best.user_attrs[SETTINGS])}, {metric} {show(metric, best.value)} on validation data, "
        f"{test} on test data"
    )


def write_search(search: Search, study: Study, folder: Path) -> Path:
    """Write NAME.md with all trials, and NAME.best.toml if any is finished; the path of the page."""
    best, trials = best_trial(study), ended(study)
    base, keys = search.base, " × ".join(search.grid)
    finding = "No trial is finished."
    if best is not None:
        sentence = describe_best(search, best)
        finding = f"**{sentence[0].upper()}{sentence[1:]}**: `fedpews run {search.name}.best.toml`."
        comment = f"# The best of {len(trials)} trials on validation data, by\n# {search.command}\n\n"
        toml = comment + search.experiment(best.user_attrs[SETTINGS]).to_toml()
        write_atomically(folder / f"{search.name}.best.toml", toml.encode())
    rows = [["trial", *search.grid, f"{base.goal.metric} (validation)", "status"]]
    for trial in trials:
        is_done = trial.state.name == "COMPLETE"
        rows.append(
            [
                str(trial.number),
                *(number(trial.user_attrs[SETTINGS][key]) for key in search.grid),
                show(base.goal.metric, trial.value) if is_done else "",
                "done" if is_done else f"pruned: {trial.user_attrs.get(NOTE, '')}",
            ]
        )
    text = [
        f"# Search: {keys}",
        finding,
        f"    {search.command}",
        f"Seeds {', '.join(map(str, base.seeds))}. Settings are chosen by {base.goal.metric} on validation data "
        f"({base.data.validation:.0%} of each client's training samples) after the last round; the test data choose "
        "nothing.",
        "## Trials",
        markdown(rows),
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
