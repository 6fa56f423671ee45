"""What a study would run, and for how long on this machine: a few steps of each kind of run, timed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from fedpews.config import FinetuneTable, PretrainTable, override
from fedpews.errors import DataMissing, FedpewsError, Interrupted
from fedpews.experiment import Experiment
from fedpews.paper.cells import Runner
from fedpews.paper.study import Cell, Scale, Study, canonical, cells
from fedpews.results.files import write_atomically
from fedpews.results.schema import Number, read_object

STEPS = {"eager": (3, 9), "compiled": (50, 250)}
"""Local steps in the two probes: the difference is the time of a step, the rest that of a round."""

PROBES = "probes.json"
"""Beside the runs: the measured times, for later plans; remove it to measure again."""

Probes = dict[str, Annotated[list[Number], Field(min_length=2, max_length=2)]]
"""By kind of run and machine: seconds per seed of a warmup round and of a plain one."""


@dataclass(frozen=True)
class Planned:
    """A cell and its missing seeds."""

    cell: Cell
    missing: tuple[int, ...]
    seconds: float | None  # of all missing seeds; None if it cannot run
    problem: str = ""


def plan(study: Study, runner: Runner, scale: Scale | None = None) -> Iterator[Planned]:
    """Every cell with its missing seeds and the time they take. Each kind of run is probed once.

    What is left to run is logged first. Probes are kept in the runner's folder, so that a stopped plan continues.
    """
    todo = [(cell, tuple(runner.read(cell).missing)) for cell in cells(study, scale)]
    for cell, missing in todo:
        if missing:
            seeds = ", ".join(map(str, missing))
            runner.log(f"{study.name}: {study.label(cell)}, {cell.experiment.rounds} rounds, seeds {seeds}")
    probes = runner.root / "runs" / PROBES
    known: Probes = read_object(probes, Probes) if probes.exists() else {}
    for cell, missing in todo:
        if not missing:
            yield Planned(cell, (), 0.0)
            continue
        # a probe must not spend time on what comes before the first round and after the last
        changes = {"seeds": list(missing), "pretrain": PretrainTable(), "finetune": FinetuneTable()}
        experiment = cell.experiment.model_copy(update=changes)
        try:
            kind = f"{_kind(experiment).fingerprint()} on {platform.node()}, {os.cpu_count()} cores"
            if kind not in known:
                runner.log(f"probing {experiment.method_label} on {experiment.data.name}")
                known[kind] = list(round_seconds(experiment, runner.data_dir))
                probes.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(probes, json.dumps(known, indent=1).encode())
        except Interrupted:
            raise
        except FedpewsError as error:
            yield Planned(cell, missing, None, "data missing: " * isinstance(error, DataMissing) + str(error))
            continue
        W, (warm, plain) = experiment.warmup_rounds, known[kind]
        yield Planned(cell, missing, len(missing) * (W * warm + (experiment.rounds - W) * plain))


def round_seconds(experiment: Experiment, data_dir: Path | None = None) -> tuple[float, float]:
    """Seconds per seed of a warmup round and of a plain one, from runs of a few steps."""
    from fedpews.build import build, build_engine, load_data
    from fedpews.running import run

    data = load_data(experiment, data_dir=data_dir)
    train = experiment.train
    size = train.batch_size
    steps = train.steps or (train.epochs or 1) * fmean(-(-len(rows) // size) for rows in data.clients)
    full, _ = build_engine(build(experiment, clients=data))
    full.close()
    engine = full.name
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
        # with fewer steps than probed, noise in the difference must not cancel the whole round
        max(short + max(long - short, 0.0) / (many - few) * (steps - few), short * min(1.0, steps / few))
        for short, long in zip(*times, strict=True)
    )
    return warm, plain


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
