"""Everything the page shows, as one JSON document small enough to be part of it."""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Sequence
from itertools import accumulate
from math import ceil, inf, isfinite, nan
from typing import Any

import numpy as np

from fedpews.report.compare import Comparison, columns, compare, goal_text, remarks, table
from fedpews.report.plots import colors
from fedpews.report.runs import Run, settings
from fedpews.results import layout
from fedpews.results.masks import EACH_CLIENT_UP_TO, Ownership
from fedpews.results.records import COLUMNS, client_values, evaluated, value_of
from fedpews.results.schema import GIVEN
from fedpews.results.statistics import ENOUGH_SEEDS, SIGNIFICANT
from fedpews.tasks.names import is_share

NUMBERS = 160_000
"""At most so many numbers make up all curves (four bytes each): 6 runs × 5 seeds × 500 rounds × 10 curves fit."""

CLIENT_ROUNDS = 100
"""Clients' own curves have at most so many points."""

MASK_CHARACTERS = 500_000
"""At most so much of the page is masks."""

SHOWN_COUNTS = 4000
"""At most so many counts (clients × classes) of the data's split are drawn."""

CURVES = ("accuracy", "personal_accuracy", *COLUMNS)


def collect(runs: Sequence[Run]) -> dict[str, Any]:
    """The page's document. Curves are base64 of 32-bit floats; nan is no value."""
    stride, goal = _stride(runs), runs[0].goal
    compared = compare(runs)
    tints = colors([run.label for run in runs])
    # runs share what a page may hold, so that many runs do not make it too large to open
    budget = MASK_CHARACTERS // max(1, len(runs))
    notes = list(remarks(runs))
    if stride > 1:
        notes.append(f"Curves have every {stride}th round; the tables above them come from all rounds.")
    return {
        "title": ", ".join(run.label for run in runs),
        "headline": headline(runs, compared),
        "charts": {name: vars(column) for name, column in COLUMNS.items()},
        "notes": notes,
        "rule": f"A difference is called one with {ENOUGH_SEEDS} seeds or more, a bar that does not touch zero and "
        f"a corrected p (Holm) below {SIGNIFICANT}.",
        "target": goal.value,
        "metric": goal.metric.replace("_", " "),
        "key": goal.metric,
        "percent": is_share(goal.metric),
        "higher": goal.higher_is_better,
        "columns": list(columns(runs)),
        "table": [list(row) for row in table(runs)],
        "runs": [_run(run, stride, tints[run.label], budget) for run in runs],
        "comparisons": [_comparison(comparison, runs) for comparison in compared],
        "federations": _federations(runs),
        "settings": settings(runs),
    }


def headline(runs: Sequence[Run], compared: Sequence[Comparison]) -> list[str]:
    """Which run is better and by how much: of the later runs the one that ends highest, against the first."""
    # runs on different data, say, are no comparison to lead with
    fair = [comparison for comparison in compared if not comparison.obstacle]
    if fair:
        return max(fair, key=lambda comparison: comparison.final.mean).sentences
    return _single(runs[0]) + [sentence for comparison in compared for sentence in comparison.sentences]


def _single(run: Run) -> list[str]:
    """How one run ends, and whether it reaches its target."""
    final, goal, seeds = run.final, run.goal, len(run.summary["seeds"])
    if final["mean"] is None:
        return [f"{run.label}: the {goal.metric} is undefined on this test data."]
    digits, unit = (2, " %") if is_share(goal.metric) else (4, "")
    low, high = (f"{pick(final['by_seed']):.{digits}f}" for pick in (min, max))
    over = "in one seed" if seeds == 1 else f"on average over {seeds} seeds ({low} to {high}{unit})"
    verb = "ends" if run.finished else f"stands after round {run.rounds} of {run.planned}"
    words = goal.metric.replace("_", " ")
    sentences = [f"{run.label} {verb} at {final['mean']:.{digits}f}{unit} {words} {over}."]
    if goal.value is not None:
        reach, target = run.summary["rounds_to_target"], goal_text(goal)
        if reach["reached"] == seeds:
            sentences.append(f"It reaches {target} after {reach['mean']:.0f} rounds.")
        elif reach["reached"]:
            sentences.append(f"It reaches {target} in {reach['reached']} of {seeds} seeds.")
        else:
            sentences.append(f"It does not reach {target} within {run.rounds} rounds.")
    return sentences


def _stride(runs: Sequence[Run]) -> int:
    # two more curves than CURVES: bytes and seconds
    numbers = sum(run.rounds * len(run.by_seed) * (len(CURVES) + 2) for run in runs)
    return max(1, ceil(numbers / NUMBERS))


def _thin(count: int, stride: int) -> list[int]:
    """Every ``stride``th index, and always the first and the last.

    >>> _thin(8, 3)
    [0, 3, 6, 7]
    """
    indices = list(range(0, count, stride))
    return indices if not count or indices[-1] == count - 1 else [*indices, count - 1]


def _run(run: Run, stride: int, tint: tuple[str, str], budget: int) -> dict[str, Any]:
    indices = _thin(run.rounds, stride)
    seeds = list(run.by_seed)
    first = run.by_seed[seeds[0]]
    warm = [record["round"] for record in run.records if record["phase"] == "warmup"]
    keys = dict.fromkeys([*CURVES, run.goal.metric, f"personal_{run.goal.metric}"])
    columns = {key: column for key in keys if (column := _column(run, key)) is not None}
    sent = [[float(r["bytes_up"] + r["bytes_down"]) for r in rows] for rows in run.by_seed.values()]
    seconds = [[r["seconds"] for r in rows] for rows in run.by_seed.values()]
    return {
        "label": run.label,
        "light": tint[0],
        "dark": tint[1],
        "finished": run.finished,
        "round": run.rounds,
        "planned": run.planned,
        "warmup": max(warm, default=0),
        "seeds": seeds,
        "summary": run.summary,
        "final": run.final,
        "rounds": [first[index]["round"] for index in indices],
        "curves": {key: [_floats(values, indices) for values in column] for key, column in columns.items()},
        "bytes": [_floats(list(accumulate(values)), indices) for values in sent],
        "seconds": [_floats(list(accumulate(values)), indices) for values in seconds],
        "clients": _clients(run),
        "masks": _masks(run, budget),
        "again": _again(run),
    }


def _column(run: Run, key: str) -> list[list[float]] | None:
    """Each seed's values; None where they say nothing."""
    seeds = [
        [nan if (value := value_of(record, key)) is None else value for record in rows]
        for rows in run.by_seed.values()
    ]
    known = {value for values in seeds for value in values if isfinite(value)}
    # where every client trains the whole model, ownership is 1 throughout: no curve to show
    everything = key in COLUMNS and COLUMNS[key].unit == "share" and known == {1.0}
    return None if not known or everything else seeds


def _floats(values: Sequence[float], indices: Sequence[int]) -> str:
    # little-endian, as the page's Float32Array reads it on all common machines
    return b64encode(np.array([values[index] for index in indices], dtype="<f4").tobytes()).decode()


def _clients(run: Run) -> dict[str, Any]:
    """Each client's metric, mean over seeds."""
    names, metric = run.client_names, run.goal.metric
    rows = [evaluated(records) for records in run.by_seed.values()]
    if not any(client_values(record, metric) for records in rows for record in records[-1:]):
        missing = (
            f"With {len(names):,} clients, single clients' {metric.replace('_', ' ')} is not kept."
            if run.federation.get("counts") and len(names) > CLIENT_ROUNDS
            else "The server does not have the clients' data here, so it cannot say how well it serves each of them."
        )
        return {"names": [], "missing": missing}
    count = min(map(len, rows))
    indices = _thin(count, max(1, ceil(count / CLIENT_ROUNDS)))
    unknown = [None] * len(names)
    values = np.array(
        [[client_values(row[index], metric) or unknown for index in indices] for row in rows], dtype=float
    ).mean(0)  # (rounds, clients); nan where a seed has none
    return {
        "names": names,
        "rounds": [rows[0][index]["round"] for index in indices],
        "values": [_floats(line, range(len(indices))) for line in values.T],
        "final": [float(value) if np.isfinite(value) else None for value in values[-1]],
        # a client's own test samples, or the common ones of its classes
        "own": any("client_metrics" in row[-1] for row in rows),
    }


def _masks(run: Run, budget: int) -> dict[str, Any] | None:
    """Who owned what: all seeds and rounds if they fit, else some rounds of the first seed."""
    kept = run.neurons
    if not kept:
        single = any(record.get("density", 1.0) < 1.0 for record in run.records)
        return {"missing": "This method owns single weights, not neurons."} if single else None
    note = ""
    if _size(kept) > budget:
        kept = [record for record in kept if record.seed == kept[0].seed]
        kept = [kept[index] for index in _thin(len(kept), ceil(_size(kept) / budget))]
        note = (
            f"The page holds the masks of {len(kept)} rounds of seed {kept[0].seed}; neurons.jsonl has all."
        )
    total = int(run.federation.get("clients", 0))
    if total > EACH_CLIENT_UP_TO:
        note = (
            f"With {total:,} clients, more than {EACH_CLIENT_UP_TO}, only the part of each round's cohort that "
            f"owns a neuron is kept. {note}"
        )
    return {
        "names": run.client_names,
        "layers": run.federation.get("layers") or [{"name": "neurons", "start": 0, "size": kept[0].neurons}],
        "seeds": sorted({record.seed for record in kept}),
        "note": note.strip(),
        "rounds": [
            {key: getattr(record, key) for key in ("seed", "round", "clients", "owned", "owners", "theta")}
            for record in kept
        ],
    }


def _size(kept: Sequence[Ownership]) -> int:
    """About how many characters they take."""
    return sum(60 + len(r.owned or r.owners or "") + 4 * sum(map(len, r.theta or [])) for r in kept)


def _comparison(comparison: Comparison, runs: Sequence[Run]) -> dict[str, Any]:
    final = vars(comparison.final) | {"outcome": comparison.final.outcome}
    return {
        "other": list(runs).index(comparison.other),
        "base": list(runs).index(comparison.base),
        # JSON has no infinity
        "final": {
            key: None if value in (inf, -inf) or value != value else value for key, value in final.items()
        },
        "gains": list(comparison.gains.items()),
        "sentence": " ".join(comparison.sentences),
        "fair": not comparison.obstacle,
    }


def _federations(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """How the data is partitioned; once for runs on the same data."""
    federations = []
    for number, run in enumerate(runs):
        counts = run.federation.get("counts")
        if not counts or any(run.same_data(other) for other in runs[:number]):
            continue
        shown = max(1, min(len(counts), SHOWN_COUNTS // max(1, len(counts[0]))))
        classes = [str(name) for name in run.federation.get("class_names", [])]
        federations.append(
            {
                "name": str(run.config["data"].get("name", "")),
                "clients": run.client_names[:shown],
                "total": len(counts),
                "classes": classes or [str(number) for number in range(len(counts[0]))],
                "counts": counts[:shown],
            }
        )
    return federations


def _again(run: Run) -> dict[str, str]:
    """The command that makes the run again, and the configuration it reads."""
    assert run.path is not None, "a page is about folders"
    file, out = str(run.path / layout.CONFIG), f"{run.path}-again"
    # what was given in Python must be given there again
    given = {"model": "model=…", "data": "clients=…, test=…"}
    needed = [said for table, said in given.items() if run.config.get(table, {}).get("name") == GIVEN]
    command = f"fedpews run {shlex.quote(file)} --out {shlex.quote(out)}"
    if needed:
        command = f"fedpews.run({file!r}, {', '.join(needed)}, out={out!r})"
    return {"command": command, "config": (run.path / layout.CONFIG).read_text()}
