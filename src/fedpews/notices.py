"""Warnings before a run: a setting or data that mean less than they seem to.

They go to the logger ``fedpews``: Python shows warnings on standard error without any set-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedpews.build import Setup
from fedpews.data.federation import Federation
from fedpews.experiment import Experiment
from fedpews.tasks.names import short

LISTED = 5
"""Clients or classes that a line names."""


def of_setup(setup: Setup) -> list[str]:
    """The warnings before round 1."""
    return [*_of_experiment(setup.experiment), *_of_data(setup.data)]


def _of_experiment(experiment: Experiment) -> Iterator[str]:
    table, kind = experiment.warmup, experiment.warmup_kind
    if kind != "none" and experiment.warmup_rounds == 0:
        fraction = 0.125 if table.fraction is None else table.fraction
        why = (
            "warmup.rounds is 0"
            if table.rounds is not None
            else f"warmup.fraction {fraction:g} of {experiment.rounds} rounds is less than half a round"
        )
        yield f"{experiment.method_label}: {why}, so there is no warmup; set warmup.rounds"
    if table.diversity and kind not in ("learned", "auto") and experiment.method.object is None:
        yield f"{experiment.method_label} learns no masks: warmup.diversity has no effect"


def _of_data(data: Federation) -> Iterator[str]:
    labels = data.task.classes_of(data.y)
    # the server of real sites has no samples
    if not len(data.y):
        return
    untested = [client for client, rows in enumerate(data.test_clients) if not len(rows)]
    if labels is not None:
        test_labels = data.task.classes_of(data.test_y)
        assert test_labels is not None
        counts, has_tests = data.counts(), test_labels.cpu().bincount(minlength=data.classes) > 0
        missing = ((counts.sum(0) > 0) & ~has_tests).nonzero().flatten().tolist()
        names = data.class_names or tuple(map(str, range(data.classes)))
        if missing:
            yield f"no test samples of {list_names(names, missing, 'class')}: not covered by any metric"
        if data.test_owner is None:
            untested = (counts[:, has_tests].sum(1) == 0).nonzero().flatten().tolist()
    if untested:
        yield f"no test samples of {list_names(data.names, untested)}: no client metrics there"
    none = [number for number, rows in enumerate(data.validation) if not len(rows)]
    if none:
        yield f"no validation samples of {list_names(data.names, none)}: too few to hold any out"
    if labels is not None and "auroc" in map(short, data.task.metrics):
        alone = [i for i, rows in enumerate(data.validation) if len(labels[rows].unique()) == 1]
        if alone:
            yield (
                f"one class among the validation samples of {list_names(data.names, alone)}, so auroc is only "
                "defined over all clients"
            )


def list_names(names: Sequence[str], chosen: Sequence[int], noun: str = "client") -> str:
    """The names of some clients or classes, the first few of many."""
    plural = "" if len(chosen) == 1 else "s" if noun == "client" else "es"
    more = f" and {len(chosen) - LISTED} more" if len(chosen) > LISTED else ""
    return f"{noun}{plural} {', '.join(names[i] for i in chosen[:LISTED])}{more}"
