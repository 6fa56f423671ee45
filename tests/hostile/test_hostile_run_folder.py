"""Run folders that are damaged or made to do harm: nothing outside is touched, and every answer is one line."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w
import torch

import fedpews as package
from command_line import fedpews
from fedpews.errors import ConfigError, FedpewsError
from fedpews.report.runs import find_runs
from fedpews.results import layout
from fedpews.results.files import write_atomically
from fedpews.results.folder import RunFolder
from fedpews.results.memories import MemoryStore

RUN = ["run", "synthetic-3.2k", "--method", "fedavg+pews", "--seeds", "0,1", "--rounds", "3"]
RUN += [
    "--set",
    "warmup.rounds=2",
    "--set",
    "train.batch_size=400",
    "--set",
    "runtime.engine=eager",
    "--quiet",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    done = fedpews(*RUN, "--out", str(folder))
    assert done.code == 0, done.stderr
    return folder


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "run"))


def without_digests(run: Path) -> None:
    """A folder of an attacker, who can write digests that match."""
    (run / layout.SUMS).unlink()
    shutil.rmtree(run / layout.CHECKPOINT)


LINKED = ["rounds.jsonl", "neurons.jsonl", ".lock", "config.toml", "summary.json", "federation.json"]


@pytest.mark.parametrize("name", LINKED)
def test_a_link_to_a_file_is_neither_written_nor_cut_nor_deleted(
    name: str, run: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine\n" * 1000)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    for more in ([], ["--resume"]):
        done = fedpews(*RUN, "--out", str(run), *more)
        assert (done.code, "is a link" in done.stderr) == (2, True), done.stderr
    assert victim.read_text() == "mine\n" * 1000


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint/clients"])
def test_a_link_to_a_folder_deletes_nothing_there(name: str, run: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    for file in ("0-0-1.safetensors", "thesis.txt"):
        (victim / file).write_text("mine")
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(victim)
    done = fedpews(*RUN, "--out", str(run), "--resume", "--rounds", "4")
    assert (done.code, "is a link" in done.stderr) == (2, True), done.stderr
    assert sorted(path.name for path in victim.iterdir()) == ["0-0-1.safetensors", "thesis.txt"]


def test_a_link_at_the_name_of_the_page_or_the_figure_is_replaced_and_not_followed(
    run: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("report.html", ".report.html.new", "curves.svg"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim)
    assert fedpews("report", str(run)).code == 0
    assert fedpews("plot", str(run), "--format", "svg").code == 0
    assert victim.read_text() == "mine"
    assert not (run / "report.html").is_symlink()


def test_files_written_aside_have_names_that_nobody_can_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(Path(a).name), replace(a, b)))
    for _ in range(2):
        write_atomically(tmp_path / "file", b"data")
    assert len(set(seen)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("left", ["rounds.jsonl", "summary.json", "checkpoint", "model-0.safetensors"])
def test_a_run_that_lost_its_configuration_is_not_written_over(left: str, run: Path) -> None:
    for path in run.iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = sorted(str(path) for path in run.rglob("*"))
    done = fedpews(*RUN, "--out", str(run), "--set", "train.lr=0.5")
    assert (done.code, "already holds a run" in done.stderr) == (2, True), done.stderr
    assert set(before) <= {str(path) for path in run.rglob("*")}


def test_a_foreign_file_among_the_memories_stays(run: Path) -> None:
    memories = run / "checkpoint" / "clients"
    memories.mkdir(exist_ok=True)
    (memories / "notes.txt").write_text("mine")
    (memories / "9-9-9.safetensors").mkdir()
    MemoryStore(memories).keep([])
    assert {"notes.txt", "9-9-9.safetensors"} <= {path.name for path in memories.iterdir()}


# damage, and what reading must say: the file and, where there is one, the line


def _edit(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(change((run / name).read_text())) and None


def _first_line(**values: object) -> Callable[[str], str]:
    def change(text: str) -> str:
        first, rest = text.split("\n", 1)
        return json.dumps(json.loads(first) | values) + "\n" + rest

    return change


def _whole(**values: object) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | values)


def _folder_instead(run: Path) -> None:
    (run / "config.toml").unlink()
    (run / "config.toml").mkdir()


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a record without its seed": ("rounds.jsonl, line 1", _edit("rounds.jsonl", _first_line(seed=None))),
    "a record of round x": ("rounds.jsonl, line 1", _edit("rounds.jsonl", _first_line(round="x"))),
    "a record with a list for a number": (
        "rounds.jsonl, line 1",
        _edit("rounds.jsonl", _first_line(accuracy=[1])),
    ),
    "a record of one client": ("rounds.jsonl", _edit("rounds.jsonl", _first_line(client_accuracy=[0.5]))),
    "a record that is a list": ("rounds.jsonl, line 1", _edit("rounds.jsonl", lambda text: "[]\n" + text)),
    "an infinite number": (
        "rounds.jsonl, line 2",
        _edit("rounds.jsonl", lambda t: t.replace("\n", '\n{"seed": 1e999}\n', 1)),
    ),
    "a number of 5,000 digits": (
        "rounds.jsonl, line 1",
        _edit("rounds.jsonl", lambda text: "9" * 5000 + "\n" + text),
    ),
    "5,000 brackets": ("rounds.jsonl, line 1", _edit("rounds.jsonl", lambda text: "[" * 5000 + "\n" + text)),
    "half a character": ("rounds.jsonl, line 1", _edit("rounds.jsonl", _first_line(phase="\ud800"))),
    "bytes that are no text": (
        "rounds.jsonl",
        lambda run: (run / "rounds.jsonl").write_bytes(b"\xff\n") and None,
    ),
    "a summary without totals": ("summary.json", _edit("summary.json", _whole(totals={}))),
    "a summary without a target": (
        "summary.json",
        _edit("summary.json", lambda text: text.replace('"target":', '"goal":')),
    ),
    "a summary that is a list": ("summary.json", _edit("summary.json", lambda _: "[]")),
    "a summary of another seed": ("summary.json", _edit("summary.json", _whole(seeds=[7, 8]))),
    "a summary with a value too few": ("summary.json", _edit("summary.json", _whole(seeds=[0]))),
    "an empty summary": ("summary.json", _edit("summary.json", lambda _: "")),
    "a configuration that is no TOML": ("config.toml", _edit("config.toml", lambda text: text + "\n= 1")),
    "a configuration without seeds": ("config.toml", _edit("config.toml", lambda _: "rounds = 3")),
    "a lost configuration": ("config.toml", lambda run: (run / "config.toml").unlink()),
    "a folder in the configuration's place": (
        "config.toml",
        _folder_instead,
    ),
    "a key of 30,000 parts": (
        "config.toml, line 1",
        _edit("config.toml", lambda text: ".".join("a" * 30_000) + "=1\n" + text),
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_one_line_that_names_the_file(what: str, run: Path) -> None:
    words, damage = DAMAGE[what]
    without_digests(run)
    damage(run)
    for command in (["compare", str(run)], ["report", str(run)], ["plot", str(run), "--format", "svg"]):
        done = fedpews(*command)
        assert done.code in (2, 4), (command, done.stderr)
        assert words.partition(",")[0] in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    with pytest.raises(FedpewsError, match=words.replace(".", r"\.")):
        find_runs([run])
    # `load` needs less: seeds have a default, and models are there for any
    if what not in ("a configuration without seeds", "a summary of another seed"):
        with pytest.raises(FedpewsError):
            package.load(run)


@pytest.mark.parametrize("name", ["neurons.jsonl", "federation.json"])
@pytest.mark.parametrize("text", ["x\n", "[]\n", '{"seed": 0}\n{}\n', '{"counts": [[1], [1, 2]]}\n'])
def test_damaged_masks_and_counts_are_refused_by_the_page(name: str, text: str, run: Path) -> None:
    (run / name).write_text(text)
    done = fedpews("report", str(run))
    assert done.code in (2, 4), done.stderr
    assert name in done.stderr


@pytest.mark.parametrize("name", ["masks-0.safetensors", "model-1.safetensors"])
def test_a_damaged_model_is_refused_by_load(name: str, run: Path) -> None:
    whole = (run / name).read_bytes()
    for data in (b"", whole[:40], b"\xff" * 8 + whole[8:], whole[:-1]):
        (run / name).write_bytes(data)
        with pytest.raises(FedpewsError, match=name):
            package.load(run)
    (run / name).write_bytes(whole)
    shutil.copy(run / name, run / "masks-².safetensors")
    shutil.copy(run / name, run / "masks-x.safetensors")
    assert package.load(run).summary


def test_names_with_markup_are_shown_as_they_are(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "[/] $$ [bold]x"
    shutil.move(run, place)
    without_digests(place)
    text = (place / "summary.json").read_text().replace('"fedavg+pews"', '"[/]$$\\\\[red]"')
    (place / "summary.json").write_text(text)
    told = json.loads((place / layout.FEDERATION).read_text()) | {"client_names": ["$$", "[/]"]}
    (place / layout.FEDERATION).write_text(json.dumps(told))
    for command in (
        ["compare"],
        ["report"],
        *(["plot", "--kind", kind, "--format", "svg"] for kind in KINDS),
    ):
        done = fedpews(*command, str(place))
        assert done.code == 0, done.stderr
    assert "[/]$$" in fedpews("compare", str(place)).stdout


KINDS = ("curves", "bytes", "masks", "clients")


@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get
)
def test_a_disk_that_refuses_is_one_line_and_a_documented_code(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error), str(tmp_path / "run" / "config.toml"))

    monkeypatch.setattr(RunFolder, "write_config", refuse)
    done = fedpews(*RUN, "--out", str(tmp_path / "run"))
    assert done.code in (1, 4)
    assert os.strerror(error) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_out_that_is_a_file_or_below_one_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 5000)):
        done = fedpews(*RUN, "--out", str(place))
        assert done.code in (1, 2, 4), done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    for command in ("compare", "report", "plot"):
        assert fedpews(command, str(tmp_path / "nowhere")).code == 2
    with pytest.raises(ConfigError):
        package.load(tmp_path / "nowhere")


@contextmanager
def little_memory() -> Iterator[None]:
    """Two gigabytes more than there is now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


CODE = """from pathlib import Path
from torch import nn
Path({mark!r}).touch()
class Net(nn.Linear):
    pass
"""


@pytest.mark.parametrize("key", ["model.name", "data.name", "task.name", "task.metrics"])
def test_no_command_that_opens_a_folder_runs_code_that_it_names(key: str, run: Path, tmp_path: Path) -> None:
    mark, code = tmp_path / "it-ran", tmp_path / "code.py"
    code.write_text(CODE.format(mark=str(mark)))
    config, (table, name) = run / layout.CONFIG, key.split(".")
    values = tomllib.loads(config.read_text())
    values.setdefault(table, {})[name] = f"{code}:Net" if name == "name" else [f"{code}:Net"]
    config.write_text(tomli_w.dumps(values))
    without_digests(run)
    with pytest.raises(ConfigError, match=f"names code or files .*{re.escape(key)}"):
        package.load(run).model()
    with contextlib.suppress(ConfigError, RuntimeError):
        package.load(run).predict(torch.zeros(1, 5), torch.nn.Linear(5, 4))
    assert not mark.exists()
    for command in (
        ["export", str(run)],
        ["report", str(run)],
        ["compare", str(run)],
        ["plot", str(run), "--format", "svg"],
        [*RUN, "--out", str(run), "--resume"],
    ):
        fedpews(*command)
        assert not mark.exists(), command
    # with the caller's word, it is opened
    with pytest.raises(ConfigError):
        package.load(run, trust=True).model()
    assert mark.exists()


def test_a_folder_on_the_disk_is_not_opened_for_a_strangers_configuration(run: Path) -> None:
    config = run / layout.CONFIG
    values = tomllib.loads(config.read_text())
    values["data"] = {"name": "folder:/etc"}
    config.write_text(tomli_w.dumps(values))
    without_digests(run)
    with pytest.raises(ConfigError, match=r"data\.name = 'folder:/etc'"):
        package.load(run).model()


@pytest.mark.parametrize("name", [layout.ROUNDS, layout.NEURONS, layout.SUMMARY, layout.FEDERATION])
def test_a_sparse_file_of_3_gb_is_refused_before_it_is_read(name: str, run: Path) -> None:
    """By every way to it: also by the digests that a folder lists, and by a resume."""
    os.truncate(run / name, 3 * 2**30)
    with little_memory():
        with pytest.raises(
            FedpewsError, match=f"{name} has 3,221,225,472 bytes, more than the 1,073,741,824"
        ):
            package.load(run)
        for command in (["report", str(run)], ["compare", str(run)], [*RUN, "--out", str(run), "--resume"]):
            done = fedpews(*command)
            assert "Traceback" not in done.stderr, command
