"""Three hospitals of one's own on the command line: a file that fits them, who holds what, no split of another's."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import fedpews
from fedpews.data import load
from fedpews.errors import ConfigError

FOLDERS = {
    "north": ["cnv", "dme"],
    "south": ["adipose", "debris"],
    "east": ["drusen"],
    "test": ["cnv", "dme", "adipose", "debris", "drusen"],
}


@pytest.fixture
def hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three hospitals' images of 16×16, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedpews.cli.console.out._width", 200)
    for client, classes in FOLDERS.items():
        for name in classes:
            (tmp_path / "hospitals" / client / name).mkdir(parents=True)
            for number in range(3):
                Image.new("L", (16, 16), 20 * number).save(f"hospitals/{client}/{name}/{number}.png")
    return tmp_path / "hospitals"


def test_a_partition_left_over_from_a_recipe_does_not_mix_ones_own_clients(hospitals: Path) -> None:
    fedpews("new")
    text = Path("my.toml").read_text()
    Path("my.toml").write_text(text.replace('name = "synthetic-32k"', 'name = "folder:hospitals"'))
    for command in (["data", "show"], ["run"]):
        done = fedpews(*command, "my.toml")
        assert done.code == 2
        assert "folder:hospitals has 3 clients of its own (east, north, south)" in done.stderr
        assert "data.partition = 'parity' would mix them; remove it" in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 2


def test_ones_own_clients_are_split_anew_when_their_samples_are_pooled(hospitals: Path) -> None:
    with pytest.raises(ConfigError, match="would mix them"):
        load(f"folder:{hospitals}", partition="iid", clients=3)
    assert len(load(f"folder:{hospitals}", partition="iid", clients=5, pool=True)) == 5
    with pytest.raises(ConfigError, match=r"data.pool pools your own clients' samples"):
        load(f"folder:{hospitals}", pool=True)


def test_samples_of_a_single_entry_are_split_without_more_words(tmp_path: Path) -> None:
    for name in ("all", "test"):
        np.savez(tmp_path / f"{name}.npz", x=np.ones((8, 2)), y=np.arange(8) % 4)
    assert len(load(f"folder:{tmp_path}", partition="parity")) == 2


def test_new_writes_a_file_that_fits_ones_own_images(hospitals: Path) -> None:
    done = fedpews("new", "--data", "folder:hospitals")
    assert done.code == 0, done.stderr
    made = tomllib.loads(Path("my.toml").read_text())
    classes = ["adipose", "cnv", "debris", "dme", "drusen"]
    assert made["data"] == {"name": "folder:hospitals", "classes": classes}
    assert made["model"] == {"name": "cnn"}
    assert "3 clients (east, north, south), 5 classes" in done.stdout
    shown = fedpews("data", "show", "my.toml")
    assert shown.stdout.startswith("folder:hospitals: 3 clients, 15 training and 15 test samples, 5 classes")


def test_new_brings_images_of_unequal_size_to_one(hospitals: Path) -> None:
    Image.new("L", (40, 24)).save(hospitals / "east/drusen/9.png")
    assert fedpews("new", "--data", "folder:hospitals").code == 0
    assert tomllib.loads(Path("my.toml").read_text())["data"]["image_size"] == 16
    assert fedpews("data", "show", "my.toml").code == 0


@pytest.mark.parametrize(
    ("labels", "task", "classes"),
    [(("no", "yes"), None, ["no", "yes"]), (("0", "1"), None, None), (("4.5", "7.25"), "regression", None)],
)
def test_new_writes_a_file_that_fits_ones_own_tables(
    labels: tuple[str, str], task: str | None, classes: list[str] | None, hospitals: Path
) -> None:
    (hospitals.parent / "tables").mkdir()
    for client in ("north", "south", "test"):
        Path(f"tables/{client}.csv").write_text("age,label\n" + f"40,{labels[0]}\n50,{labels[1]}\n")
    assert fedpews("new", "--data", "folder:tables").code == 0
    made = tomllib.loads(Path("my.toml").read_text())
    assert made["data"].get("classes") == classes
    assert made["model"]["name"] == "mlp"
    assert made.get("task", {}).get("name") == task


def test_new_says_what_is_wrong_with_ones_own_data_and_writes_nothing(hospitals: Path) -> None:
    (hospitals / "south" / "CNV").mkdir()
    done = fedpews("new", "--data", "folder:hospitals")
    assert done.code == 2
    assert "classes 'cnv' (north, test) and 'CNV' (south) differ only in case or spaces" in done.stderr
    assert not Path("my.toml").exists()
    assert "--recipe" in fedpews("new", "--data", "mnist").stderr


def test_show_prints_the_names_of_classes(hospitals: Path) -> None:
    fedpews("new", "--data", "folder:hospitals")
    shown = fedpews("data", "show", "my.toml").stdout.splitlines()
    lines = {line.split()[0]: line.strip() for line in shown if line.strip()}
    assert lines["north"].split(maxsplit=3)[1:] == ["6", "2", "cnv, dme"]
    assert lines["east"].split(maxsplit=3)[1:] == ["3", "1", "drusen"]


def test_show_of_one_class_or_none_says_so(hospitals: Path) -> None:
    (hospitals.parent / "tables").mkdir()
    for client in ("north", "south", "test"):
        Path(f"tables/{client}.csv").write_text("age,label\n40,4.5\n50,5.5\n")
    number = ["--set", "data.name=folder:tables", "--set", "task.name=regression"]
    Path("bare.toml").write_text("rounds = 1\n")
    shown = fedpews("data", "show", "bare.toml", *number).stdout
    assert "test samples, 1 target, inputs 1" in shown.splitlines()[0]
    assert "classes" not in shown
    assert ["north", "2"] in [line.split() for line in shown.splitlines()]
    for client in ("north", "south", "test"):
        Path(f"tables/{client}.csv").write_text("age,label\n40,0\n50,0\n")
    assert "1 class, inputs" in fedpews("data", "show", "bare.toml", *number[:2]).stdout


@pytest.mark.parametrize(
    ("value", "words"),
    [("0", "greater than 0, or 'given', got 0"), ("1.5", "less than 1, or 'given', got 1.5")],
)
def test_a_part_held_out_that_is_no_part_is_refused_in_plain_words(value: str, words: str) -> None:
    done = fedpews("run", "synthetic-3.2k", "--set", f"data.validation={value}")
    assert done.code == 2
    assert f"data.validation: should be {words}" in done.stderr
