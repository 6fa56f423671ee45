"""Data files made to fill the memory, to hang or to start a program: refused before anything is spent on them."""

from __future__ import annotations

import io
import os
import resource
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib import format as npy

from fedpews.data import from_clients, load
from fedpews.data.client_tables import read_table
from fedpews.data.files import natural, read_image, read_npz
from fedpews.data.images import read_idx
from fedpews.errors import ConfigError, FedpewsError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def _little_memory() -> Any:
    """Four gigabytes more than there is now, and not a byte beyond: who asks for terabytes gets a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def _npy(shape: tuple[int, ...], kind: str = "<f4", data: bytes = b"") -> bytes:
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


def _zip(path: Path, how: int = zipfile.ZIP_DEFLATED, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in entries.items():
            archive.writestr(f"{name}.npy", data)
    return path


LABELS = _npy((2,), "<i8", bytes(16))


def test_an_npz_bomb_is_refused(tmp_path: Path) -> None:
    side = 600 * 2**20
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w") as file:
            file.write(_npy((side, 1), "|u1"))
            for _ in range(600):
                file.write(bytes(2**20))
        archive.writestr("y.npy", LABELS)
    assert path.stat().st_size < 2**20
    with pytest.raises(ConfigError, match="200 times as many"):
        read_npz(path, "x", "y")


def test_honest_compression_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros((4000, 1000), np.float32), y=np.zeros(4000))
    assert read_npz(tmp_path / "zeros.npz", "x")["x"].shape == (4000, 1000)


@pytest.mark.parametrize(
    "shape", [(2**40, 2), (2**20, 2**20), (10**18,), (2**62, 2**62), (-1, 4), (3, 1), (2, 2, 2)]
)
def test_a_header_that_promises_more_than_there_is_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    for how in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = _zip(tmp_path / "a.npz", how, x=_npy(shape, data=bytes(16)), y=LABELS)
        with pytest.raises(ConfigError):
            read_npz(path, "x", "y")


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x09\x00" + bytes(20),
        b"\x93NUMPY\x01\x00\xff\xff",
        b"\x93NUMPY\x01\x00\x10\x00{'descr': '((((\n",
        _npy((2, 2), "|O", bytes(32)),
        _npy((2, 2), "<M8[s]", bytes(32)),
        _npy((2, 2), "<c8", bytes(32)),
        b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 117 + b"\n",
    ],
)
def test_a_damaged_array_is_refused(entry: bytes, tmp_path: Path) -> None:
    _zip(tmp_path / "a.npz", x=entry, y=LABELS)
    np.savez(tmp_path / "test.npz", x=np.zeros((2, 2)), y=np.zeros(2, int))
    with pytest.raises(ConfigError):
        load(f"folder:{tmp_path}")


def test_packing_that_numpy_does_not_use_is_refused(tmp_path: Path) -> None:
    for how in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = _zip(tmp_path / "a.npz", how, x=_npy((2, 2), data=bytes(16)), y=LABELS)
        with pytest.raises(ConfigError, match="has a compression"):
            read_npz(path, "x", "y")


@pytest.mark.parametrize("label", [2**40, 2**62, 10**6, 2**63 - 1])
def test_a_label_that_is_no_class_is_refused(label: int, tmp_path: Path) -> None:
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, label])
    with pytest.raises(ConfigError, match="too large"):
        from_clients([(x, y)], (x, y))
    for name in ("a", "test"):
        np.savez(tmp_path / f"{name}.npz", x=x.numpy(), y=y.numpy())
    with pytest.raises(ConfigError, match="too large"):
        load(f"folder:{tmp_path}")


@pytest.mark.parametrize("name", ["a.npz", "a.csv", "a/cat/1.png", "classes.txt", "a/train.npz"])
def test_a_pipe_is_never_waited_for(name: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", x=np.zeros((2, 2), np.float32), y=np.zeros(2, int))
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    if "/" not in name and name != "classes.txt":
        (tmp_path / "b.npz").symlink_to(path)
    with pytest.raises(FedpewsError):
        load(f"folder:{tmp_path}")


def test_links_that_lead_to_each_other_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", x=np.zeros((2, 2), np.float32), y=np.zeros(2, int))
    (tmp_path / "a.npz").symlink_to(tmp_path / "b.npz")
    (tmp_path / "b.npz").symlink_to(tmp_path / "a.npz")
    with pytest.raises(FedpewsError):
        load(f"folder:{tmp_path}")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "c").symlink_to(tmp_path / "c")
    with pytest.raises(FedpewsError):
        load(f"folder:{tmp_path}")


@pytest.mark.parametrize("name", ["site²", "²", "①", "٣", "x" * 200, "1" * 200])
def test_names_with_any_digits_have_an_order(name: str, tmp_path: Path) -> None:
    assert sorted([name, "site-10", "site-9"], key=natural).index("site-9") < 3
    for title in (name, "b", "test"):
        np.savez(tmp_path / f"{title}.npz", x=np.zeros((2, 2), np.float32), y=np.array([0, 1]))
    assert name in load(f"folder:{tmp_path}").client_names


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n(%pipe%touch ran) (w) file\n"


def test_an_eps_called_png_is_no_image(tmp_path: Path) -> None:
    for name in ("1.png", "1.jpg", "1.tif"):
        (tmp_path / name).write_bytes(EPS)
        with pytest.raises(ConfigError, match="cannot be read as an image"):
            read_image(tmp_path / name)


def _image(path: Path, *size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size).save(path)
    return path


def test_a_huge_image_among_small_ones_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[tuple[int, int]] = []
    real = Image.Image.convert
    monkeypatch.setattr(Image.Image, "convert", lambda self, *a: decoded.append(self.size) or real(self, *a))
    for client in ("a", "test"):
        _image(tmp_path / client / "cat" / "1.png", 4, 4)
    _image(tmp_path / "a" / "cat" / "2.png", 9000, 9000)
    for size in (None, 4):
        with pytest.raises(ConfigError, match="9000×9000"):
            load(f"folder:{tmp_path}", image_size=size)
    assert set(decoded) == {(4, 4)}


def test_a_png_that_promises_more_pixels_than_memory_is_refused(tmp_path: Path) -> None:
    header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (tmp_path / "1.png").write_bytes(data)
    with pytest.raises(ConfigError):
        read_image(tmp_path / "1.png", 8)


TABLES: dict[str, bytes] = {
    "nothing": b"",
    "only a header": b"a,label\n",
    "bytes that are no text": b"\xff\xfe\x00a,label\n1,2\n",
    "an open quote": b'a,label\n"1,2\n',
    "a number of 5,000 digits": b"a,label\n" + b"9" * 5000 + b",1\n",
    "a zero byte": b"a,label\n\x001,\x00\n",
    "more cells than columns": b"a,label\n1,2,3,4\n1,2\n",
    "only labels": b"label\n1\n",
}


@pytest.mark.parametrize("what", TABLES)
def test_a_damaged_table_is_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(TABLES[what])
    with pytest.raises(ConfigError, match=r"a\.csv"):
        read_table(tmp_path / "a.csv")


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"\x00\x00\x08\x03" + b"\xff" * 12),
        lambda path: path.write_bytes(b"\x1f\x8b" + bytes(20)),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
    ],
)
def test_a_published_file_that_is_something_else_is_refused(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    for name in ("train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"):
        make(tmp_path / name)
        with pytest.raises(ConfigError):
            read_idx(tmp_path / name)


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64])
def test_unsigned_labels_are_read(kind: type[np.unsignedinteger[Any]], tmp_path: Path) -> None:
    for name in ("a", "test"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((3, 2), np.float32), y=np.array([0, 1, 2], kind))
    assert load(f"folder:{tmp_path}").y.tolist() == [0, 1, 2]
