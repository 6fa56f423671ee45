"""Warnings of a run, each logged once: a setting or data that mean less than they seem to.

They go to the logger ``fedpews``: Python shows warnings on standard error without any set-up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from fedpews.build import Setup
from fedpews.data.federation import Federation
from fedpews.experiment import Experiment
from fedpews.results.records import Record
from fedpews.tasks.names import short

LISTED = 5
"""Clients or classes that a line names."""


class Notices:
    """The warnings of a run, each logged once."""

    def __init__(self, setup: Setup) -> None:
        self._names, self._tested = setup.data.names, _tested(setup.data)
        self._logged: set[str] = set()
        self._log([*_of_experiment(setup.experiment), *_of_data(setup.data)])

    def round(self, records: Sequence[Record]) -> None:
        self._log([line for record in records for line in _of_record(record, self._names, self._tested)])

    def _log(self, lines: Sequence[str]) -> None:
        for line in lines:
            if line not in self._logged:
                self._logged.add(line)
                logging.getLogger("fedpews").warning("%s", line)


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
    untested = [] if data.test_owner is None else sorted(set(range(len(data))) - _tested(data))
    if labels is not None:
        test_labels = data.task.classes_of(data.test_y)
        assert test_labels is not None
        counts, has_tests = data.counts(), test_labels.cpu().bincount(minlength=data.classes) > 0
        missing = ((counts.sum(0) > 0) & ~has_tests).nonzero().flatten().tolist()
        names = data.class_names or tuple(map(str, range(data.classes)))
        if missing:
            yield f"no test samples of {_list(names, missing, 'class')}: not covered by any metric"
        if data.test_owner is None:
            untested = (counts[:, has_tests].sum(1) == 0).nonzero().flatten().tolist()
    if untested:
        yield f"no test samples of {_list(data.names, untested)}: no client metrics there"
    none = [number for number, rows in enumerate(data.validation) if not len(rows)]
    if none:
        yield f"no validation samples of {_list(data.names, none)}: too few to hold any out"
    if labels is not None and "auroc" in map(short, data.task.metrics):
        alone = [i for i, rows in enumerate(data.validation) if len(labels[rows].unique()) == 1]
        if alone:
            yield (
                f"one class among the validation samples of {_list(data.names, alone)}, so auroc is only "
                "defined over all clients"
            )


def _of_record(record: Record, names: Sequence[str], tested: set[int]) -> Iterator[str]:
    # not below 1: of a network without neurons it is undefined
    if record["phase"] == "warmup" and not record["density"] < 1:
        yield "all masks are open: in this warmup every client trains the whole network"
    for what, values in (("test", record.get("metrics", {})), ("validation", record.get("validation", {}))):
        yield from (f"{m} is undefined on the {what} samples" for m, v in values.items() if v is None)
    for metric, values in record.get("client_metrics", {}).items():
        none = [i for i, value in enumerate(values) if value is None and i in tested]
        if none and record["metrics"][metric] is not None:
            yield f"{metric} is undefined on the test samples of {_list(names, none)}"


def _tested(data: Federation) -> set[int]:
    """The clients with test samples of their own."""
    return set() if data.test_owner is None else set(data.test_owner.unique().tolist())


def _list(names: Sequence[str], chosen: Sequence[int], noun: str = "client") -> str:
    plural = "" if len(chosen) == 1 else "s" if noun == "client" else "es"
    more = f" and {len(chosen) - LISTED} more" if len(chosen) > LISTED else ""
    return f"{noun}{plural} {', '.join(names[i] for i in chosen[:LISTED])}{more}"
