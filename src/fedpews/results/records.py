"""The records of a run, one for each seed and round, and what they add up to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError
from fedpews.results import layout

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]


class Rounds(Sequence[Record]):
    """The records of a run, a table with one row per seed and round.

    >>> Rounds([{"seed": 0, "round": 1, "accuracy": 0.5}]).column("accuracy")
    [0.5]
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __repr__(self) -> str:
        last = f", last {self._records[-1]}" if self._records else ""
        return f"<{len(self)} rounds of seeds {self.seeds}{last}>"

    @property
    def seeds(self) -> list[int]:
        return sorted({record["seed"] for record in self._records})

    def of_seed(self, seed: int) -> list[Record]:
        return [record for record in self._records if record["seed"] == seed]

    def column(self, name: str) -> list[Any]:
        """One value a record; None for a round that was not evaluated (``runtime.evaluate_every``)."""
        if not any(name in record for record in self._records):
            raise KeyError(name)
        return [record.get(name) for record in self._records]

    def to_pandas(self) -> pd.DataFrame:
        """The same as a DataFrame; needs pandas (``pip install fedpews[pandas]``)."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError("to_pandas() needs pandas: pip install 'fedpews[pandas]'") from error
        return pd.DataFrame(self._records)


def evaluated(records: Sequence[Record]) -> list[Record]:
    """The records of rounds after which the global model was evaluated; others say nothing about accuracy.

    >>> [record["round"] for record in evaluated([{"round": 1}, {"round": 2, "accuracy": 0.5}])]
    [2]
    """
    return [record for record in records if "accuracy" in record]


def rounds_to_target(records: Sequence[Record], target: float) -> int | None:
    """The first evaluated round whose accuracy reaches the target, or None."""
    return next((record["round"] for record in evaluated(records) if record["accuracy"] >= target), None)


def summarize(records: Sequence[Record], method: str, target: float) -> dict[str, Any]:
    """A run in a few numbers: final accuracy, rounds to the target, totals."""
    rounds = Rounds(records)
    runs = [evaluated(rounds.of_seed(seed)) for seed in rounds.seeds]
    # a run that is still going on, or was stopped, may not have been evaluated yet
    finals = [run[-1]["accuracy"] for run in runs if run]
    reached = [rounds_to_target(run, target) for run in runs]
    known = [value for value in reached if value is not None]
    everybody = len(known) == len(runs)
    return {
        "method": method,
        "seeds": rounds.seeds,
        "rounds": max((record["round"] for record in records), default=0),
        "target_accuracy": target,
        "final_accuracy": {"mean": _mean(finals), "std": _std(finals), "by_seed": finals},
        "best_accuracy": _mean([max(record["accuracy"] for record in run) for run in runs if run]),
        # a mean over only those seeds that got there would flatter, so it is null unless all did
        "rounds_to_target": {
            "mean": _mean(known) if everybody else None,
            "std": _std(known) if everybody else None,
            "by_seed": reached,
            "reached": len(known),
        },
        "totals": {
            "bytes_up": sum(record["bytes_up"] for record in records),
            "bytes_down": sum(record["bytes_down"] for record in records),
            "seconds": sum(record["seconds"] for record in records),
        },
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _std(values: Sequence[float]) -> float | None:
    """Over the runs seen, as papers report it: with n − 1; a single run has none."""
    return statistics.stdev(values) if len(values) > 1 else None


def read_rounds(path: Path) -> list[Record]:
    """The records of a run's folder; a last line cut off by a kill is left out."""
    file = path / layout.ROUNDS
    if not file.exists():
        raise ConfigError(f"{path} holds no run: there is no {layout.ROUNDS} in it")
    lines = file.read_text().split("\n")[:-1]  # what follows the last line's end is not a whole line
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
