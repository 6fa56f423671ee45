"""The records of a run, one for each seed and round, and their summary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedpews.errors import ConfigError, need_extra
from fedpews.outside import shaped
from fedpews.results import layout
from fedpews.results.files import is_expected
from fedpews.results.schema import RecordShape, Values, read_lines
from fedpews.tasks.names import Goal, higher_is_better

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A number of each round, besides the metrics of the task.

    Args:
        title: the title of its chart.
        text: one sentence below the chart.
        unit: a share is drawn in percent, from 0 to 100; a cosine with a line at 0.
    """

    title: str
    text: str
    unit: Literal["", "share", "cosine"] = ""


COLUMNS = {
    "loss": Column("Test loss", "The global model on the test data."),
    "train_loss": Column("Training loss", "Mean over the clients of the round, on their own data."),
    "update_cosine": Column(
        "Do the clients' updates agree?",
        "Mean cosine between the updates of two clients, on the weights both own. Below 0 they cancel out.",
        "cosine",
    ),
    "density": Column("What a client trains", "Share of the neurons, mean over clients.", "share"),
    "coverage": Column(
        "What the clients train together", "Share of the neurons that at least one client owns.", "share"
    ),
    "overlap": Column(
        "What two clients share", "Neurons both own, of those either owns; mean over pairs.", "share"
    ),
}
"""The columns that the report draws: the only list of them. `fedpews.measure` computes them."""


class Rounds(list[Record]):
    """The records of a run, a table with one row per seed and round.

    >>> Rounds([{"seed": 0, "round": 1, "accuracy": 0.5}]).column("accuracy")
    [0.5]
    """

    def __repr__(self) -> str:
        last = f", last {self[-1]}" if self else ""
        return f"<{len(self)} rounds of seeds {self.seeds}{last}>"

    @property
    def seeds(self) -> list[int]:
        return sorted({record["seed"] for record in self})

    def of_seed(self, seed: int) -> list[Record]:
        return [record for record in self if record["seed"] == seed]

    def column(self, name: str) -> list[Any]:
        """One value a record; None for a round that was not evaluated (``runtime.evaluate_every``)."""
        if not any(name in record for record in self):
            raise KeyError(name)
        return [record.get(name) for record in self]

    def to_pandas(self) -> pd.DataFrame:
        """The same as a DataFrame, with columns such as ``metrics.auroc``; needs pandas (``fedpews[pandas]``)."""
        frame: pd.DataFrame = need_extra("pandas", "pandas", "to_pandas()").json_normalize([*self])
        return frame


def evaluated(records: Sequence[Record]) -> list[Record]:
    """The records of rounds after which the global model was evaluated.

    >>> [record["round"] for record in evaluated([{"round": 1}, {"round": 2, "accuracy": 0.5}])]
    [2]
    """
    return [record for record in records if "metrics" in record or "accuracy" in record]


def value_of(record: Record, metric: str) -> float | None:
    """A metric of the global model on test data; None if it is undefined or was not measured.

    >>> value_of({"accuracy": 0.5, "metrics": {"accuracy": 0.5, "auroc": 0.7}}, "auroc")
    0.7
    """
    value = record.get("metrics", {}).get(metric, record.get(metric))
    return None if value is None else float(value)


def client_values(record: Record, metric: str) -> list[float | None] | None:
    """A metric of the global model for every client: on its own test samples, or else (accuracy) on its own classes.

    >>> client_values({"client_metrics": {"mae": [0.5, None]}}, "mae")
    [0.5, None]
    """
    values: list[float | None] | None = record.get("client_metrics", {}).get(metric)
    return record.get("client_accuracy") if values is None and metric == "accuracy" else values


def rounds_to_target(records: Sequence[Record], goal: Goal) -> int | None:
    """The first round whose metric reaches the goal, or None."""
    return next((r["round"] for r in records if goal.is_reached(value_of(r, goal.metric))), None)


def summarize(
    records: Sequence[Record], method: str, goal: Goal, client_names: Sequence[str] = ()
) -> dict[str, Any]:
    """A run in a few numbers: the last round's metrics, rounds to the target, totals.

    ``measured_on`` says on which data. The best round is chosen on validation data, or not at all.
    """
    rounds = Rounds(records)
    every = [evaluated(rounds.of_seed(seed)) for seed in rounds.seeds]
    # a run that is still going on, or was stopped, may not have been evaluated yet
    runs = [run for run in every if run]
    measured = runs[-1][-1].get("metrics", {}) if runs else {}
    metrics = dict.fromkeys([goal.metric, *measured])
    finals = {metric: [value_of(run[-1], metric) for run in runs] for metric in metrics}
    reached = [rounds_to_target(run, goal) for run in every]
    accuracy = {"target_accuracy": goal.value, "final_accuracy": _over_seeds(finals[goal.metric])}
    return {
        "method": method,
        "seeds": rounds.seeds,
        "rounds": max((record["round"] for record in records), default=0),
        "target_metric": goal.metric,
        "target": goal.value,
        "higher_is_better": goal.higher_is_better,
        **(accuracy if goal.metric == "accuracy" else {}),
        "final": {metric: _over_seeds(values) for metric, values in finals.items()},
        **_by_client(runs, client_names),
        **_chosen(runs, goal),
        "rounds_to_target": _over_seeds(reached) | {"reached": sum(value is not None for value in reached)},
        "measured_on": _measured_on(records),
        "totals": {
            "bytes_up": sum(record["bytes_up"] for record in records),
            "bytes_down": sum(record["bytes_down"] for record in records),
            "seconds": sum(record["seconds"] for record in records),
        },
    }


def _by_client(runs: Sequence[Sequence[Record]], names: Sequence[str]) -> dict[str, Any]:
    """Each client's metrics on its own test data after the last round, the worst, and how far they are apart."""
    lasts = [run[-1].get("client_metrics") for run in runs]
    if not lasts or any(last is None for last in lasts):
        return {}
    metrics: dict[str, Any] = {}
    for metric in lasts[0] or {}:
        columns = list(zip(*((last or {})[metric] for last in lasts), strict=True))
        by_client = [[value for value in column if value is not None] for column in columns]
        known = {
            (names[client] if names else str(client)): statistics.fmean(values)
            for client, values in enumerate(by_client)
            if values
        }
        if known:
            worst = (min if higher_is_better(metric) else max)(known, key=lambda name: known[name])
            means = list(known.values())
            metrics[metric] = {
                "by_client": known,
                "worst": known[worst],
                "worst_client": worst,
                "std": statistics.pstdev(means),
                "gap": max(means) - min(means),
            }
    return {"clients": metrics}


def _chosen(runs: Sequence[Sequence[Record]], goal: Goal) -> dict[str, Any]:
    """The round that is best on validation data, and its metric on the test data."""
    chosen = []
    for run in runs:
        seen = [(record["validation"].get(goal.metric), record) for record in run if "validation" in record]
        known = [(value, record) for value, record in seen if value is not None]
        if not known:
            return {}
        value, best = (max if goal.higher_is_better else min)(known, key=lambda pair: pair[0])
        chosen.append({"round": best["round"], "validation": value, "test": value_of(best, goal.metric)})
    return {
        "best_on_validation": {
            "metric": goal.metric,
            "by_seed": chosen,
            "test": _over_seeds([seed["test"] for seed in chosen]),
        }
    }


def _measured_on(records: Sequence[Record]) -> dict[str, str]:
    last = (evaluated(records) or [{}])[-1]
    by_client = "client_metrics" in last
    test = "the clients' own test data together" if by_client else "the common test data"
    data = {"final": test, "rounds_to_target": test}
    if by_client:
        data["clients"] = "each client's own test data"
    elif "client_accuracy" in last:
        data["client_accuracy"] = "the common test data, weighted by each client's classes"
    if "validation" in last:
        data["best_on_validation"] = "the round is chosen on validation data, its test value is " + test
    return data


def _over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """The mean and the standard deviation with n − 1, as papers report it; a single run has none.

    A mean over only the seeds that reached a target would be too good, so one unknown value makes both unknown.
    """
    known = [value for value in values if value is not None]
    all_known = len(known) == len(values)
    return {
        "mean": statistics.fmean(known) if known and all_known else None,
        "std": statistics.stdev(known) if len(known) > 1 and all_known else None,
        "by_seed": list(values),
    }


def read_rounds(path: Path) -> list[Record]:
    """The records of a run's folder."""
    file = path / layout.ROUNDS
    if not is_expected(file):
        raise ConfigError(f"{path} is not a run folder: it has no {layout.ROUNDS}")
    records: list[Record] = read_lines(file, RecordShape)
    for record in records:
        drawn = {name: record[name] for name in COLUMNS if name in record}
        shaped(Values, drawn, f"{file}, round {record['round']}")
    # either every evaluation has the metrics of single clients, and of as many, or none has
    lengths = set()
    for record in evaluated(records):
        columns = {"": record.get("client_accuracy")} | record.get("client_metrics", {})
        lengths.add(
            tuple(sorted((key, len(values)) for key, values in columns.items() if values is not None))
        )
    if len(lengths) > 1 or len({length for columns in lengths for _, length in columns}) > 1:
        raise ConfigError(f"{file} is damaged: its lines are not about the same clients")
    return records
