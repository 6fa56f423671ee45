"""Tables of several clients: columns by name, labels and inputs that are numbers, values that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedpews.data import load
from fedpews.errors import ConfigError
from fedpews.tasks import Regression

NORTH = "age,bmi,label\n40,21.5,0\n50,22.5,1\n"


def write(root: Path, **tables: str) -> str:
    for name, text in tables.items():
        (root / f"{name}.csv").write_text(text)
    return f"folder:{root}"


def test_columns_are_matched_by_name_whatever_their_order(tmp_path: Path) -> None:
    south = "label,bmi,age\n0,21.5,40\n1,22.5,50\n"
    data = load(write(tmp_path, north=NORTH, south=south, test=south))
    assert data.x[data.clients[0]].tolist() == [[40.0, 21.5], [50.0, 22.5]]
    assert torch.equal(data.x[data.clients[0]], data.x[data.clients[1]])
    assert torch.equal(data.x[data.clients[0]], data.test_x)
    assert data.columns == ("age (number)", "bmi (number)", "label (label)")


def test_columns_are_in_the_order_of_their_names_with_numbers_as_people_count(tmp_path: Path) -> None:
    table = "x10,x2,x1,label\n10,2,1,0\n10,2,1,1\n"
    assert load(write(tmp_path, a=table, test=table)).x[0].tolist() == [1.0, 2.0, 10.0]


@pytest.mark.parametrize(
    ("south", "words"),
    [
        (
            "age,label\n40,0\n",
            r"south.csv: lacks bmi \(number\); .*north.csv has age \(number\), bmi",
        ),
        ("age,bmi,hb,label\n40,21,7,0\n", r"south.csv: has hb \(number\) in addition; .*north.csv has"),
        ("age,BMI,label\n40,21,0\n", r"lacks bmi \(number\) and has BMI \(number\) in addition"),
        ("age,bmi,label\n40,True,0\n", r"lacks bmi \(number\) and has bmi \(true/false\) in addition"),
        ("age,bmi,target\n40,21,0\n", r"lacks label \(label\) and has target \(label\) in addition"),
        ("age,bmi,label\n40,21.5,0\n41,22kg,0\n", r"south.csv: column 'bmi', row 2: '22kg' is no number"),
        ("age,age,bmi,label\n40,41,21,0\n", "south.csv: has two columns 'age'"),
        (",age,bmi,label\n0,40,21,0\n", "south.csv: column 1 has no name"),
        (
            "age,bmi,label,y\n40,21,0,0\n",
            r"south.csv: has the columns age, bmi, label, y; say which holds the label",
        ),
    ],
)
def test_a_table_whose_columns_differ_is_refused_and_named(south: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load(write(tmp_path, north=NORTH, south=south, test=NORTH))


def test_the_test_tables_columns_are_compared_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"test.csv: lacks bmi"):
        load(write(tmp_path, north=NORTH, test="age,label\n40,0\n"))


def test_a_text_target_in_regression_is_refused_with_its_file_row_and_value(tmp_path: Path) -> None:
    good, bad = "age,label\n1,40.5\n2,41.5\n", "age,label\n1,44.5\n2,46.5d\n"
    with pytest.raises(
        ConfigError, match=r"north.csv: row 2: the label '46.5d' is no number, which regression"
    ):
        load(write(tmp_path, north=bad, test=good), task=Regression())
    assert load(write(tmp_path, north=good, test=good), task=Regression()).y.flatten().tolist() == [
        40.5,
        41.5,
    ]


GAPS = "age,bmi,label\n40,,0\n50,20,1\n60,30,1\n,40,0\n"


def test_missing_values_are_refused_with_file_column_and_count(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, north=NORTH, south=GAPS, test=NORTH))
    assert "south.csv: column 'age' lacks a value in 1 of 4 rows, first in row 4" in str(refused.value)
    assert 'data.missing = "mean"' in str(refused.value)


def test_missing_values_become_the_clients_own_training_mean_when_asked(tmp_path: Path) -> None:
    # south: age (40 + 50 + 60) / 3 = 50, bmi (20 + 30 + 40) / 3 = 30; north has none missing
    # the common test: over all training rows, age (40 + 50 + 40 + 50 + 60) / 5 = 48
    test = "age,bmi,label\n,25,0\n"
    data = load(write(tmp_path, north=NORTH, south=GAPS, test=test), missing="mean")
    assert data.x[data.clients[1]].tolist() == [[40, 30], [50, 20], [60, 30], [50, 40]]
    assert data.test_x.tolist() == [[48, 25]]


def test_a_clients_own_test_rows_get_its_training_means(tmp_path: Path) -> None:
    for client, ages in (("north", (10, 20)), ("south", (30, 50))):
        (tmp_path / client).mkdir()
        rows = "".join(f"{age},{label}\n" for label, age in enumerate(ages))
        (tmp_path / client / "train.csv").write_text(f"age,label\n{rows}")
        (tmp_path / client / "test.csv").write_text("age,label\n,0\n1,1\n")
    assert load(f"folder:{tmp_path}", missing="mean").test_x.flatten().tolist() == [15, 1, 40, 1]


@pytest.mark.parametrize("options", [{}, {"missing": "mean"}])
def test_a_label_that_is_missing_is_always_refused(options: dict[str, Any], tmp_path: Path) -> None:
    table = "age,bmi,label\n40,21,\n50,22,1\n"
    with pytest.raises(ConfigError, match="'label' lacks a value in 1 of 2 rows, first in row 1"):
        load(write(tmp_path, north=table, test=NORTH), **options)


def test_a_column_without_any_value_has_no_mean(tmp_path: Path) -> None:
    south = "age,bmi,label\n40,,0\n50,,1\n"
    with pytest.raises(ConfigError, match=r"south.csv: column 'bmi' has no values"):
        load(write(tmp_path, north=NORTH, south=south, test=NORTH), missing="mean")


def test_standard_scaling_uses_each_clients_own_training_rows(tmp_path: Path) -> None:
    # north: age 40 and 60, mean 50, deviation 10; south: age 10 and 14, mean 12, deviation 2
    # the common test by all training rows: 40, 60, 10, 14, mean 31, deviation √(1696 / 4) = 20.59
    tables = {
        "north": "age,old,label\n40,False,0\n60,True,1\n",
        "south": "age,old,label\n10,False,0\n14,True,1\n",
        "test": "age,old,label\n31,True,0\n",
    }
    data = load(write(tmp_path, **tables), scaling="standard")
    assert data.x.tolist() == [[-1, 0], [1, 1], [-1, 0], [1, 1]]
    assert data.test_x.tolist() == [[0, 1]]


def test_a_column_of_one_value_is_scaled_to_zero(tmp_path: Path) -> None:
    table = "age,label\n40,0\n40,1\n"
    assert load(write(tmp_path, north=table, test=table), scaling="standard").x.tolist() == [[0], [0]]


def test_tables_have_no_scaling_of_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of tables data.scaling is 'standard'; got 'unit'"):
        load(write(tmp_path, north=NORTH, test=NORTH), scaling="unit")
