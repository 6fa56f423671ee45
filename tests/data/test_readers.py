"""Each published layout is read exactly; each kind of damage is a clear error, never a wrong array."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fedpews.data.catalogue import SOURCES, find
from fedpews.data.images import Images, read
from fedpews.errors import ConfigError
from tiny_files import idx, medmnist_arrays, pack_cifar, write_cifar, write_medmnist, write_mnist


def read_from(root: Path, name: str) -> Images:
    paths, lacking = find(SOURCES[name], root)
    assert not lacking
    return read(SOURCES[name], paths)


def test_mnist_is_read_exactly(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    images = np.arange(20 * 784).reshape(20, 28, 28).astype(np.uint8)
    (tmp_path / "mnist/train-images-idx3-ubyte.gz").write_bytes(idx(images))
    (tmp_path / "mnist/train-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(20) % 10))
    data = read_from(tmp_path, "mnist")
    np.testing.assert_array_equal(data["train"][0], images[:, None])
    assert data["train"][1].tolist() == [*range(10)] * 2
    assert data["test"][0].shape == (30, 1, 28, 28)


def test_mnist_may_lie_unpacked_and_directly_in_the_directory(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    before = read_from(tmp_path, "mnist")
    for path in list((tmp_path / "mnist").iterdir()):
        (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    np.testing.assert_array_equal(read_from(tmp_path, "mnist")["train"][0], before["train"][0])


def test_cifar_planes_are_red_green_blue_in_rows(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    red_top_left, blue_bottom_right = np.zeros(3073, np.uint8), np.zeros(3073, np.uint8)
    red_top_left[[0, 1]] = 3, 255  # label 3; the first pixel byte is red, row 0, column 0
    blue_bottom_right[[0, 3072, 2 * 1024 + 32]] = 9, 200, 100  # the last byte; blue, row 0, column 31
    raw = np.concatenate([red_top_left, blue_bottom_right]).tobytes()
    (tmp_path / "cifar-10-batches-bin/test_batch.bin").write_bytes(raw)
    data = read_from(tmp_path, "cifar10")
    assert data["test"][1].tolist() == [3, 9]
    assert data["test"][0][0, 0, 0, 0] == 255
    assert data["test"][0][1, 2, 31, 31] == 200
    assert data["test"][0][1, 2, 0, 31] == 100
    assert data["test"][0].sum() == 255 + 200 + 100
    assert data["train"][0].shape == (50, 3, 32, 32)


def test_cifar_100_uses_the_fine_label(tmp_path: Path) -> None:
    write_cifar(tmp_path, classes=100)
    assert read_from(tmp_path, "cifar100")["train"][1].tolist() == [*range(100)]


@pytest.mark.parametrize("classes", [10, 100])
def test_a_packed_archive_reads_like_the_unpacked_folder(tmp_path: Path, classes: int) -> None:
    write_cifar(tmp_path / "open", classes)
    source = SOURCES[f"cifar{classes}"]
    (tmp_path / "packed").mkdir()
    pack_cifar(tmp_path / "open", tmp_path / "packed" / source.files[0].name, classes)
    one, other = (read_from(tmp_path / where, source.name) for where in ("open", "packed"))
    np.testing.assert_array_equal(one["train"][0], other["train"][0])
    np.testing.assert_array_equal(one["test"][1], other["test"][1])
    assert [path.name for path in (tmp_path / "packed").iterdir()] == [
        source.files[0].name
    ]  # nothing unpacked


def test_an_archive_that_climbs_out_of_its_folder_is_not_followed(tmp_path: Path) -> None:
    write_cifar(tmp_path / "open")
    (tmp_path / "packed").mkdir()
    archive = tmp_path / "packed/cifar-10-binary.tar.gz"
    pack_cifar(tmp_path / "open", archive, rename=lambda name: f"../{name}")
    with pytest.raises(ConfigError, match=r"lacks cifar-10-batches-bin/data_batch_1\.bin"):
        read_from(tmp_path / "packed", "cifar10")
    assert not (tmp_path / "cifar-10-batches-bin").exists()


@pytest.mark.parametrize(
    "name", [s.name for s in SOURCES.values() if s.kind == "medmnist" and not s.multi_label]
)
def test_every_medmnist_set_is_read_exactly(tmp_path: Path, name: str) -> None:
    write_medmnist(tmp_path, name)
    arrays, data = medmnist_arrays(name), read_from(tmp_path, name)
    expected = arrays["train_images"]
    planes = expected.transpose(0, 3, 1, 2) if expected.ndim == 4 else expected[:, None]
    np.testing.assert_array_equal(data["train"][0], planes)
    np.testing.assert_array_equal(data["train"][1], arrays["train_labels"][:, 0])
    assert data["test"][0].shape[1:] == SOURCES[name].shape


def cut(path: Path, keep: float = 0.5) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])


def recompress(path: Path, change: slice, to: bytes) -> None:
    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[change] = to
    path.write_bytes(gzip.compress(bytes(raw)))


IMAGES, LABELS = "mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: cut(root / IMAGES), "truncated or damaged"),
        (lambda root: (root / IMAGES).write_bytes(b"<html>"), "cannot be read"),
        (lambda root: (root / IMAGES).write_bytes(gzip.compress(b"")), "not an idx file"),
        (lambda root: recompress(root / IMAGES, slice(0, 4), b"\x00\x00\x0d\x03"), "starts with 00 00 0d 03"),
        (lambda root: recompress(root / IMAGES, slice(-1, None), b""), "its header promises"),
        (lambda root: recompress(root / IMAGES, slice(4, 8), b"\xff\xff\xff\xff"), "its header promises"),
        (lambda root: recompress(root / LABELS, slice(8, 9), b"\x0a"), "label 10 is outside 0 to 9"),
        (lambda root: (root / LABELS).write_bytes(idx(np.arange(9))), "30 images but 9 labels"),
        (
            lambda root: (root / LABELS).write_bytes((root / IMAGES).read_bytes()),
            r"labels .*got uint8 of shape \(28, 28\)",
        ),
        (
            lambda root: (root / IMAGES).write_bytes(idx(np.zeros((30, 14, 56)))),
            r"images .*got uint8 of shape \(1, 14, 56\)",
        ),
        (lambda root: (root / IMAGES).write_bytes(idx(np.zeros((0, 28, 28)))), "0 images"),
    ],
)
def test_a_damaged_mnist_file_is_refused(tmp_path: Path, damage: object, message: str) -> None:
    write_mnist(tmp_path)
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message) as caught:
        read_from(tmp_path, "mnist")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("classes", [10, 100])
def test_a_damaged_cifar_file_is_refused(tmp_path: Path, classes: int) -> None:
    write_cifar(tmp_path, classes)
    member = tmp_path / SOURCES[f"cifar{classes}"].members[0]
    good = member.read_bytes()
    row = 3073 if classes == 10 else 3074
    for raw, message in [
        (good[:-1], f"no whole number of {row}-byte rows"),
        (b"", "0 bytes"),
        (good[: row - 3073] + bytes([classes]) + good[row - 3072 :], f"label {classes} is outside"),
    ]:
        member.write_bytes(raw)
        with pytest.raises(ConfigError, match=message):
            read_from(tmp_path, f"cifar{classes}")


def test_a_damaged_cifar_archive_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path / "open")
    archive = tmp_path / "cifar-10-binary.tar.gz"
    pack_cifar(tmp_path / "open", archive)
    cut(archive)
    with pytest.raises(ConfigError, match="truncated or damaged"):
        read_from(tmp_path, "cifar10")
    archive.write_bytes(b"not an archive")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_from(tmp_path, "cifar10")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_labels": np.full((27, 1), 9)}, "label 9 is outside 0 to 8"),
        ({"test_labels": np.full((27, 1), -1)}, "test: label -1 is outside"),
        (
            {"train_labels": np.zeros((27, 14), np.uint8)},
            r"train: labels must be .*got uint8 of shape \(14,\)",
        ),
        ({"train_labels": np.zeros((27, 1))}, "train: labels must be whole numbers .*got float64"),
        ({"train_labels": np.zeros((5, 1), np.uint8)}, "27 images but 5 labels"),
        (
            {"train_images": np.zeros((27, 28, 28), np.uint8)},
            r"train: images must be bytes of shape \(3, 28, 28\)",
        ),
        ({"train_images": np.zeros((27, 64, 64, 3), np.uint8)}, r"got uint8 of shape \(3, 64, 64\)"),
        ({"train_images": np.zeros((27, 28, 28, 3))}, "got float64"),
        ({"train_images": np.array([{}], dtype=object)}, "plain arrays"),
    ],
)
def test_a_medmnist_file_with_wrong_arrays_is_refused(
    tmp_path: Path, changed: dict[str, np.ndarray], message: str
) -> None:
    write_medmnist(tmp_path, "pathmnist", **changed)
    with pytest.raises(ConfigError, match=message):
        read_from(tmp_path, "pathmnist")


def test_a_damaged_npz_file_is_refused(tmp_path: Path) -> None:
    path = write_medmnist(tmp_path, "breastmnist")
    cut(path)
    with pytest.raises(ConfigError, match="not a readable npz"):
        read_from(tmp_path, "breastmnist")
    path = write_medmnist(tmp_path, "breastmnist")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 10] ^= 0xFF  # one byte in the training images: the archive's own checksum finds it
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="not a readable npz"):
        read_from(tmp_path, "breastmnist")
    np.savez(path, images=np.zeros(3))
    with pytest.raises(ConfigError, match=r"lacks train_images, train_labels.*it has images"):
        read_from(tmp_path, "breastmnist")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ConfigError, match="not a readable npz"):
        read_from(tmp_path, "breastmnist")
