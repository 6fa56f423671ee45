"""Sites whose own folders differ: one meaning for every label and every column, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import MessageType
from memory_grid import MemoryGrid, site_handler
from PIL import Image
from test_engine import experiment, write

from fedpews.errors import ConfigError, FedpewsError
from fedpews.experiment import Experiment
from fedpews.flower.app import serve
from fedpews.flower.data import server_data
from fedpews.flower.site import Site
from fedpews.results.records import read_rounds

NOTHING = {"partition": None, "train_per_class": None, "test_per_class": None}


def hospital(root: Path, classes: list[str]) -> str:
    """A site's folder of images: one client and its test, two images of each class."""
    for part in ("clinic", "test"):
        for shade, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for number in range(2):
                Image.new("L", (8, 8), 60 * shade + 30 * number).save(root / part / name / f"{number}.png")
    return f"folder:{root}"


def two_sites(tmp_path: Path, folders: list[str], **changes: Any) -> tuple[Path, dict[int, Any]]:
    made = experiment(
        rounds=1,
        data={"name": "sites", "clients": 2, **NOTHING, **changes.pop("data", {})},
        flower={"input_shape": [1, 8, 8], **changes.pop("flower", {})},
        method={"name": "fedavg"},
        **changes,
    )
    config = write(tmp_path / "experiment.toml", made)
    nodes = {
        site: site_handler(config, tmp_path / "state", site, data=folder)
        for site, folder in enumerate(folders)
    }
    return config, nodes


RETINA, COLON = ["cnv", "dme", "drusen"], ["adipose", "background", "debris"]


def test_sites_number_their_folders_by_the_experiments_classes(tmp_path: Path, grid: MemoryGrid) -> None:
    folders = [hospital(tmp_path / "eye", RETINA), hospital(tmp_path / "gut", COLON)]
    config, grid.nodes = two_sites(tmp_path, folders, data={"classes": [*RETINA, *COLON]})
    assert Site(config, {"site": 0, "data": folders[0]}).data.y.unique().tolist() == [0, 1, 2]
    assert Site(config, {"site": 1, "data": folders[1]}).data.y.unique().tolist() == [3, 4, 5]
    serve(config, grid, {"out": str(tmp_path / "run")})
    assert [record["round"] for record in read_rounds(tmp_path / "run")] == [1]
    assert '"drusen"' in (tmp_path / "run" / "federation.json").read_text()


def test_sites_with_class_folders_do_not_train_without_a_list_of_all_classes(
    tmp_path: Path, grid: MemoryGrid, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [hospital(tmp_path / "eye", RETINA), hospital(tmp_path / "gut", COLON)]
    config, grid.nodes = two_sites(tmp_path, folders, flower={"classes": 6})
    with pytest.raises(FedpewsError):
        serve(config, grid, {"out": str(tmp_path / "run")})
    for names in (RETINA, COLON):
        assert (
            f"this site's classes are {', '.join(names)}, and the experiment has no data.classes"
            in caplog.text
        )
    assert not [m for m in grid.sent if m.metadata.message_type == MessageType.TRAIN]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (["cnv", "stroma"], "clinic has cnv, stroma; data.classes has cnv, dme, drusen"),
        (["CNV", "dme"], "classes 'cnv' (data.classes) and 'CNV' (clinic, test) differ only in case"),
    ],
)
def test_a_site_whose_classes_do_not_fit_is_refused_with_both_lists(
    own: list[str], words: str, tmp_path: Path, grid: MemoryGrid, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [hospital(tmp_path / "eye", RETINA), hospital(tmp_path / "other", own)]
    config, grid.nodes = two_sites(tmp_path, folders, data={"classes": RETINA})
    with pytest.raises(FedpewsError):
        serve(config, grid, {"out": str(tmp_path / "run")})
    assert words in caplog.text
    # the site itself says the same
    with pytest.raises(ConfigError) as refused:
        Site(config, {"site": 1, "data": folders[1]})
    assert words in str(refused.value)


def test_the_servers_test_set_names_its_classes_in_the_same_list(tmp_path: Path) -> None:
    config, _ = two_sites(tmp_path, [], data={"classes": [*RETINA, *COLON]})
    pixels = np.zeros((2, 8, 8), np.uint8)
    np.savez(tmp_path / "test.npz", x=pixels, y=np.array(["debris", "cnv"]))
    data = server_data(Experiment.load(config), {"test": str(tmp_path / "test.npz")})
    assert data is not None
    assert data.test_y.tolist() == [5, 0]
    np.savez(tmp_path / "test.npz", x=pixels, y=np.array(["stroma", "cnv"]))
    with pytest.raises(ConfigError, match=r"'stroma' is not in data.classes: .*test.npz has cnv, stroma"):
        server_data(Experiment.load(config), {"test": str(tmp_path / "test.npz")})


def clinic(root: Path, table: str) -> str:
    root.mkdir()
    for part in ("clinic", "test"):
        (root / f"{part}.csv").write_text(table)
    return f"folder:{root}"


TABLE = "age,bmi,label\n40,21.5,0\n50,22.5,1\n"


def test_sites_tables_are_matched_by_column_name(tmp_path: Path, grid: MemoryGrid) -> None:
    turned = "label,bmi,age\n0,21.5,40\n1,22.5,50\n"
    folders = [clinic(tmp_path / "north", TABLE), clinic(tmp_path / "south", turned)]
    config, grid.nodes = two_sites(tmp_path, folders, flower={"input_shape": [2], "classes": 2})
    data = [Site(config, {"site": site, "data": folder}).data for site, folder in enumerate(folders)]
    assert data[0].x.tolist() == data[1].x.tolist() == [[40, 21.5], [50, 22.5]]
    serve(config, grid, {"out": str(tmp_path / "run")})
    assert [record["round"] for record in read_rounds(tmp_path / "run")] == [1]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("age,weight,label\n40,70,0\n50,80,1\n", "lacks bmi (number) and has weight (number) in addition"),
        ("age,bmi,label\n40,True,0\n50,False,1\n", "lacks bmi (number) and has bmi (true/false) in addition"),
    ],
)
def test_a_site_whose_columns_differ_is_refused_with_who_has_what(
    other: str, words: str, tmp_path: Path, grid: MemoryGrid, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [clinic(tmp_path / "north", TABLE), clinic(tmp_path / "south", other)]
    config, grid.nodes = two_sites(tmp_path, folders, flower={"input_shape": [2], "classes": 2})
    with pytest.raises(FedpewsError):
        serve(config, grid, {"out": str(tmp_path / "run")})
    assert f"its table {words}; site-0 has age (number), bmi (number), label (label)" in caplog.text
    assert not [m for m in grid.sent if m.metadata.message_type == MessageType.TRAIN]


def test_the_servers_test_table_says_which_columns_sites_must_have(
    tmp_path: Path, grid: MemoryGrid, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [clinic(tmp_path / "north", TABLE), clinic(tmp_path / "south", TABLE)]
    config, grid.nodes = two_sites(tmp_path, folders, flower={"input_shape": [2], "classes": 2})
    (tmp_path / "test.csv").write_text("label,bmi,age\n0,21.5,40\n1,22.5,50\n")
    serve(config, grid, {"out": str(tmp_path / "run"), "test": str(tmp_path / "test.csv")})
    assert [record["round"] for record in read_rounds(tmp_path / "run")] == [1]
    np.savez(tmp_path / "test.npz", x=np.ones((2, 2)), y=np.arange(2))
    with pytest.raises(FedpewsError):
        serve(config, grid, {"out": str(tmp_path / "other"), "test": str(tmp_path / "test.npz")})
    assert "its table has age (number), bmi (number), label (label) in addition; the server has no table" in (
        caplog.text
    )


def test_sites_scale_their_tables_by_their_own_rows_and_the_server_scales_none(tmp_path: Path) -> None:
    folder = clinic(tmp_path / "north", TABLE)
    config, _ = two_sites(
        tmp_path, [folder], data={"scaling": "standard"}, flower={"input_shape": [2], "classes": 2}
    )
    assert Site(config, {"site": 0, "data": folder}).data.x.tolist() == [[-1, -1], [1, 1]]
    with pytest.raises(ConfigError, match="by each site's own samples"):
        server_data(Experiment.load(config), {"test": str(tmp_path / "north" / "test.csv")})
