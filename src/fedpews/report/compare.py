"""Runs side by side: who reaches the target first, who ends higher, and what it costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpews.errors import ConfigError
from fedpews.results import layout
from fedpews.results.records import Record, read_rounds, rounds_to_target, summarize


@dataclass(frozen=True)
class Run:
    """A run read back from its folder, finished or not."""

    label: str
    path: Path
    records: list[Record]
    summary: dict[str, Any]


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, or one level below them."""
    found: list[Path] = []
    for folder in folders:
        inside = (
            [folder]
            if (folder / layout.ROUNDS).exists()
            else sorted(p.parent for p in folder.glob("*/rounds.jsonl"))
        )
        if not inside:
            raise ConfigError(f"{folder} holds no run: there is no rounds.jsonl in it or one level below")
        found += inside
    runs = [_read(path) for path in found]
    labels = [run.label for run in runs]
    return [
        run
        if labels.count(run.label) == 1
        else Run(f"{run.label} ({run.path.name})", run.path, run.records, run.summary)
        for run in runs
    ]


def _read(path: Path) -> Run:
    import tomllib

    records = read_rounds(path)
    if not records:
        raise ConfigError(f"{path}: the run has not finished its first round")
    config = tomllib.loads((path / layout.CONFIG).read_text())
    file = path / layout.SUMMARY
    done = json.loads(file.read_text()) if file.exists() else None
    summary = done or summarize(records, config["method"]["name"], config["target_accuracy"])
    return Run(summary["method"], path, records, summary)


COLUMNS = ("method", "final %", "rounds", "seeds", "MB up", "MB down", "min")


def table(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """One row of text per run, in the order of ``COLUMNS``."""
    return [
        (
            run.label,
            _spread(run.summary["final_accuracy"], 100, 2),
            _spread(run.summary["rounds_to_target"], 1, 1) or "not all",
            f"{run.summary['rounds_to_target']['reached']}/{len(run.summary['seeds'])}",
            f"{run.summary['totals']['bytes_up'] / 1e6:.1f}",
            f"{run.summary['totals']['bytes_down'] / 1e6:.1f}",
            f"{run.summary['totals']['seconds'] / 60:.1f}",
        )
        for run in runs
    ]


def _spread(value: dict[str, Any], scale: float, digits: int) -> str:
    if value["mean"] is None:
        return ""
    return f"{scale * value['mean']:.{digits}f} ± {scale * value['std']:.{digits}f}"


def verdicts(runs: Sequence[Run]) -> list[str]:
    """A sentence for each later run against the first, paired by seed: seeds differ far more than methods."""
    base, sentences = runs[0], []
    for other in runs[1:]:
        seeds = sorted(set(base.summary["seeds"]) & set(other.summary["seeds"]))
        target = base.summary["target_accuracy"]
        if not seeds or target != other.summary["target_accuracy"]:
            sentences.append(
                f"{other.label} and {base.label} share no seed or target, so they cannot be paired."
            )
            continue
        faster = [_reach(other, seed, target) < _reach(base, seed, target) for seed in seeds]
        tied = [_reach(other, seed, target) == _reach(base, seed, target) for seed in seeds]
        higher = [_final(other, seed) > _final(base, seed) for seed in seeds]
        ties = f" ({sum(tied)} tied)" if any(tied) else ""
        sentences.append(
            f"{other.label} reaches {100 * target:g} % before {base.label} in {sum(faster)} of {len(seeds)} "
            f"seeds{ties} and ends higher in {sum(higher)} of {len(seeds)}."
        )
    return sentences


def _of_seed(run: Run, seed: int) -> list[Record]:
    return [record for record in run.records if record["seed"] == seed]


def _reach(run: Run, seed: int, target: float) -> float:
    reached = rounds_to_target(_of_seed(run, seed), target)
    return float("inf") if reached is None else reached


def _final(run: Run, seed: int) -> float:
    final: float = _of_seed(run, seed)[-1]["accuracy"]
    return final
