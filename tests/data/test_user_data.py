"""Your own data: folders and functions, and what is wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedpews.data import load
from fedpews.data.inputs import take
from fedpews.errors import ConfigError, DataMissing


def write_npz(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        np.savez(folder / f"{name}.npz", x=np.full((4, 5), number, np.float32), y=np.arange(4) % 3)


def write_images(folder: Path, mode: str = "RGB") -> None:
    for client in ("site-2", "site-10", "test"):
        for label, kind in enumerate(("cat", "dog")):
            (folder / client / kind).mkdir(parents=True)
            for number in range(2):
                colour = (250, 0, 10 * number) if mode == "RGB" else 100 + label
                Image.new(mode, (6, 4), colour).save(folder / client / kind / f"{number}.png")


def test_a_folder_of_npz_files_is_a_client_each(tmp_path: Path) -> None:
    write_npz(tmp_path, "site-2", "site-10", "test")
    (tmp_path / "README.md").write_text("how this was made")
    (tmp_path / ".hidden").write_text("")
    data = load(f"folder:{tmp_path}")
    assert data.client_names == ("site-2", "site-10")  # 2 before 10
    assert data.counts().tolist() == [[2, 1, 1], [2, 1, 1]]
    assert data.x[data.clients[1]].unique().tolist() == [1.0]
    assert data.test_x.unique().tolist() == [2.0]


def test_a_sub_folder_with_an_npz_file_is_a_client_too(tmp_path: Path) -> None:
    for name in ("a", "b", "test"):
        write_npz(tmp_path / name, "samples")
    assert load(f"folder:{tmp_path}").client_names == ("a", "b")


def test_own_data_can_be_split_anew(tmp_path: Path) -> None:
    write_npz(tmp_path, "a", "b", "test")
    data = load(f"folder:{tmp_path}", partition="iid", clients=4, pool=True)
    assert [len(rows) for rows in data.clients] == [2, 2, 2, 2]
    with pytest.raises(ConfigError, match="makes 2 clients here"):
        load(f"folder:{tmp_path}", clients=4)


@pytest.mark.parametrize("shape", [(4, 6, 5), (4, 6, 5, 3), (4, 3, 6, 5), (4, 1, 6, 5)])
def test_bytes_in_an_npz_file_stay_bytes_until_a_batch_scales_them_to_one(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    for name in ("a", "test"):
        np.savez(tmp_path / f"{name}.npz", x=np.full(shape, 255, np.uint8), y=np.zeros((4, 1), np.uint8))
    data = load(f"folder:{tmp_path}")
    assert data.x.shape == (4, 3 if 3 in shape else 1, 6, 5)
    assert data.x.dtype == torch.uint8
    assert take(data.x, slice(0, 4)).unique().tolist() == [1.0]


def test_image_folders_name_the_classes(tmp_path: Path) -> None:
    write_images(tmp_path)
    data = load(f"folder:{tmp_path}")
    assert data.client_names == ("site-2", "site-10")
    assert data.class_names == ("cat", "dog")
    assert data.x.shape == (8, 3, 4, 6)
    assert data.counts().tolist() == [[2, 2], [2, 2]]
    torch.testing.assert_close(
        take(data.x, slice(0, 2))[1, :, 0, 0], torch.tensor([250.0, 0.0, 10.0]) / 127.5 - 1
    )


def test_grey_images_stay_grey_and_become_rgb_beside_rgb(tmp_path: Path) -> None:
    write_images(tmp_path, "L")
    assert load(f"folder:{tmp_path}").x.shape == (8, 1, 4, 6)
    Image.new("RGBA", (6, 4), (9, 9, 9, 255)).save(tmp_path / "test/cat/0.png")
    assert load(f"folder:{tmp_path}").x.shape == (8, 3, 4, 6)


def npz(**arrays: np.ndarray) -> Callable[[Path], None]:
    good = {"x": np.ones((4, 5)), "y": np.zeros(4, int)}
    return lambda root: np.savez(root / "b.npz", **(good | arrays))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "test.npz").unlink(), "needs an entry called test"),
        (lambda root: [(root / f"{name}.npz").unlink() for name in "ab"], "needs an entry per client"),
        (lambda root: (root / "b.npy").write_bytes(b""), "an entry must be an .npz file, a table"),
        (lambda root: write_npz(root / "b", "samples"), "'b' exists as a file and as a folder"),
        (lambda root: (root / "c").mkdir(), "has images and npz files for different clients"),
        (lambda root: write_npz(root / "c", "one", "two"), "has 2 npz files"),
        (lambda root: (root / "b.npz").write_bytes(b"no"), "b.npz: not a readable npz"),
        (lambda root: np.savez(root / "b.npz", x=np.ones(3)), "b.npz: lacks y; it has x"),
        (npz(y=np.zeros(3, int)), "client 1: 4 inputs but 3 labels"),
        (npz(y=np.zeros(4)), "of integer labels .*got torch.float64"),
        (npz(y=np.full(4, -1)), "client 1: label -1 is below 0"),
        (npz(x=np.full((4, 5), "a")), "x must hold numbers"),
        (npz(x=np.ones((4, 6))), "client 1 has inputs of shape"),
        (npz(x=np.full((4, 5), np.nan)), "client 1: x has NaN"),
        (npz(x=np.ones((0, 5)), y=np.zeros(0, int)), "client 1: there are no samples"),
        (npz(x=np.ones((4, 5), np.uint8)), "must be images"),
        (npz(x=np.array([{}] * 4, dtype=object)), "plain arrays"),
    ],
)
def test_a_malformed_folder_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    write_npz(tmp_path, "a", "b", "test")
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(f"folder:{tmp_path}")


def test_a_folder_that_is_not_there_is_missing_data(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="is not a folder"):
        load(f"folder:{tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: Image.new("RGB", (5, 4)).save(root / "test/cat/0.png"), "is 5×4, those before it 6×4"),
        (lambda root: (root / "test/cat/0.png").write_bytes(b"no"), "cannot be read as an image"),
        (lambda root: (root / "test/cat/a.dat").write_bytes(b"no"), "a.dat: cannot be read as an image"),
        (lambda root: (root / "none").mkdir(), "none: has no images"),
        (lambda root: Image.new("F", (6, 4)).save(root / "test/cat/0.tif"), "pixels of kind 'F'"),
    ],
)
def test_a_malformed_image_folder_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    write_images(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(f"folder:{tmp_path}")


MODULE = """
import torch
from fedpews.data import from_clients

def make(seed):
    generator = torch.Generator().manual_seed(seed)
    client = lambda label: (torch.randn(3, 5, generator=generator), torch.full((3,), label))
    return [client(0), client(1)], client(1)

def federation():
    return from_clients(*make(0), class_names=("yes", "no"))

def wrong():
    return 3

def nan():
    clients, test = make(0)
    clients[1][0][0, 0] = float("nan")
    return clients, test

def broken():
    return 1 / 0

class Items(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.y)
    def __getitem__(self, row):
        return self.x[row], int(self.y[row])

def items(seed):
    clients, test = make(seed)
    return [Items(*client) for client in clients], Items(*test)

value = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_own_data", raising=False)
    (tmp_path / "my_own_data.py").write_text(MODULE)
    return "my_own_data"


def test_a_function_in_the_working_directory_makes_the_clients(module: str, tmp_path: Path) -> None:
    before = list(sys.path)
    data = load(f"{module}:make", seed=4)
    assert sys.path == before
    assert data.counts().tolist() == [[3, 0], [0, 3]]
    assert data.name == "my_own_data:make"
    assert torch.equal(data.x, load(f"{tmp_path}/my_own_data.py:make", seed=4).x)
    assert not torch.equal(data.x, load(f"{module}:make", seed=5).x)
    assert load(f"{module}:federation").class_names == ("yes", "no")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_own_data:wrong", r"must return \(clients, test\) or a Federation; it returned int"),
        ("my_own_data:nan", "client 1: x has NaN"),
        ("my_own_data:broken", "could not be made: ZeroDivisionError"),
        ("my_own_data:value", "has no function 'value'"),
        ("my_own_data:absent", "has no function 'absent'"),
        ("my_own_dat:make", "No module named 'my_own_dat'"),
        ("absent.py:make", "No such file"),
    ],
)
def test_a_function_that_does_not_deliver_is_refused(module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name)


@pytest.mark.parametrize(
    "options", [{}, {"pool": True, "partition": "noc", "clients": 1, "classes_per_client": 1}]
)
def test_datasets_read_batch_by_batch_are_assigned_like_others(module: str, options: dict[str, Any]) -> None:
    lazy, whole = (load(f"{module}:items", lazy=lazy, **options) for lazy in (True, False))
    assert lazy.counts().tolist() == whole.counts().tolist()
    for one, other in zip(lazy.clients, whole.clients, strict=True):
        assert torch.equal(take(lazy.x, one), take(whole.x, other))
    assert torch.equal(lazy.test_x[:9], whole.test_x[:9])


def test_drawing_per_class_is_for_named_data(module: str) -> None:
    with pytest.raises(ConfigError, match="not for your own data"):
        load(f"{module}:make", train_per_class=1)
