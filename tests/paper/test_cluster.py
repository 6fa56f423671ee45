"""Cells on the workers of a Dask scheduler."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from dask_here import Dask
from fedpews.cli import app
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.paper import cluster as cluster_module
from fedpews.paper.cells import Runner
from fedpews.paper.claims import Outcome
from fedpews.paper.cluster import connect, local_processes, pack, unpack
from fedpews.paper.page import number_rows
from fedpews.paper.reproduce import run_study
from fedpews.paper.study import Line, cells
from fedpews.results.folder import RunFolder
from fedpews.results.records import read_rounds
from toy import TINY, study
from waiting import deadly, when

pytest.importorskip("distributed", reason="needs Dask: pip install 'fedpews[cluster]'")


@pytest.fixture(autouse=True)
def _no_html(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of single runs have tests of their own, and take most of a tiny run's time."""
    monkeypatch.setattr("fedpews.report.html.write_report", lambda folders, path: path)


def numbers(outcome: Outcome) -> dict[Any, Any]:
    """Every record but its times."""
    return {
        cell: {
            seed: [{key: value for key, value in record.items() if key != "seconds"} for record in run]
            for seed, run in result.runs.items()
        }
        for cell, result in outcome.table.items()
    }


COUNT = """
from pathlib import Path

def count(batch, seed):
    with Path({file!r}).open("a") as file:
        file.write("batch\\n")
    return batch
"""


def test_a_cell_whose_worker_is_killed_goes_on_at_another_to_the_same_numbers(
    dask: Dask, tmp_path: Path
) -> None:
    batches = tmp_path / "batches"
    (tmp_path / "count.py").write_text(COUNT.format(file=str(batches)))
    long = TINY | {
        "rounds": 20,
        "warmup": {"rounds": 5},
        # two batches a round: in round 17
        "data": TINY["data"] | {"augment": [f"{tmp_path / 'count.py'}:count", deadly(tmp_path, 33)]},
        "runtime": {"engine": "eager", "checkpoint_every": 5, "workers": 1},
    }
    rows = {"pews": Line(set={"method": {"name": "scaffold+pews"}})}
    slow = study(seeds=[0], rows=rows, columns={"a": Line(set=long)}, paper={}, claims=[])
    with connect(dask.address) as cluster:
        outcome = run_study(slow, Runner(tmp_path / "there"), cluster=cluster)
    dask.add_worker()

    assert [result.status for result in outcome.table.values()] == ["done"]
    # every fifth round is saved: 33 batches of the first worker, then those of rounds 16 to 20
    assert len(batches.read_text().splitlines()) == 33 + 10
    assert numbers(outcome) == numbers(run_study(slow, Runner(tmp_path / "here")))


def test_the_table_is_that_of_one_process_also_when_workers_send_their_runs_back(
    dask: Dask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without the marker in the folder no worker knows that it shares it
    missing = SimpleNamespace(name="no-such-file")
    monkeypatch.setattr(cluster_module, "_marker", lambda root: nullcontext(missing))
    small = study(columns={"a": Line(set=TINY)}, paper={})
    lines: list[str] = []
    with connect(dask.address) as cluster:
        there = run_study(small, Runner(tmp_path / "there", log=lines.append), cluster=cluster)

    here = run_study(small, Runner(tmp_path / "here"))

    assert numbers(there) == numbers(here)
    assert number_rows(there, "final") == number_rows(here, "final")
    files = [
        sorted(p.relative_to(root) for p in root.rglob("*") if p.name != ".lock" and p.is_file())
        for root in (tmp_path / "there", tmp_path / "here")
    ]
    assert files[0] == files[1]
    assert lines[0].startswith("2 cells, ")
    assert {line.partition(" ")[2] for line in lines[1:]} == {"FedAvg, a: done", "PeWS, a: done"}


def test_a_stopped_command_leaves_runs_that_the_same_command_resumes(dask: Dask, tmp_path: Path) -> None:
    long = TINY | {"rounds": 2000, "runtime": {"engine": "eager", "checkpoint_every": 1, "workers": 1}}
    endless = study(seeds=[0], columns={"a": Line(set=long)}, paper={}, claims=[])
    root = tmp_path / "out"
    every = cells(endless)
    with connect(dask.address) as cluster:
        results = cluster.run_cells(Runner(root), every, endless.label)
        thread = threading.Thread(target=stop_when, args=(root,))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            next(iter(results))
        thread.join()

    for cell in every:
        (folder,) = (root / "runs" / cell.name).iterdir()
        # it is not locked, and not finished
        with closing(RunFolder(folder)) as unlocked:
            assert unlocked.has_run
        assert 0 < len(read_rounds(folder)) < 2000
    assert not list(root.glob(".cluster-*"))


def stop_when(root: Path) -> None:
    """Ctrl-C, as soon as both cells run."""
    when(lambda: len(list(root.glob("runs/*/*/rounds.jsonl"))) == 2)
    os.kill(os.getpid(), signal.SIGINT)


def test_failed_cells_end_the_command_with_an_error_and_the_others_are_there(
    dask: Dask, tmp_path: Path
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(Experiment(**TINY, method={"name": "fedavg"}).to_toml())
    command = ["sweep", str(config), "--grid", "model.name=mlp,no-such-model", "--on", dask.address]

    answer = CliRunner().invoke(app, [*command, "--method", "fedavg", "--out", str(tmp_path)])

    assert answer.exit_code != 0
    assert "1 cells failed" in str(answer.exception)
    assert "no-such-model" in answer.output
    page = (tmp_path / "sweep-mine.md").read_text()
    assert "| all, model.name = mlp | 2 | 0 | 0.0 | done |" in page


def test_a_cell_that_another_process_holds_is_busy_and_not_failed(tmp_path: Path) -> None:
    cell, *_ = cells(study(columns={"a": Line(set=TINY)}, paper={}))
    folder = tmp_path / "runs" / cell.name / "seeds-0-1"

    with closing(RunFolder(folder)):
        result = Runner(tmp_path).run(cell)

    assert result.status == "busy"
    assert Runner(tmp_path).run(cell).status == "done"


# ---- what travels


def test_a_run_folder_survives_being_sent(tmp_path: Path) -> None:
    cell, *_ = cells(study(seeds=[0], columns={"a": Line(set=TINY)}, paper={}))
    Runner(tmp_path / "worker").run(cell)
    there = tmp_path / "worker" / "runs" / cell.name

    unpack(pack(there), tmp_path / "here")

    for file in (path for path in there.rglob("*") if path.is_file() and path.name != ".lock"):
        assert (tmp_path / "here" / file.relative_to(there)).read_bytes() == file.read_bytes()
    changed = dict.fromkeys(pack(there), b"")
    unpack(changed, tmp_path / "here")  # a finished run stays
    assert pack(tmp_path / "here") == pack(there)


@pytest.mark.parametrize(
    "name",
    [
        "../outside/config.toml",
        "/etc/config.toml",
        "seeds-0/../../x",
        "config.toml",
        "seeds-0\\..\\..\\x/y",
        "C:/x/y",
        "seeds-0//x",
        "seeds-0/x\0y",
    ],
)
def test_files_that_a_worker_sends_are_never_written_outside_their_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no file of a run folder"):
        unpack({"seeds-0/config.toml": b"", name: b""}, tmp_path / "here")

    assert not list(tmp_path.iterdir())


def test_what_a_worker_sends_as_a_file_must_be_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file of a run folder"):
        unpack({"seeds-0/config.toml": "text"}, tmp_path)  # type: ignore[dict-item]


# ---- addresses


@pytest.mark.parametrize("text", ["local", "local:", "local:0", "local:two", "somewhere", ""])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--on"):
        local_processes(text)


def test_a_scheduler_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "ANSWER_WITHIN", 0.5)

    with (
        pytest.raises(ConfigError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"),
        connect("tcp://127.0.0.1:9"),
    ):
        pass


def test_without_dask_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)

    with pytest.raises(ConfigError, match=r"pip install 'fedpews\[cluster\]'"), ExitStack() as stack:
        stack.enter_context(connect("local:1"))
