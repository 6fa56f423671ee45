"""Ten usual changes to the package, each made in as few files as CONTRIBUTING says, and used together in one run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedpews

PACKAGE = Path(fedpews.__file__).parent
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"

METHOD = '''
from dataclasses import dataclass, replace

import torch

from fedpews.methods.fedavg import FedAvg
from fedpews.registry import register


@register("method", "mine")
@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg whose clients also upload the length of their work."""

    factor: float = 1.0

    def finish(self, net, download, local, work):
        memory, upload = super().finish(net, download, local, work)
        return memory, replace(upload, extra={**upload.extra, "length": {"steps": torch.tensor(float(work.steps))}})
'''

STUDY = """
order = 90
item = "A new item"
title = "A new study"
base = "synthetic-3.2k"

[rows.plain]
label = "plain"
set.method.name = "fedavg"

[columns.all]
label = "all"
"""

END = "the end of the file"

# for each change: the files, and in each the text behind which something is added
CHANGES: dict[str, list[tuple[str, str, str]]] = {
    "a metric": [
        (
            "tasks/builtin.py",
            '        "calibration_error": Metric(("calibration",), metrics.calibration_error),\n',
            '        "worst_error": Metric(("correct", "seen"), lambda right, seen: float((1 - right / seen).max())),\n',  # noqa: E501
        )
    ],
    "a column of `rounds.jsonl`": [
        (
            "measure.py",
            '        record: Record = {"seed": part.seed, "round": part.cohort.round, "phase": part.phase}\n',
            '        record["answered"] = len(part.uploads)\n',
        ),
        (
            "results/records.py",
            "COLUMNS = {\n",
            '    "answered": Column("Clients that answered", "The clients of the round."),\n',
        ),
    ],
    "a configuration key": [
        (
            "config.py",
            "class TrainTable(Table):\n",
            '    patience: Count = field(3, "a new key")\n',
        )
    ],
    "a kind of plot": [
        (
            "report/figures.py",
            END,
            '\n\ndef empty(given: Any) -> Figure:\n    """A page without a curve."""\n'
            '    return new_figure(3.0, 2.0)\n\n\nKINDS["empty"] = empty\n',
        )
    ],
    "masks for a warmup": [
        (
            "warmup/masks.py",
            END,
            '\n\n@register("masks", "everything")\n@dataclass(frozen=True)\nclass Everything(Masks):\n'
            '    """Every client owns every neuron."""\n\n'
            "    def assign(self, graph: NeuronGraph, client: int, cohort: Cohort) -> Tensor:\n"
            "        import torch\n\n        return torch.ones(graph.size, dtype=torch.bool)\n",
        )
    ],
    "something a site uploads": [("methods/mine.py", END, METHOD)],
    "a server optimiser": [
        (
            "methods/server_optimizers.py",
            END,
            '\n\n@register("server", "heavy")\n@dataclass(frozen=True)\nclass Heavy(Momentum):\n'
            '    """FedAvgM by another name."""\n',
        )
    ],
    "a method": [("methods/mine.py", END, METHOD)],
    "a data set": [
        (
            "data/catalogue.py",
            "_ALL = (\n",
            '    Source("tiny", "a few samples", 4, (5,), "synthetic", "parity", train_per_class=40, test_per_class=20),\n',  # noqa: E501
        )
    ],
    "a study": [("paper/studies/new-study.toml", END, STUDY)],
}

SCRIPT = """
import json, sys
from pathlib import Path
import fedpews
from fedpews.experiment import known_keys
from fedpews.methods.wire import decode_upload, encode_upload
from fedpews.paper.study import studies
from fedpews.report.html import write_report

out = sys.argv[1]
given = {"data": {"name": "tiny"}, "rounds": 2, "seeds": [0], "task": {"metrics": ["accuracy", "worst_error"]}}
given |= {"train": {"steps": 1, "patience": 5}, "runtime": {"engine": "eager"}}
result = fedpews.run(method="mine+heavy+pews-everything", warmup={"rounds": 1}, out=out, **given)
result.plot(out + "/empty.png", kind="empty")
fedpews.load(out)
page = write_report([Path(out)], Path(out) / "page.html").read_text()
print(json.dumps({
    "method": result.summary["method"],
    "density": [record["density"] for record in result.rounds],
    "columns": sorted(result.rounds[0]),
    "metrics": result.rounds[0]["metrics"],
    "patience": result.experiment.train.patience,
    "keys": [key for key in known_keys() if key == "train.patience"],
    "studies": "new-study" in studies(),
    "drawn": "Clients that answered" in page,
}))
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a run says in a copy of the package with all ten changes."""
    root = tmp_path_factory.mktemp("changed")
    shutil.copytree(PACKAGE, root / "fedpews", ignore=shutil.ignore_patterns("__pycache__"))
    edits = dict.fromkeys(edit for change in CHANGES.values() for edit in change)
    for file, anchor, text in edits:
        path = root / "fedpews" / file
        before = path.read_text() if path.exists() else ""
        if anchor == END:
            path.write_text(before + text)
        else:
            assert before.count(anchor) == 1, f"{file} has no {anchor!r}"
            path.write_text(before.replace(anchor, anchor + text))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root / "run")],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_each_change_touches_as_many_files_as_contributing_says() -> None:
    rows = dict(
        re.findall(r"^\| (an? [^|]+|masks [^|]+|something [^|]+) \| (\d) \|", CONTRIBUTING.read_text(), re.M)
    )

    assert rows.keys() == CHANGES.keys()
    for change, edits in CHANGES.items():
        assert len({file for file, _, _ in edits}) <= int(rows[change]), change


def test_a_method_an_optimiser_and_masks_are_known_by_their_names(changed: dict[str, object]) -> None:
    assert changed["method"] == "mine+heavy+pews-everything"
    assert changed["density"] == [1.0, 1.0]


def test_a_metric_and_a_column_are_recorded_and_drawn(changed: dict[str, object]) -> None:
    assert {"answered", "accuracy"} <= set(changed["columns"])  # type: ignore[call-overload]
    assert 0 <= changed["metrics"]["worst_error"] <= 1  # type: ignore[index]
    assert changed["drawn"]


def test_a_key_and_a_study_are_listed(changed: dict[str, object]) -> None:
    assert changed["patience"] == 5
    assert changed["keys"] == ["train.patience"]
    assert changed["studies"]
