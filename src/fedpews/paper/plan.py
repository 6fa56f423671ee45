"""What a study would run, and how long it would take here: a few steps of each kind of run, timed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from fedpews.configs import override
from fedpews.errors import DataMissing, FedpewsError, Interrupted
from fedpews.experiment import Experiment
from fedpews.results.files import write_atomically
from fedpews.results.schema import Number, read_object
from fedpews.paper.cells import read_cell
from fedpews.paper.study import Cell, Scale, Study, canonical, cells, with_seeds
from fedpews.tables import FinetuneTable, PretrainTable

if TYPE_CHECKING:
    from fedpews.data import Federation

STEPS = {"eager": (3, 9), "compiled": (50, 250)}
"""Local steps in the two probes: the difference is what a step costs, the rest is what a round costs."""


PROBES = "probes.json"
"""Beside the runs: what was measured, for plans to come; remove it to measure again."""

Probes = dict[str, Annotated[list[Number], Field(min_length=2, max_length=2)]]
"""By kind of run and machine: seconds a seed of a warmup round and of a plain one."""


@dataclass(frozen=True)
class Planned:
    """A cell, and what is left to do of it."""

    cell: Cell
    missing: tuple[int, ...]
    seconds: float | None  # of all missing seeds; None when it cannot be run
    problem: str = ""


def plan(
    study: Study,
    root: Path,
    scale: Scale | None = None,
    data_dir: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Planned]:
    """Every cell with its missing seeds and the time they would take. Kinds of run are probed once each.

    What is left to run is listed first. A probe is kept in ``root``, so that a plan that was stopped goes on.
    """
    todo = [(cell, tuple(read_cell(root, cell).missing)) for cell in cells(study, scale)]
    for cell, missing in todo:
        if missing:
            place = f"{study.row_label(cell.row)}, {study.column_label(cell.column)}"
            seeds = ", ".join(map(str, missing))
            tell(f"{study.name}: {place}, {cell.experiment.rounds} rounds, seeds {seeds}")
    probes = root / "runs" / PROBES
    known: Probes = read_object(probes, Probes) if probes.exists() else {}
    for cell, missing in todo:
        if not missing:
            yield Planned(cell, (), 0.0)
            continue
        try:
            experiment = _rounds_alone(with_seeds(cell, missing).experiment)
            kind = f"{_kind(experiment).fingerprint()} on {platform.node()}, {os.cpu_count()} cores"
            if kind not in known:
                tell(f"probing {experiment.method_label} on {experiment.data.name}")
                known[kind] = list(round_seconds(experiment, data_dir))
                probes.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(probes, json.dumps(known, indent=1).encode())
            warm, plain = known[kind]
        except DataMissing as error:
            yield Planned(cell, missing, None, f"data missing: {error}")
            continue
        except Interrupted:
            # Ctrl-C or SIGTERM in a probe: whoever stops the plan does not want the next one
            raise
        except FedpewsError as error:
            yield Planned(cell, missing, None, str(error))
            continue
        W = experiment.warmup_rounds
        seconds = len(missing) * (W * warm + (experiment.rounds - W) * plain)
        yield Planned(cell, missing, seconds)


def round_seconds(experiment: Experiment, data_dir: Path | None = None) -> tuple[float, float]:
    """Seconds a seed of a warmup round and of a plain one, from runs of a few steps."""
    from fedpews.build import load_data
    from fedpews.running import run

    data = load_data(experiment, data_dir=data_dir)
    train = experiment.train
    size = train.batch_size
    steps = train.steps or (train.epochs or 1) * fmean(-(-len(rows) // size) for rows in data.clients)
    engine = engine_of(experiment, data)
    W = min(3, experiment.warmup_rounds)
    changes = {"rounds": 6, "runtime.engine": engine} | ({"warmup.rounds": W} if W else {})
    times = []
    for count in STEPS[engine]:
        values = override(experiment.to_dict(), changes | {"train.steps": count})
        records = run(Experiment(**values), clients=data).rounds
        times.append(
            [
                min([r["seconds"] for r in records if (r["phase"] == "warmup") == warm][-2:], default=0.0)
                for warm in (True, False)
            ]
        )
    few, many = STEPS[engine]
    warm, plain = (
        # with fewer steps than probed, noise in the difference must not eat up the whole round
        max(short + max(long - short, 0.0) / (many - few) * (steps - few), short * min(1.0, steps / few))
        for short, long in zip(*times, strict=True)
    )
    return warm, plain


def engine_of(experiment: Experiment, data: Federation) -> str:
    """The engine that the whole experiment would get."""
    from fedpews.build import build, build_engine

    engine, _ = build_engine(build(experiment, clients=data))
    engine.close()
    return engine.name


def _rounds_alone(experiment: Experiment) -> Experiment:
    """Without what comes before the first round and after the last: a probe would only spend time on it."""
    return experiment.model_copy(update={"pretrain": PretrainTable(), "finetune": FinetuneTable()})


def _kind(experiment: Experiment) -> Experiment:
    """What decides a round's time: not λ, rates, targets or how many rounds there are."""
    changes: dict[str, Any] = {
        "rounds": 100,
        "target_accuracy": 0.99,
        "train.lr": 0.001,
        "train.lr_milestones": [],
    }
    if experiment.warmup_kind != "none":
        changes["warmup.rounds"] = 50
    if experiment.warmup_kind in ("learned", "auto"):
        changes["warmup.diversity"] = 1.0
    values = override(experiment.to_dict(), changes)
    values["train"].pop("server_lr", None)
    return canonical(Experiment(**values))
