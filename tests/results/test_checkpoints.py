"""Checkpoints that tell when they were changed, heal from the one before, and belong to one model and one engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpews
from fedpews.build import build_engine
from fedpews.errors import CheckpointError, Interrupted
from fedpews.results import files, layout
from fedpews.results.files import read_sums, write_sums
from fedpews.results.records import read_rounds

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
CLIENTS = [(X[:30], Y[:30]), (X[30:], Y[30:])]


def small(width: int = 6, kind: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), kind(), nn.Linear(width, 2))


def run(
    out: Path, *, resume: bool = False, model: Any = small, stop_after: int | None = None, **more: Any
) -> Any:
    given: dict[str, Any] = {
        "rounds": 9,
        "method": "scaffold",
        "train": {"batch_size": 8},
        "runtime": {"engine": "eager", "checkpoint_every": 2},
    }
    watcher = fedpews.Callback(round=lambda new: new[0]["round"] == stop_after)
    return fedpews.run(
        model=model, clients=CLIENTS, test=(X, Y), out=out, resume=resume, callbacks=[watcher], **given | more
    )


def stopped(out: Path, after: int = 7, **more: Any) -> Path:
    """A run that was killed after a round: its summary is not there, nor is what goes with it."""
    run(out, stop_after=after, **more)
    sums = read_sums(out)
    for name in (layout.SUMMARY, layout.MODEL.format(0)):
        (out / name).unlink()
        del sums[name]
    write_sums(out, sums)
    return out


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [record | {"seconds": 0} for record in read_rounds(folder)]


def flip(path: Path, position: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


def test_two_checkpoints_are_kept(whole: Path) -> None:
    names = {path.name for path in (whole / "checkpoint").iterdir()}
    assert names == {"round-8.json", "state-8.safetensors", "round-9.json", "state-9.safetensors", "clients"}
    assert len(list((whole / "checkpoint" / "clients").iterdir())) == 4  # two of each client


@pytest.mark.parametrize("name", ["round-7.json", "state-7.safetensors", "clients"])
def test_a_flipped_bit_heals_from_the_checkpoint_before_and_says_so(
    name: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped(tmp_path)
    path = tmp_path / "checkpoint" / name
    flip(max(path.iterdir(), key=lambda file: int(file.stem.split("-")[2])) if path.is_dir() else path)
    run(tmp_path, resume=True)
    assert "is damaged" in caplog.text
    assert "going on from the checkpoint of round 6" in caplog.text
    assert numbers(tmp_path) == numbers(whole)
    assert (tmp_path / "model-0.safetensors").read_bytes() == (whole / "model-0.safetensors").read_bytes()


def test_where_no_checkpoint_is_whole_the_run_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path)
    for path in (tmp_path / "checkpoint").glob("state-*"):
        flip(path)
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        run(tmp_path, resume=True)


def test_a_changed_record_is_refused_by_every_reader(tmp_path: Path) -> None:
    stopped(tmp_path)
    flip(tmp_path / "rounds.jsonl", position=40)
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl"):
        run(tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl"):
        read_rounds(tmp_path)


def test_another_runs_records_are_refused(whole: Path, tmp_path: Path) -> None:
    stopped(tmp_path)
    shutil.copy(whole / "rounds.jsonl", tmp_path / "rounds.jsonl")
    with pytest.raises(CheckpointError, match="it was changed"):
        run(tmp_path, resume=True)


def test_a_checkpoint_that_names_another_round_is_not_believed(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped(tmp_path)
    path = tmp_path / "checkpoint" / "round-7.json"
    contents = json.loads(path.read_text())
    contents["checkpoint"]["round"] = 3
    contents["digest"] = files.digest(json.dumps(contents["checkpoint"]).encode())
    path.write_text(json.dumps(contents))
    (path.parent / "round-7.json").rename(path.parent / "round-3.json")
    shutil.copy(path.parent / "state-7.safetensors", path.parent / "state-3.safetensors")
    (path.parent / "round-6.json").unlink()
    with pytest.raises(CheckpointError, match="ends with round 7, and the checkpoint is that of round 3"):
        run(tmp_path, resume=True)


def test_a_lost_configuration_is_written_again_and_never_lets_another_run_in(
    whole: Path, tmp_path: Path
) -> None:
    stopped(tmp_path)
    (tmp_path / "config.toml").unlink()
    with pytest.raises(fedpews.errors.ConfigError, match="already holds a run"):
        run(tmp_path)
    with pytest.raises(CheckpointError, match="holds another experiment"):
        run(tmp_path, resume=True, method="fedavg")
    run(tmp_path, resume=True)
    assert (tmp_path / "config.toml").read_bytes() == (whole / "config.toml").read_bytes()
    assert numbers(tmp_path) == numbers(whole)


def test_every_finished_file_has_its_digest(whole: Path, tmp_path: Path) -> None:
    listed = {line.split()[1] for line in (whole / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in whole.iterdir() if path.is_file()} - {".lock", "SHA256SUMS"}
    folder = shutil.copytree(whole, tmp_path / "copy")
    flip(folder / "model-0.safetensors")
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors is damaged"):
        fedpews.load(folder)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: small(7), r"0\.weight has shape 6×5 there and 7×5 here"),
        (lambda: small(kind=nn.Tanh), "is relu there and tanh here"),
        (lambda: small(kind=lambda: nn.LeakyReLU(0.2)), "is relu there and leaky_relu here"),
    ],
)
def test_another_model_is_refused_with_both_values(model: Any, said: str, tmp_path: Path) -> None:
    stopped(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        run(tmp_path, resume=True, model=model)


def test_another_slope_of_the_same_layer_is_another_model(tmp_path: Path) -> None:
    stopped(tmp_path, model=lambda: small(kind=lambda: nn.LeakyReLU(0.1)))
    with pytest.raises(CheckpointError, match="leaky_relu, has other settings"):
        run(tmp_path, resume=True, model=lambda: small(kind=lambda: nn.LeakyReLU(0.2)))


def test_another_engine_stops_a_resume_unless_it_is_asked_for_and_then_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(setup: Any) -> Any:
        engine, _ = build_engine(setup)
        made = engine.made_with() | {"engine": "compiled", "compiler": "g++ 1.0"}
        monkeypatch.setattr(engine, "made_with", lambda: made)
        return engine, "as asked"

    from fedpews.running import train

    monkeypatch.setattr("fedpews.running.build_engine", other)
    monkeypatch.setattr(train, "__kwdefaults__", train.__kwdefaults__ | {"make_engine": other})
    stopped(tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"engine was compiled and is eager.*compiler was g\+\+ 1\.0"):
        run(tmp_path, resume=True)
    runtime = {"engine": "eager", "checkpoint_every": 2, "resume": "changed"}
    result = run(tmp_path, resume=True, runtime=runtime)
    assert "engine was compiled and is eager" in result.summary["went_on"][0]
    assert [record["round"] for record in result.rounds if "went_on" in record] == [8]


def test_a_lower_rate_goes_on_from_the_last_checkpoint_when_asked(tmp_path: Path) -> None:
    stopped(tmp_path)
    lower = {"train": {"batch_size": 8, "lr": 0.001}}
    with pytest.raises(CheckpointError, match=r"runtime\.resume=changed goes on with it"):
        run(tmp_path, resume=True, **lower)
    changed = {"runtime": {"engine": "eager", "checkpoint_every": 2, "resume": "changed"}}
    result = run(tmp_path, resume=True, **lower, **changed)
    assert result.summary["went_on"] == ["after round 7: train.lr was 0.01 and is 0.001"]
    # and what was changed once is known for good
    again = run(tmp_path, resume=True, **lower)
    assert again.summary["went_on"] == result.summary["went_on"]


def test_a_run_made_longer_and_killed_before_its_next_checkpoint_goes_on(tmp_path: Path) -> None:
    run(tmp_path / "whole", rounds=12)
    run(tmp_path / "run")
    with pytest.raises(Interrupted):
        fedpews.run(
            model=small, clients=CLIENTS, test=(X, Y), out=tmp_path / "run", resume=True, rounds=12,
            method="scaffold", train={"batch_size": 8}, runtime={"engine": "eager", "checkpoint_every": 9},
            callbacks=[fedpews.Callback(begin=lambda *_: (_ for _ in ()).throw(Interrupted("killed")))],
        )  # fmt: skip
    run(tmp_path / "run", resume=True, rounds=12)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def unfinished(out: Path) -> Path:
    """A run that was stopped one round after its last checkpoint."""

    def stop(records: Any) -> None:
        if records[0]["round"] == 7:
            raise Interrupted("killed")

    with pytest.raises(Interrupted):
        fedpews.run(
            model=small, clients=CLIENTS, test=(X, Y), out=out, method="scaffold", rounds=9,
            train={"batch_size": 8}, runtime={"engine": "eager", "checkpoint_every": 3},
            callbacks=[fedpews.Callback(round=stop)],
        )  # fmt: skip
    return out


def test_a_changed_record_after_the_last_checkpoint_is_refused_by_readers_and_written_again_by_resume(
    whole: Path, tmp_path: Path
) -> None:
    unfinished(tmp_path)
    assert [record["round"] for record in read_rounds(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    file = tmp_path / "rounds.jsonl"
    text = file.read_text()
    *lines, last = text.splitlines(keepends=True)
    file.write_text("".join(lines) + json.dumps(json.loads(last) | {"accuracy": 0.125}) + "\n")
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl is damaged"):
        read_rounds(tmp_path)
    run(tmp_path, resume=True)
    assert numbers(tmp_path) == numbers(whole)


def test_lines_that_a_kill_left_behind_the_digest_are_not_read(tmp_path: Path) -> None:
    unfinished(tmp_path)
    before = read_rounds(tmp_path)
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(before[-1] | {"round": 8}) + "\n" + '{"seed": 0, "rou')
    assert read_rounds(tmp_path) == before


def test_sha256sum_checks_a_run_at_any_time(whole: Path, tmp_path: Path) -> None:
    for folder in (whole, unfinished(tmp_path)):
        for line in (folder / "SHA256SUMS").read_text().splitlines():
            expected, name = line.split()
            assert sha256((folder / name).read_bytes()).hexdigest() == expected


def test_records_hold_nothing_but_the_record(whole: Path) -> None:
    lines = (whole / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == read_rounds(whole)
    assert "sum" not in json.loads(lines[0])
