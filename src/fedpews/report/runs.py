"""Runs read back from their folders, finished or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedpews.config import flatten
from fedpews.errors import ConfigError
from fedpews.results import layout
from fedpews.results.files import is_expected
from fedpews.results.masks import Ownership, read_federation, read_neurons
from fedpews.results.records import Record, client_values, read_rounds, summarize
from fedpews.results.schema import read_config_file, read_summary
from fedpews.tasks.names import TASKS, Goal, is_share, short


@dataclass(frozen=True)
class Run:
    """A run as its folder has it now."""

    label: str
    path: Path | None  # None for a run that was not written to a folder
    records: list[Record]
    summary: dict[str, Any]
    config: dict[str, Any]
    finished: bool = True
    in_memory: tuple[dict[str, Any], list[Ownership]] = ({}, [])
    """What a run without a folder knows of its federation and its neurons."""

    @cached_property
    def by_seed(self) -> dict[int, list[Record]]:
        """Each seed's records, over the rounds that all seeds have."""
        by_seed: dict[int, list[Record]] = {seed: [] for seed in self.summary["seeds"]}
        for record in self.records:
            by_seed[record["seed"]].append(record)
        common = min(map(len, by_seed.values()))
        return {seed: records[:common] for seed, records in by_seed.items()}

    @cached_property
    def federation(self) -> dict[str, Any]:
        """Clients' names, counts of classes and layers."""
        return self.in_memory[0] if self.path is None else read_federation(self.path)

    @cached_property
    def neurons(self) -> list[Ownership]:
        """Who owned which neurons, in the rounds that were recorded."""
        kept = self.in_memory[1] if self.path is None else read_neurons(self.path)
        return [record for record in kept if record.round <= self.rounds]

    @property
    def rounds(self) -> int:
        """How many rounds all seeds have finished."""
        return len(next(iter(self.by_seed.values())))

    @property
    def planned(self) -> int:
        return int(self.config["rounds"])

    @property
    def goal(self) -> Goal:
        """The metric that has a target, and the target."""
        return Goal(self.summary["target_metric"], self.summary["target"])

    @property
    def final(self) -> dict[str, Any]:
        """The goal's metric after the last round, over seeds; shares in percent."""
        metric = self.goal.metric
        return {
            key: [scale(metric, number) for number in value] if key == "by_seed" else scale(metric, value)
            for key, value in self.summary["final"][metric].items()
        }

    @cached_property
    def client_names(self) -> list[str]:
        """Every client's name, or its number."""
        about, metric = self.federation, self.goal.metric
        values = next(filter(None, (client_values(record, metric) for record in self.records)), [])
        count = int(about.get("clients", len(values)))
        names = [str(name) for name in about.get("client_names", [])]
        return names if len(names) == count else [f"client {number}" for number in range(count)]

    def same_data(self, other: Run) -> bool:
        """Whether both trained on the same samples, in the same partition."""
        mine, its = self.federation.get("data"), other.federation.get("data")
        return bool(mine == its) if mine and its else bool(self.config["data"] == other.config["data"])


def find_runs(folders: Sequence[Path], only_ready: bool = False) -> list[Run]:
    """The runs in these folders, or one level below them.

    Args:
        only_ready: leave out, without an error, those that have not finished their first round.
    """
    runs = []
    for path in folders_of_runs(folders, missing_ok=only_ready):
        run = read_run(path)
        if run is not None:
            runs.append(run)
        elif not only_ready:
            raise ConfigError(f"{path}: the run has not finished its first round")
    labels = [run.label for run in runs]
    return [
        run if labels.count(run.label) == 1 else replace(run, label=f"{run.label} ({run.path})")
        for run in runs
    ]


def folders_of_runs(folders: Sequence[Path], missing_ok: bool = False) -> list[Path]:
    """These folders where they hold a run themselves, else those one level below that do."""
    paths: list[Path] = []
    for folder in folders:
        below = sorted(path.parent for path in folder.glob(f"*/{layout.ROUNDS}"))
        runs = [folder] if (folder / layout.ROUNDS).exists() else below
        if not runs and not missing_ok:
            raise ConfigError(
                f"{folder} is not a run folder: there is no rounds.jsonl in it or one level below"
            )
        paths += runs
    return list(dict.fromkeys(paths))


def read_run(path: Path) -> Run | None:
    """The run in a folder; None before all its seeds have finished a round."""
    records = read_rounds(path)
    config = read_config_file(path / layout.CONFIG)
    if {record["seed"] for record in records} != set(config["seeds"]):
        return None
    done = read_summary(path / layout.SUMMARY) if is_expected(path / layout.SUMMARY) else None
    if done is not None and set(done["seeds"]) != set(config["seeds"]):
        raise ConfigError(f"{path / layout.SUMMARY} and {layout.CONFIG} have different seeds")
    summary = done or summarize(records, config["method"]["name"], _goal(config))
    return Run(summary["method"], path, records, summary, config, done is not None)


def _goal(config: dict[str, Any]) -> Goal:
    """What an unfinished run is to reach; of a finished one the summary says so."""
    task = config.get("task", {})
    first = (task.get("metrics") or [TASKS.get(task.get("name", ""), "accuracy")])[0]
    metric = config.get("target_metric", short(first))
    return Goal(metric, config.get("target", config.get("target_accuracy") if metric == "accuracy" else None))


def settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Every key with its value in each run, as text."""
    flat = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    return [(key, [str(values.get(key, "")) for values in flat]) for key in keys]


def scale(metric: str, value: float | None) -> float | None:
    """A metric as it is shown: a part of a whole in percent."""
    return value if value is None or not is_share(metric) else 100 * value
