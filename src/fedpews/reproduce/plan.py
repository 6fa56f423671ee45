"""What a study would run, and how long it would take here: a few steps of each kind of run, timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fedpews.errors import DataMissing, FedpewsError
from fedpews.experiment import Experiment, override
from fedpews.reproduce.cells import read_cell
from fedpews.reproduce.study import Cell, Scale, Study, canonical, cells, with_seeds

SHORT, LONG = 3, 9
"""Local steps in the two probes: the difference is what a step costs, the rest is what a round costs."""


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
) -> list[Planned]:
    """Every cell with its missing seeds and the time they would take. Kinds of run are probed once each."""
    known: dict[str, tuple[float, float]] = {}
    planned = []
    for cell in cells(study, scale):
        missing = tuple(read_cell(root, cell).missing)
        if not missing:
            planned.append(Planned(cell, (), 0.0))
            continue
        try:
            experiment = with_seeds(cell, missing).experiment
            kind = _kind(experiment)
            if kind.fingerprint() not in known:
                tell(f"probing {kind.method_label} on {kind.data.name}")
                known[kind.fingerprint()] = round_seconds(kind, data_dir)
            warm, plain = known[kind.fingerprint()]
        except DataMissing as error:
            planned.append(Planned(cell, missing, None, f"data missing: {error}"))
            continue
        except FedpewsError as error:
            planned.append(Planned(cell, missing, None, str(error)))
            continue
        W = experiment.warmup_rounds
        seconds = len(missing) * (W * warm + (experiment.rounds - W) * plain)
        planned.append(Planned(cell, missing, seconds))
    return planned


def round_seconds(experiment: Experiment, data_dir: Path | None = None) -> tuple[float, float]:
    """Seconds a seed of a warmup round and of a plain one, from runs of a few steps."""
    import fedpews.data as data_room
    from fedpews.running import run

    table = experiment.data.model_dump(exclude_none=True)
    data = data_room.load(table.pop("name"), data_dir=data_dir, **table)
    train = experiment.train
    size = train.batch_size
    steps = train.steps or (train.epochs or 1) * fmean(-(-len(rows) // size) for rows in data.clients)
    times = {}
    for count in (SHORT, LONG):
        values = override(experiment.to_dict(), {"train.steps": count})
        records = run(Experiment(**values), clients=data).rounds
        times[count] = [
            min([r["seconds"] for r in records if (r["phase"] == "warmup") == warm][-2:], default=0.0)
            for warm in (True, False)
        ]
    warm, plain = (
        short + max(long - short, 0.0) / (LONG - SHORT) * (steps - SHORT)
        for short, long in zip(times[SHORT], times[LONG], strict=True)
    )
    return warm, plain


def _kind(experiment: Experiment) -> Experiment:
    """What decides a round's time: not λ, rates, targets or how many rounds there are."""
    changes = {"rounds": 6, "target_accuracy": 0.99, "train.lr": 0.001, "train.lr_milestones": []}
    if experiment.warmup_kind != "none":
        changes["warmup.rounds"] = 3
    if experiment.warmup_kind in ("learned", "auto"):
        changes["warmup.diversity"] = 1.0
    values = override(experiment.to_dict(), changes)
    values["train"].pop("server_lr", None)
    return canonical(Experiment(**values))
