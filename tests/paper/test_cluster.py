"""Cells on the workers of a Dask scheduler."""

from __future__ import annotations

import io
import re
import sys
import tarfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from dask_here import Dask
from rich.console import Console
from toy import TINY, study
from typer.testing import CliRunner

from fedpews.cli import app
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.report.board import Board
from fedpews.results.folder import RunFolder
from fedpews.paper.cells import run_cell
from fedpews.paper.cluster import connect as connecting
from fedpews.paper.cluster.connect import Place
from fedpews.paper.cluster.grid import on_cluster
from fedpews.paper.cluster.parcels import pack, unpack
from fedpews.paper.page import Outcome, number_rows
from fedpews.paper.reproduce import run_study
from fedpews.paper.study import Line, cells
from waiting import deadly

pytest.importorskip("distributed", reason="needs Dask: pip install 'fedpews[cluster]'")


@pytest.fixture(autouse=True)
def _no_html(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of single runs have tests of their own, and take most of a tiny run's time."""
    monkeypatch.setattr("fedpews.report.html.write_report", lambda folders, path: path)


def numbers(outcome: Outcome) -> dict[Any, Any]:
    """Every record but its times."""
    return {
        place: {
            seed: [{key: value for key, value in record.items() if key != "seconds"} for record in run]
            for seed, run in found.runs.items()
        }
        for place, found in outcome.table.items()
    }


def test_a_cell_whose_worker_is_killed_goes_on_at_another_to_the_same_numbers(
    dask: Dask, tmp_path: Path
) -> None:
    long = TINY | {
        "rounds": 20,
        "warmup": {"rounds": 5},
        # two batches a round: in round 17
        "data": TINY["data"] | {"augment": [deadly(tmp_path, 33)]},
        "runtime": {"engine": "eager", "checkpoint_every": 5, "workers": 1},
    }
    rows = {"pews": Line(set={"method": {"name": "scaffold+pews"}})}
    slow = study(seeds=[0], rows=rows, columns={"a": Line(set=long)}, paper={}, claims=[])
    told = io.StringIO()
    with on_cluster(dask.address, Console(file=told, width=400)) as elsewhere:
        outcome = run_study(slow, tmp_path / "there", elsewhere=elsewhere)
    dask.add_worker()

    # 16 rounds were written, and every fifth is saved
    assert re.search(r"from round 16, after tcp://\S+ was lost", told.getvalue()), told.getvalue()
    assert [found.status for found in outcome.table.values()] == ["done"]
    assert numbers(outcome) == numbers(run_study(slow, tmp_path / "here"))


def test_the_table_is_that_of_one_process_also_when_workers_send_their_runs_back(
    dask: Dask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without its marker in the folder no worker knows that it shares it
    monkeypatch.setattr("fedpews.paper.cluster.pool.write_atomically", lambda path, content: None)
    small = study(columns={"a": Line(set=TINY)}, paper={})
    with on_cluster(dask.address, Console(quiet=True)) as elsewhere:
        there = run_study(small, tmp_path / "there", elsewhere=elsewhere)

    here = run_study(small, tmp_path / "here")

    assert numbers(there) == numbers(here)
    assert number_rows(there, "final") == number_rows(here, "final")
    files = [
        sorted(p.relative_to(root) for p in root.rglob("*") if p.name != ".lock" and p.is_file())
        for root in (tmp_path / "there", tmp_path / "here")
    ]
    assert files[0] == files[1]


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
        held = run_cell(tmp_path, cell, None)

    assert (held.status, held.error) == ("busy", "FolderInUse")
    assert run_cell(tmp_path, cell, None).status == "done"


# ---- what travels


def test_a_run_folder_survives_being_sent(tmp_path: Path) -> None:
    cell, *_ = cells(study(seeds=[0], columns={"a": Line(set=TINY)}, paper={}))
    run_cell(tmp_path / "worker", cell, None)
    there = tmp_path / "worker" / "runs" / cell.name

    (placed,) = unpack(pack(there), tmp_path / "here")

    (sent,) = there.iterdir()
    for file in (path for path in sent.rglob("*") if path.is_file() and path.name != ".lock"):
        assert (placed / file.relative_to(sent)).read_bytes() == file.read_bytes()
    assert unpack(pack(there), tmp_path / "here") == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../outside/config.toml", tarfile.REGTYPE),
        ("/etc/config.toml", tarfile.REGTYPE),
        ("seeds-0/../../x", tarfile.REGTYPE),
        ("config.toml", tarfile.REGTYPE),
        ("seeds-0\\..\\..\\x", tarfile.REGTYPE),
        ("C:/x/y", tarfile.REGTYPE),
        ("seeds-0/link", tarfile.SYMTYPE),
        ("seeds-0/link", tarfile.LNKTYPE),
        ("seeds-0/device", tarfile.CHRTYPE),
    ],
)
def test_a_parcel_writes_nothing_outside_its_folder(tmp_path: Path, name: str, kind: bytes) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for each, type_ in (("seeds-0/config.toml", tarfile.REGTYPE), (name, kind)):
            member = tarfile.TarInfo(each)
            member.type, member.linkname = type_, "/etc/passwd"
            tar.addfile(member)

    with pytest.raises(ConfigError, match="no file of a run folder"):
        unpack(buffer.getvalue(), tmp_path / "here")

    assert not list(tmp_path.iterdir())


def test_a_damaged_parcel_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        unpack(b"not a parcel", tmp_path)


# ---- addresses


@pytest.mark.parametrize("text", ["local", "local:", "local:0", "local:two", "somewhere", ""])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--on"):
        Place.parse(text)


def test_a_scheduler_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "ANSWER_WITHIN", 0.5)

    with (
        pytest.raises(ConfigError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"),
        on_cluster("tcp://127.0.0.1:9", Console(quiet=True)),
    ):
        pass


def test_without_dask_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)

    with pytest.raises(ConfigError, match=r"pip install 'fedpews\[cluster\]'"), ExitStack() as stack:
        stack.enter_context(on_cluster("local:1", Console(quiet=True)))


# ---- the table


def test_what_runs_and_what_failed_is_shown_first_when_not_all_fits() -> None:
    console = Console(file=io.StringIO(), width=100, height=9)
    board = Board(console)
    for number in range(20):
        board.update(f"cell {number}", state="done" if number < 10 else "waiting")
    board.update("cell 3", state="failed")
    board.update("cell 15", state="running", round=3, rounds=10, where="tcp://10.0.0.6:40123")

    console.print(board.table())

    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "9 done, 1 failed, 9 waiting, 1 running" in shown
    assert shown.index("cell 15") < shown.index("cell 3") < shown.index("and 17 more")
    assert "3/10" in shown


def test_in_a_terminal_the_table_is_there_while_cells_run() -> None:
    console = Console(file=io.StringIO(), width=100, height=20, force_terminal=True)
    with Board(console) as board:
        board.update("FedAvg, A", state="running", round=3, rounds=10, shown="train accuracy 50.0 %")
        board.say("FedAvg, A: on tcp://10.0.0.6:40123")
        console.file.flush()

    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 running" in shown
    assert "train accuracy 50.0 %" in shown
    assert "FedAvg, A: on tcp:" in shown
