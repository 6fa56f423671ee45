"""What is searched: keys with their values or ranges, around an experiment that has validation data."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedpews.errors import ConfigError
from fedpews.experiment import Experiment, known_keys
from fedpews.paper.study import Cell, canonical
from fedpews.paper.sweep import Grid, Range, command, name_of

VALIDATION = 0.2
"""The part of each client's training samples that is held out where the configuration says nothing."""


@dataclass(frozen=True)
class Search:
    """A search as it was asked for. The same one goes on where it stopped; another has a study of its own."""

    config: str
    grid: Grid
    seeds: tuple[int, ...] | None
    fixed: Mapping[str, Any]
    trials: int
    adds_validation: bool = False
    """Whether validation data were held out though the configuration does not ask for any."""

    @property
    def name(self) -> str:
        return f"search-{name_of(self.config)}"

    @property
    def study_name(self) -> str:
        """In the storage: of all that makes two searches different, the number of trials aside."""
        space = {key: str(given) for key, given in self.grid.items()}
        text = json.dumps([self.base.fingerprint(), space], sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    @property
    def base(self) -> Experiment:
        return Experiment.load(self.config, self._changes)

    @property
    def _changes(self) -> dict[str, Any]:
        seeds = {} if self.seeds is None else {"seeds": list(self.seeds)}
        held_out = {"data.validation": VALIDATION} if self.adds_validation else {}
        return {**held_out, **self.fixed, **seeds}

    def experiment(self, settings: Mapping[str, Any]) -> Experiment:
        """The experiment with these values of the keys that are searched."""
        return canonical(Experiment.load(self.config, {**self._changes, **settings}))

    def cell(self, number: int, settings: Mapping[str, Any]) -> Cell:
        return Cell(f"trial {number}", "search", self.experiment(settings))

    @property
    def command(self) -> str:
        """What makes it again."""
        return f"{command(self.config, self.grid, self.seeds, self.fixed)} --search optuna --trials {self.trials}"


def plan_search(
    config: str, grid: Grid, trials: int, seeds: Sequence[int] | None, fixed: Mapping[str, Any]
) -> Search:
    """Check what was asked for, before anything runs; validation data are held out if there are none."""
    if not grid:
        names = ", ".join(list(known_keys())[:3])
        raise ConfigError(f"a search needs at least one --grid key=low..high; keys are {names}, ...")
    if trials < 1:
        raise ConfigError(f"--trials {trials}: give at least 1")
    chosen = None if seeds is None else tuple(seeds)
    base = Experiment.load(config, dict(fixed))
    if "data.validation" in grid:
        raise ConfigError(
            "data.validation decides on which data the search chooses, so it cannot be searched"
        )
    if base.stop.on == "test" and (base.stop.patience is not None or base.stop.best):
        raise ConfigError(
            "stop.on is 'test': a search chooses on validation data only; set stop.on=validation"
        )
    search = Search(config, grid, chosen, dict(fixed), trials, base.data.validation is None)
    # every key must exist and take its values; a combination can still be impossible, which is a failed trial
    for key, given in grid.items():
        for value in (given.low, given.high) if isinstance(given, Range) else given:
            _check(search, key, value)
    return search


def _check(search: Search, key: str, value: Any) -> None:
    others = {
        other: given.low if isinstance(given, Range) else given[0]
        for other, given in search.grid.items()
        if other != key
    }
    try:
        search.experiment({**others, key: value})
    except ConfigError as error:
        raise ConfigError(f"--grid {shlex.quote(key)}={value}: {error}") from error


def distributions(grid: Grid) -> dict[str, Any]:
    """The space in Optuna's terms. A choice is kept as JSON text: Optuna takes no lists."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, Any] = {}
    for key, given in grid.items():
        if not isinstance(given, Range):
            found[key] = CategoricalDistribution([json.dumps(value) for value in given])
        elif isinstance(given.low, int) and isinstance(given.high, int):
            found[key] = IntDistribution(given.low, given.high, given.log, int(given.step or 1))
        else:
            found[key] = FloatDistribution(given.low, given.high, given.log, given.step)
    return found


def settings_of(grid: Grid, params: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a trial's parameters, under the keys of a configuration."""
    return {
        key: params[key] if isinstance(given, Range) else json.loads(params[key])
        for key, given in grid.items()
        if key in params
    }


def in_words(settings: Mapping[str, Any]) -> str:
    """
    >>> in_words({"train.lr": 0.0123456, "method.name": "fedavg"})
    'train.lr = 0.01235, method.name = fedavg'
    """
    return ", ".join(
        f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {value}"
        for key, value in settings.items()
    )
