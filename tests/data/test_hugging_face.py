"""Hugging Face datasets on disk, and the partitioners of flwr-datasets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpews.data import load
from fedpews.data.inputs import take
from fedpews.data.partition import partition
from fedpews.data.table import DataTable
from fedpews.errors import ConfigError, DataMissing

INSTALL = "pip install 'fedpews[hf]'"


@pytest.fixture(scope="module")
def datasets() -> Any:
    return pytest.importorskip("datasets", reason=INSTALL)


def save(datasets: Any, folder: Path, **splits: dict[str, Any]) -> str:
    made = {split: datasets.Dataset.from_dict(columns) for split, columns in splits.items()}
    datasets.DatasetDict(made).save_to_disk(folder)
    return f"hf:{folder}"


def rows(count: int, **more: Any) -> dict[str, Any]:
    return {"age": list(range(count)), "bmi": [20.5] * count, "sick": [i % 2 for i in range(count)]} | more


def test_columns_are_inputs_labels_and_clients_by_name(datasets: Any, tmp_path: Path) -> None:
    name = save(datasets, tmp_path, train=rows(6, clinic=list("aabbba")), test=rows(4, clinic=list("abab")))
    data = load(name, label="sick", inputs=["age", "bmi"], client="clinic")
    assert data.client_names == ("a", "b")
    assert data.counts().tolist() == [[1, 2], [2, 1]]
    assert data.x[data.clients[0]].tolist() == [[0.0, 20.5], [1.0, 20.5], [5.0, 20.5]]
    assert data.test_y.tolist() == [0, 1, 0, 1]


def test_without_a_column_of_clients_the_partition_makes_them(datasets: Any, tmp_path: Path) -> None:
    name = save(datasets, tmp_path, train=rows(6), test=rows(4))
    data = load(name, label="sick", inputs=["age"], partition="parity")
    assert data.counts().tolist() == [[3, 0], [0, 3]]


def test_images_and_classes_by_name(datasets: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(np.full((4 + i % 2, 5, 3), 255, np.uint8)) for i in range(4)]
    columns = {"image": pictures, "label": ["cat", "dog", "dog", "cat"]}
    name = save(datasets, tmp_path, train=columns, test=columns)
    data = load(name, image_size=4, partition="iid", clients=1)
    assert data.shape == (3, 4, 4)
    assert (data.class_names, data.y.tolist()) == (("cat", "dog"), [0, 1, 1, 0])
    assert float(take(data.x, data.clients[0]).max()) == 1.0
    with pytest.raises(ConfigError, match=r"images of column 'image' differ in size; set data\.image_size"):
        load(name, partition="iid", clients=1)


def test_lists_of_whole_numbers_are_tokens(datasets: Any, tmp_path: Path) -> None:
    columns = {"tokens": [[1, 2, 3], [4, 5, 6]], "label": [0, 1]}
    name = save(datasets, tmp_path, train=columns, test=columns)
    data = load(name, partition="iid", clients=1)
    assert data.x.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert str(data.x.dtype) == "torch.int64"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"has the columns age, bmi, sick; say which holds the label: data\.label"),
        ({"label": "sick"}, r"say which hold the inputs: data\.inputs"),
        ({"label": "sick", "inputs": ["agee"]}, r"has the columns age, bmi beside the label"),
        ({"label": "sick", "inputs": ["age"], "client": "site"}, r"data\.client: .* has no column 'site'"),
    ],
)
def test_columns_that_are_not_there_are_said(
    datasets: Any, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    name = save(datasets, tmp_path, train=rows(6), test=rows(4))
    with pytest.raises(ConfigError, match=message):
        load(name, **options)


def test_text_unequal_lists_and_missing_splits_are_said(datasets: Any, tmp_path: Path) -> None:
    text = {"text": ["good", "bad"], "label": [0, 1]}
    with pytest.raises(ConfigError, match="column 'text' holds text; tokenise it first"):
        load(save(datasets, tmp_path / "text", train=text, test=text))
    ragged = {"tokens": [[1, 2], [3]], "label": [0, 1]}
    with pytest.raises(ConfigError, match="rows of column 'tokens' have unequal lengths"):
        load(save(datasets, tmp_path / "ragged", train=ragged, test=ragged))
    with pytest.raises(ConfigError, match="has no rows in a split called test; it has train"):
        load(save(datasets, tmp_path / "train", train=ragged))


def test_nothing_is_fetched(datasets: Any) -> None:
    with pytest.raises(DataMissing, match=r"fetch it once with datasets\.load_dataset") as refusal:
        load("hf:nobody/nothing")
    assert "\n" not in str(refusal.value)
    assert not datasets.config.HF_HUB_OFFLINE


def test_without_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs: pip install 'fedpews\[hf\]'"):
        load("hf:anything")


class TestFlwrPartitioners:
    LABELS = np.arange(40) % 4

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("flwr_datasets", reason="pip install flwr-datasets")

    def split(self, name: str, **options: Any) -> list[list[int]]:
        table = DataTable(**options)
        return [part.tolist() for part in partition(f"flwr:{name}", self.LABELS, 4, table)]

    def test_every_row_is_assigned_once_and_the_seed_decides(self) -> None:
        options = {"clients": 3, "alpha": 0.5, "partitioner": {"min_partition_size": 1}}
        first, again, other = (self.split("DirichletPartitioner", seed=seed, **options) for seed in (0, 0, 1))
        assert sorted(row for part in first for row in part) == list(range(40))
        assert first == again != other

    def test_options_are_the_partitioners_own(self) -> None:
        parts = self.split(
            "PathologicalPartitioner",
            clients=4,
            partitioner={"num_classes_per_partition": 1, "class_assignment_mode": "first-deterministic"},
        )
        assert [len(set(self.LABELS[part])) for part in parts] == [1, 1, 1, 1]

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            (
                "DirichletPartitoner",
                {},
                "no partitioner 'DirichletPartitoner'; did you mean 'DirichletPartitioner'",
            ),
            (
                "IidPartitioner",
                {"clients": 3, "partitioner": {"colour": 1}},
                "flwr:IidPartitioner': .*colour",
            ),
        ],
    )
    def test_what_is_wrong_is_said(self, name: str, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.split(name, **options)


def test_without_flwr_datasets_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(ConfigError, match="needs: pip install flwr-datasets"):
        partition("flwr:IidPartitioner", np.arange(4), 4, DataTable(clients=2))
