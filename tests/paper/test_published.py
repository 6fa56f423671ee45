"""A study's runs in compact form: what is read back is what was measured, and a damaged file is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedpews.errors import ConfigError
from fedpews.paper.cells import Runner, publish, read_published
from fedpews.paper.page import number_rows, write_index, write_page
from fedpews.paper.reproduce import run_study
from fedpews.paper.study import Line, cells
from toy import TINY, study


def test_a_page_is_rebuilt_from_what_was_published(tmp_path: Path) -> None:
    small = study(columns={"a": Line(set=TINY)}, paper={})
    ran = run_study(small, Runner(tmp_path / "runs", tmp_path / "published"))

    again = run_study(small, Runner(tmp_path / "nothing", tmp_path / "published"), run=False)

    assert again.verdicts == ran.verdicts
    assert [number_rows(again, name) for name in small.measures] == [
        number_rows(ran, name) for name in small.measures
    ]
    whole, short = (outcome.table["pews", "a"].runs[0] for outcome in (ran, again))
    assert [record["phase"] for record in short] == [record["phase"] for record in whole]
    assert [r["accuracy"] for r in short] == pytest.approx([r["accuracy"] for r in whole], rel=1e-4)


def test_a_cell_that_diverges_says_so_also_on_a_page_that_is_rebuilt(tmp_path: Path) -> None:
    wild = study(columns={"a": Line(set=TINY | {"train": {"steps": 20, "lr": 1e30}})}, paper={}, claims=[])
    ran = run_study(wild, Runner(tmp_path / "runs", tmp_path / "published"))

    again = run_study(wild, Runner(tmp_path / "nothing", tmp_path / "published"), run=False)

    first, second = (outcome.table["fedavg", "a"] for outcome in (ran, again))
    assert (second.status, second.message) == ("diverged", first.message)
    assert "diverges in round 1 of seed 0" in second.message
    assert str(tmp_path) not in second.message  # it is published
    assert [outcome.failed for outcome in (ran, again)] == [2, 0]
    assert ["FedAvg", "diverged"] in number_rows(again, "final")
    page = write_page(again, tmp_path / "pages").read_text()
    assert "diverged: client" in page
    assert write_index(tmp_path / "pages").read_text().count("2 of 2") == 1


def test_rounds_without_an_evaluation_are_published_as_they_were(tmp_path: Path) -> None:
    small = study(columns={"a": Line(set=TINY | {"runtime.evaluate_every": 2})}, paper={})
    ran = run_study(small, Runner(tmp_path / "runs", tmp_path / "published"))

    again = run_study(small, Runner(tmp_path / "nothing", tmp_path / "published"), run=False)

    assert [number_rows(again, name) for name in small.measures] == [
        number_rows(ran, name) for name in small.measures
    ]
    whole, short = (outcome.table["fedavg", "a"].runs[0] for outcome in (ran, again))
    evaluated = ["accuracy" in record for record in whole]
    assert not all(evaluated)
    assert ["accuracy" in record for record in short] == evaluated


def test_runs_with_a_default_that_has_changed_since_are_not_read(tmp_path: Path) -> None:
    (cell, *_) = cells(study(columns={"a": Line(set=TINY)}, paper={}))
    Runner(tmp_path / "runs").run(cell)
    publish(Runner(tmp_path / "runs").read(cell), tmp_path)
    (path,) = tmp_path.glob("*.json.gz")
    assert not read_published(tmp_path, cell).missing

    # a key that was added after the runs changes nothing, another value of a default does
    path.write_bytes(_edited(path.read_bytes(), lambda content: content["experiment"]["warmup"].pop("ramp")))
    assert not read_published(tmp_path, cell).missing
    path.write_bytes(
        _edited(path.read_bytes(), lambda content: content["experiment"]["warmup"].update(gradient="open"))
    )
    assert read_published(tmp_path, cell).runs == {}


def test_a_run_with_a_setting_of_several_numbers_is_read_back(tmp_path: Path) -> None:
    masks = {"method": {"name": "fedavg+pews-fixed"}, "warmup": {"shares": [75, 25]}}
    rows = {"fixed": Line(label="Fixed", set=masks)}
    (cell,) = cells(study(rows=rows, columns={"a": Line(set=TINY)}, paper={}, claims=[]))
    Runner(tmp_path / "runs").run(cell)
    publish(Runner(tmp_path / "runs").read(cell), tmp_path)
    assert not read_published(tmp_path, cell).missing


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda data: data[:40], "damaged"),
        (lambda data: b"no gzip", "damaged"),
        (lambda data: gzip.compress(b"[]"), "damaged"),
        (lambda data: gzip.compress(b"[" * 100_000), "nested too deeply"),
        (lambda data: gzip.compress(bytes(300 * 2**20)), "when unpacked"),
        (lambda data: _edited(data, lambda c: c["runs"].update({"x": {}})), "damaged"),
        (lambda data: _edited(data, lambda c: c["runs"]["0"].update(loss=["runs", [1, 10**12]])), "rounds"),
        (lambda data: _edited(data, lambda c: c["runs"]["0"].update(loss=["runs", 7])), "damaged"),
        (lambda data: _edited(data, lambda c: c["runs"]["0"].update(loss=["at", [10**9], [1]])), "damaged"),
        (lambda data: _edited(data, lambda c: c["runs"]["0"].update(loss=["at", 7])), "damaged"),
    ],
)
def test_a_published_file_that_is_damaged_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[bytes], bytes], word: str
) -> None:
    small = study(columns={"a": Line(set=TINY)}, paper={})
    run_study(small, Runner(tmp_path / "runs", tmp_path / "published"))
    file = next(f for f in (tmp_path / "published").iterdir() if "pews" in f.name)
    file.write_bytes(spoil(file.read_bytes()))

    with pytest.raises(ConfigError, match=word) as caught:
        run_study(small, Runner(tmp_path / "nothing", tmp_path / "published"), run=False)

    assert file.name in str(caught.value)


def _edited(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    content = json.loads(gzip.decompress(data))
    change(content)
    return gzip.compress(json.dumps(content).encode())
