"""Class names: one list for all clients, and no two names for what may be one class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedpews
from fedpews.data import load
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.tasks import Regression


def write_images(root: Path, folders: dict[str, list[str]]) -> str:
    """``north: [cnv, dme]`` and so on, two images of each class; the colour is the class's index in the list."""
    for client, classes in folders.items():
        for shade, name in enumerate(classes):
            (root / client / name).mkdir(parents=True)
            for number in range(2):
                Image.new("L", (4, 4), 50 * shade).save(root / client / name / f"{number}.png")
    return f"folder:{root}"


def write_tables(root: Path, labels: dict[str, list[str]]) -> str:
    for client, values in labels.items():
        rows = "\n".join(f"{row}.5,{value}" for row, value in enumerate(values))
        (root / f"{client}.csv").write_text(f"age,label\n{rows}\n")
    return f"folder:{root}"


WRITERS = pytest.mark.parametrize("write", [write_images, write_tables])


@WRITERS
@pytest.mark.parametrize("other", ["CNV", "cnv ", "ｃnv"])
def test_names_that_differ_only_in_case_or_spaces_are_refused_with_who_has_them(
    write: Any, other: str, tmp_path: Path
) -> None:
    name = write(tmp_path, {"north": ["cnv", "dme"], "south": [other, "dme"], "test": ["cnv", "dme"]})
    with pytest.raises(ConfigError) as refused:
        load(name)
    assert f"'cnv' (north, test) and {other!r} (south) differ only in case" in str(refused.value)


@WRITERS
def test_a_test_set_that_writes_a_class_otherwise_adds_no_class(write: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'cnv' \(north\) and 'CNV' \(test\) differ only in case"):
        load(write(tmp_path, {"north": ["cnv", "dme"], "test": ["CNV", "dme"]}))


@WRITERS
def test_a_class_that_only_the_test_set_has_is_refused_unless_it_is_listed(
    write: Any, tmp_path: Path
) -> None:
    name = write(tmp_path, {"north": ["cnv", "dme"], "test": ["cnv", "drusen"]})
    with pytest.raises(
        ConfigError,
        match="test has the class 'drusen', which no client has for training",
    ):
        load(name)
    assert load(name, classes=["dme", "drusen", "cnv"]).test_y.unique().tolist() == [1, 2]


@WRITERS
def test_the_experiments_list_numbers_the_classes_of_every_client(write: Any, tmp_path: Path) -> None:
    name = write(tmp_path, {"north": ["cnv", "dme"], "south": ["adipose"], "test": ["cnv", "adipose"]})
    assert load(name).class_names == ("adipose", "cnv", "dme")  # the sorted union
    data = load(name, classes=["dme", "cnv", "debris", "adipose"])
    assert data.classes == 4
    assert data.class_names == ("dme", "cnv", "debris", "adipose")
    assert [sorted(set(data.y[rows].tolist())) for rows in data.clients] == [[0, 1], [3]]
    assert sorted(set(data.test_y.tolist())) == [1, 3]


@WRITERS
def test_a_name_that_is_not_in_the_experiments_list_is_refused_with_both_lists(
    write: Any, tmp_path: Path
) -> None:
    name = write(tmp_path, {"north": ["cnv", "dme"], "test": ["cnv", "dme"]})
    with pytest.raises(ConfigError) as refused:
        load(name, classes=["adipose", "cnv"])
    assert "class 'dme' is not in data.classes: north has cnv, dme; data.classes has adipose, cnv" in str(
        refused.value
    )
    with pytest.raises(ConfigError, match=r"'DME' \(data.classes\) and 'dme' \(north, test\) differ only"):
        load(name, classes=["cnv", "DME"])


def test_numbers_of_a_folder_are_those_of_its_own_classes_txt(tmp_path: Path) -> None:
    for client in ("north", "test"):
        np.savez(tmp_path / f"{client}.npz", x=np.ones((4, 2)), y=np.array([0, 0, 1, 1]))
    (tmp_path / "classes.txt").write_text("dme\ncnv\n")
    data = load(f"folder:{tmp_path}", classes=["adipose", "cnv", "dme"])
    assert data.y.tolist() == [2, 2, 1, 1]


def test_labels_are_text_for_all_clients_or_for_none(tmp_path: Path) -> None:
    name = write_tables(tmp_path, {"north": ["0", "1"], "south": ["no", "yes"], "test": ["no", "yes"]})
    with pytest.raises(ConfigError, match=r"labels are numbers in .*north.csv and text in .*south.csv"):
        load(name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": {"classes": []}}, "data.classes must name every class exactly once"),
        ({"data": {"classes": ["cnv", "CNV"]}}, "'cnv' .data.classes. and 'CNV' .data.classes. differ"),
        (
            {"data": {"classes": ["a", "b"]}, "task": {"classes": 3}},
            "task.classes is 3, but data.classes has 2",
        ),
        (
            {"data": {"classes": ["a", "b"]}, "flower": {"classes": 3}},
            "flower.classes is 3, but data.classes",
        ),
    ],
)
def test_a_list_of_classes_that_contradicts_itself_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Experiment(**settings)


def test_clients_given_in_python_get_the_experiments_names(tmp_path: Path) -> None:
    pair = (np.ones((4, 2), np.float32), np.array([0, 1, 0, 1]))
    given: dict[str, Any] = {"clients": [pair], "test": pair, "rounds": 1, "method": "fedavg"}
    fast: dict[str, Any] = {"model": {"name": "mlp", "hidden": [2]}, "runtime": {"engine": "eager"}}
    result = fedpews.run(**given, **fast, data={"classes": ["a", "b", "c"]})
    assert result.params[0]["classifier.weight"].shape[0] == 3
    with pytest.raises(ConfigError, match=r"labels up to 1, but data.classes has 1 name"):
        fedpews.run(**given, **fast, data={"classes": ["a"]})


def test_folders_of_classes_are_no_targets_of_regression(tmp_path: Path) -> None:
    name = write_images(tmp_path, {"north": ["cnv", "dme"], "test": ["cnv", "dme"]})
    with pytest.raises(ConfigError, match="the label 'cnv' is no number, which regression needs"):
        load(name, task=Regression())


def test_a_class_folder_without_images_is_a_class(tmp_path: Path) -> None:
    name = write_images(tmp_path, {"north": ["cnv", "dme"], "test": ["cnv", "dme"]})
    (tmp_path / "north" / "drusen").mkdir()
    assert load(name).class_names == ("cnv", "dme", "drusen")
