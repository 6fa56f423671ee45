"""`fedpews data`, own data and own models as a user meets them on the command line."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from command_line import fedpews
from fedpews.data import SOURCES
from tiny_files import write_cifar, write_medmnist, write_mnist

ROOT = Path(__file__).parents[2]
PAGE = "\n".join((ROOT / "docs" / page).read_text() for page in ("data.md", "models.md"))


@pytest.fixture(autouse=True)
def bare_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, cache or settings; wide enough that no line is broken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("FEDPEWS_OFFLINE", "1")
    monkeypatch.setattr("fedpews.cli.console.out._width", 200)
    monkeypatch.delenv("FEDPEWS_DATA", raising=False)


# status, get and show


def test_status_says_what_is_here_what_is_not_and_where_it_looked(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    write_medmnist(tmp_path, "octmnist")
    done = fedpews("data", "status", "--data-dir", str(tmp_path))
    assert done.code == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.split()}
    assert set(SOURCES) <= set(lines)
    assert re.search(rf"octmnist +ready +\d+\.\d +{tmp_path}/medmnist", lines["octmnist"])
    assert "incomplete" in lines["mnist"]
    assert "lacks mnist/t10k-labels-idx1-ubyte.gz" in lines["mnist"]
    assert "missing" in lines["tissuemnist"]
    assert "made here" in lines["synthetic-32k"]
    assert f"searched {tmp_path}, then " in done.stdout


def test_status_can_compare_with_the_published_files(tmp_path: Path) -> None:
    write_medmnist(tmp_path, "octmnist")
    done = fedpews("data", "status", "--data-dir", str(tmp_path), "--check")
    assert "not the published files" in done.stdout


def test_get_of_what_is_here_downloads_nothing(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    done = fedpews("data", "get", "mnist", "synthetic-32k", "--data-dir", str(tmp_path))
    assert done.code == 0
    assert "ready" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["data", "get", "octmnist"],
        ["data", "show", "cifar-mnist", "--set", "data.name=octmnist+pathmnist"],
        ["run", "cifar-mnist", "--set", "data.name=octmnist+pathmnist"],
    ],
    ids=["get", "show", "run"],
)
def test_missing_data_ends_with_3_and_says_which_file_to_put_where(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    done = fedpews(*command, "--data-dir", str(tmp_path / "here"))
    assert done.code == 3
    assert f"Put octmnist.npz at {tmp_path}/here/medmnist/octmnist.npz (from https://" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["get", "octmist"], 2, "did you mean 'octmnist'?"),
        (["show", "cifar-mnits"], 2, "did you mean 'cifar-mnist'"),
        (["show", "synthetic-32k", "--set", "data.partition=dirichlet"], 2, "needs data.clients"),
        (["status", "--data-dir", "nowhere"], 3, "'nowhere' is not a directory"),
    ],
)
def test_a_wrong_word_is_answered_in_a_line(arguments: list[str], code: int, words: str) -> None:
    done = fedpews("data", *arguments)
    assert (done.code, len(done.stderr.strip().splitlines())) == (code, 1)
    assert words in done.stderr


def test_show_lists_clients_and_draws_the_split(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_cifar(tmp_path)
    small = ["--set", "data.train_per_class=3", "--set", "data.test_per_class=1"]
    done = fedpews(
        "data",
        "show",
        "cifar-mnist",
        "--data-dir",
        str(tmp_path),
        *small,
        "--out",
        str(tmp_path / "split.png"),
    )
    assert done.code == 0, done.stderr
    head = "cifar-mnist: 2 clients, 60 training and 20 test samples, 20 classes, inputs 3×32×32"
    assert done.stdout.startswith(head)
    assert re.search(r"cifar10 +30 +10 +cifar10: airplane, cifar10: automobile", done.stdout)
    assert re.search(r"mnist +30 +10 +mnist: 0, mnist: 1", done.stdout)
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")


def test_many_clients_are_summed_up() -> None:
    many = ["data.partition=dirichlet", "data.alpha=0.5", "data.clients=300"]
    done = fedpews("data", "show", "synthetic-3.2k", *(word for one in many for word in ("--set", one)))
    assert re.search(r"and 270 more; a client has \d+ to \d+ samples, half of them at least \d+", done.stdout)
    assert len(done.stdout.splitlines()) < 40


def test_a_picture_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    done = fedpews("data", "show", "synthetic-3.2k", "--out", str(tmp_path / "split.wrong"))
    assert done.code == 2
    assert "split.wrong" in done.stderr


# the page's own examples


def blocks() -> Iterator[tuple[str, list[str]]]:
    """The page's commands: (folder, lines)."""
    for folder, text in re.findall(r"<!-- run in (\S+) -->\n```sh\n(.*?)```", PAGE, re.DOTALL):
        yield folder, text.strip().splitlines()


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


def test_the_page_has_its_examples() -> None:
    assert [folder for folder, _ in blocks()] == [
        "examples/own-data",
        "examples/own-data",
        "examples/own-model",
    ]


@pytest.mark.parametrize(("number", "folder"), [(n, folder) for n, (folder, _) in enumerate(blocks())])
def test_the_pages_commands_work_as_written(
    number: int, folder: str, examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (examples / "examples/own-data/clinics").exists():
        monkeypatch.chdir(examples / "examples/own-data")
        runpy.run_path("make_folders.py", run_name="__main__")
    monkeypatch.chdir(examples / folder)
    for line in list(blocks())[number][1]:
        program, *arguments = shlex.split(line)
        if program == "python":
            runpy.run_path(arguments[0], run_name="__main__")
            continue
        assert program == "fedpews"
        quick = ["--set", "runtime.engine=eager"] if arguments[0] == "run" else []
        done = fedpews(*arguments, *quick)
        assert done.code == 0, done.stderr
        for word in re.findall(r"\d+\.\d\d ± ", done.stdout):
            assert float(word.split()[0]) > 60, f"{line}\n{done.stdout}"  # a quarter is chance


@pytest.mark.parametrize("key", re.findall(r"^\| `(?!A\+B|data\.|model\.)([^`:]+)`", PAGE, re.MULTILINE))
def test_every_name_on_the_page_exists(key: str) -> None:
    from fedpews.data import PARTITIONS
    from fedpews.exporting import WRITERS
    from fedpews.models import MODELS

    assert key in {**SOURCES, **PARTITIONS, **MODELS, **WRITERS}


def test_the_page_names_every_partition_and_model() -> None:
    from fedpews.data import PARTITIONS
    from fedpews.models import MODELS

    assert [name for name in (*PARTITIONS, *MODELS) if f"| `{name}` |" not in PAGE] == []


# what is malformed


RUN = ["run", "synthetic-3.2k", "--rounds", "1", "--seeds", "0", "--set", "runtime.engine=eager"]


def own(tmp_path: Path, **arrays: dict[str, np.ndarray]) -> str:
    folder = tmp_path / "sites"
    folder.mkdir()
    for name, content in arrays.items():
        np.savez(folder / f"{name}.npz", **content)
    return f"data.name=folder:{folder}"


GOOD = {"x": np.random.default_rng(0).normal(size=(8, 5)), "y": np.arange(8) % 4}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"a": GOOD}, "needs an entry called test"),
        ({"test": GOOD}, "needs an entry per client"),
        ({"a": {"x": GOOD["x"]}, "test": GOOD}, "a.npz: lacks y; it has x"),
        ({"a": GOOD | {"y": np.arange(7)}, "test": GOOD}, "8 inputs but 7 labels"),
        ({"a": GOOD | {"x": GOOD["x"] * np.nan}, "test": GOOD}, "NaN"),
        ({"a": GOOD | {"y": GOOD["y"] - 1}, "test": GOOD}, "label -1 is below 0"),
        ({"a": GOOD, "test": {"x": np.zeros((8, 6)), "y": GOOD["y"]}}, "both must be the same"),
        (
            {"a": GOOD, "b": {"x": np.zeros((8, 6)), "y": GOOD["y"]}, "test": GOOD},
            "all clients need the same",
        ),
        ({"a": {"x": np.array([{}]), "y": np.zeros(1, int)}, "test": GOOD}, "not a readable npz file"),
    ],
    ids=["no test", "no client", "no y", "too few labels", "nan", "below 0", "test shape", "shape", "pickle"],
)
def test_a_malformed_folder_is_refused(
    entries: dict[str, dict[str, np.ndarray]], words: str, tmp_path: Path
) -> None:
    done = fedpews(*RUN, "--set", own(tmp_path, **entries), "--out", str(tmp_path / "run"))
    assert done.code == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


def test_a_folder_that_is_not_there_is_missing_data(tmp_path: Path) -> None:
    done = fedpews(*RUN, "--set", f"data.name=folder:{tmp_path}/nowhere", "--out", str(tmp_path / "run"))
    assert done.code == 3
    assert "is not a folder" in done.stderr


OWN_MODULE = """
import torch
from torch import nn

def nothing(): return 5
def broken(): raise KeyError("patients")
class Few(nn.Linear):
    def __init__(self, inputs): super().__init__(inputs, 2)
class Wrong(nn.Linear):
    def __init__(self, classes): super().__init__(7, classes)
class Untraceable(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.layer, self.head = nn.Linear(inputs, 4), nn.Linear(4, classes)
    def forward(self, x):
        return self.head(self.layer(x).sort(dim=1).values)
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.name=own_things_for_test:nothing", "must return (clients, test)"),
        ("data.name=own_things_for_test:broken", "KeyError: 'patients'"),
        ("data.name=own_things_for_test:absent", "has no function 'absent'"),
        ("data.name=no_such_module:make", "No module named 'no_such_module'"),
        ("model.name=own_things_for_test:absent", "has no class or function 'absent'"),
        ("model.name=own_things_for_test:nothing", "not a torch.nn.Module"),
        ("model.name=own_things_for_test:Few", "needs a model with outputs of shape (4,)"),
        ("model.name=own_things_for_test:Wrong", "cannot take inputs of shape (5,)"),
        ("model.name=own_things_for_test:Untraceable", "layer"),
        ("model.name=cnn", "needs images"),
        ("model.width=3", "no option model.width"),
    ],
)
def test_a_malformed_module_is_refused(
    setting: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_things_for_test.py").write_text(OWN_MODULE)
    done = fedpews(*RUN, "--set", setting, "--set", "warmup.rounds=1", "--out", str(tmp_path / "run"))
    assert done.code == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
