"""Combinations: labels follow on, channels and sizes match, as many of each class as asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedpews.data import load
from fedpews.data.catalogue import SOURCES
from fedpews.data.images import Images, combine
from fedpews.data.table import DataTable
from fedpews.errors import ConfigError
from tiny_files import medmnist_arrays, write_cifar, write_medmnist, write_mnist


def test_cifar_and_mnist_become_one_set_of_twenty_classes(tmp_path: Path) -> None:
    write_cifar(tmp_path, per_class=3)
    write_mnist(tmp_path, per_class=3)
    data = load("cifar-mnist", data_dir=tmp_path, train_per_class=2, test_per_class=2)
    assert data.x.shape == (40, 3, 32, 32)
    assert data.test_x.shape == (40, 3, 32, 32)
    assert data.classes == 20
    assert data.counts().tolist() == [[2] * 10 + [0] * 10, [0] * 10 + [2] * 10]
    assert data.client_names == ("cifar10", "mnist")
    assert data.class_names[3] == "cifar10: cat"
    assert data.class_names[17] == "mnist: 7"
    digits = data.x[data.y >= 10]
    assert torch.equal(digits[:, 0], digits[:, 1])
    assert torch.equal(digits[:, 0], digits[:, 2])


def test_cifar_mnist_needs_400_training_images_a_class_by_default(tmp_path: Path) -> None:
    write_cifar(tmp_path, per_class=3)
    write_mnist(tmp_path, per_class=3)
    with pytest.raises(
        ConfigError, match=r"cifar10: 400 train images per class .* class 0 has 15; ask for 1 to 15"
    ):
        load("cifar-mnist", data_dir=tmp_path)
    with pytest.raises(
        ConfigError, match=r"data\.train_per_class: input should be greater than or equal to 1, got 0"
    ):
        load("cifar-mnist", data_dir=tmp_path, train_per_class=0)


def test_labels_of_a_named_combination_follow_on_from_each_other(tmp_path: Path) -> None:
    names = ("pathmnist", "octmnist", "bloodmnist")
    for name in names:
        write_medmnist(tmp_path, name, per_class=2)
    data = load("+".join(names), data_dir=tmp_path)
    assert data.classes == 21
    assert data.x.shape == ((9 + 4 + 8) * 2, 3, 28, 28)
    assert [sorted(set(data.y[rows].tolist())) for rows in data.clients] == [
        [*range(9)], [*range(9, 13)], [*range(13, 21)],
    ]  # fmt: skip
    pixels = medmnist_arrays("pathmnist", 2)["train_images"][5].transpose(2, 0, 1)
    np.testing.assert_allclose(data.x[5].numpy(), pixels / 127.5 - 1, atol=1e-6)
    assert float(data.x.min()) == -1
    assert float(data.x.max()) == 1


def test_grey_sets_together_stay_grey(tmp_path: Path) -> None:
    for name in ("octmnist", "breastmnist"):
        write_medmnist(tmp_path, name)
    assert load("octmnist+breastmnist", data_dir=tmp_path).x.shape[1:] == (1, 28, 28)


def test_enlarging_keeps_a_flat_image_flat_and_an_image_upright(tmp_path: Path) -> None:
    bright_top = np.zeros((1, 1, 28, 28), np.uint8)
    bright_top[0, 0, :7] = 255
    flat = np.full((1, 1, 28, 28), 51, np.uint8)
    digits: Images = {
        "train": (np.concatenate([bright_top, flat]), np.array([0, 1])),
        "test": (flat, np.array([0])),
    }
    black = np.zeros((1, 3, 32, 32), np.uint8), np.array([0])
    photo: Images = {"train": black, "test": black}
    data = combine(DataTable(name="both"), [SOURCES["mnist"], SOURCES["cifar10"]], [digits, photo])
    torch.testing.assert_close(data.x[1], torch.full((3, 32, 32), 51 / 127.5 - 1))
    assert torch.equal(
        data.x[0, :, :7], torch.ones(3, 7, 32)
    )  # 7 of 28 rows are 8 of 32, blurred at the edge
    assert torch.equal(data.x[0, :, 9:], -torch.ones(3, 23, 32))
    assert data.y.tolist() == [0, 1, 10]
    assert [rows.tolist() for rows in data.clients] == [[0, 1], [2]]


def test_image_size_averages_the_pixels_of_named_images(tmp_path: Path) -> None:
    pixels = np.zeros((1, 1, 28, 28), np.uint8)
    pixels[0, 0, :14] = 255
    halves: Images = {"train": (pixels, np.array([0])), "test": (pixels, np.array([0]))}
    data = combine(DataTable(name="mnist", image_size=7), [SOURCES["mnist"]], [halves])
    # row r of 7 is a mean over the 4 rows on each side of 4r + 2; only r = 3 has rows of both halves, four of each
    assert data.x.shape == data.test_x.shape == (1, 1, 7, 7)
    torch.testing.assert_close(data.x[0, 0, :, 0], torch.tensor([1.0, 1, 1, 0, -1, -1, -1]))


def test_unit_scaling_is_the_symmetric_one_moved_to_zero_and_one(tmp_path: Path) -> None:
    write_medmnist(tmp_path, "bloodmnist", per_class=2)
    plain, unit = (
        load("bloodmnist", partition="class", data_dir=tmp_path, scaling=kind) for kind in (None, "unit")
    )
    torch.testing.assert_close(unit.x, (plain.x + 1) / 2)
    torch.testing.assert_close(unit.test_x, (plain.test_x + 1) / 2)
    assert torch.equal(
        load("bloodmnist", partition="class", data_dir=tmp_path, scaling="symmetric").x, plain.x
    )


def test_standard_scaling_moves_each_source_by_its_own_training_images(tmp_path: Path) -> None:
    names = ("pathmnist", "octmnist")
    for name in names:
        write_medmnist(tmp_path, name, per_class=3)
    both = load("+".join(names), data_dir=tmp_path, scaling="standard", train_per_class=2)
    for name, rows in zip(names, both.clients, strict=True):
        spread, centre = torch.std_mean(both.x[rows], dim=(0, 2, 3))
        torch.testing.assert_close(centre, torch.zeros(3), atol=1e-4, rtol=0)
        torch.testing.assert_close(spread, torch.ones(3), atol=1e-4, rtol=0)
        raw = load(name, partition="class", data_dir=tmp_path, train_per_class=2)
        spread, centre = torch.std_mean(raw.x, dim=(0, 2, 3), keepdim=True)
        of_source = both.test_x[both.test_y < 9] if name == "pathmnist" else both.test_x[both.test_y >= 9]
        torch.testing.assert_close(of_source, ((raw.test_x - centre) / spread).expand_as(of_source))


def test_a_source_can_have_its_own_scaling_or_the_first_ones_statistics(tmp_path: Path) -> None:
    names = ("pathmnist", "octmnist")
    for name in names:
        write_medmnist(tmp_path, name, per_class=3)
    raw, first, mixed = (
        load("+".join(names), data_dir=tmp_path, scaling=kind)
        for kind in ("symmetric", "first", ["standard", "unit"])
    )
    path, oct = raw.clients
    spread, centre = torch.std_mean(raw.x[path], dim=(0, 2, 3), keepdim=True)
    torch.testing.assert_close(first.x, (raw.x - centre) / spread)
    torch.testing.assert_close(first.test_x, (raw.test_x - centre) / spread)
    torch.testing.assert_close(mixed.x[path], (raw.x[path] - centre) / spread)
    torch.testing.assert_close(mixed.x[oct], (raw.x[oct] + 1) / 2)
    with pytest.raises(ConfigError, match="lists 1 scalings for the 2 sources"):
        load("+".join(names), data_dir=tmp_path, scaling=["unit"])


def test_a_flat_channel_stays_finite_when_standardised() -> None:
    flat = np.full((2, 1, 28, 28), 51, np.uint8)
    images: Images = {split: (flat, np.array([0, 1])) for split in ("train", "test")}
    data = combine(DataTable(name="mnist", scaling="standard"), [SOURCES["mnist"]], [images])
    torch.testing.assert_close(data.x, torch.zeros(2, 1, 28, 28), atol=1e-3, rtol=0)


def test_scaling_is_refused_where_there_are_no_named_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is for images"):
        load("synthetic-3.2k", scaling="unit")
    for name in ("a", "test"):
        np.savez(tmp_path / f"{name}.npz", x=np.ones((2, 3)), y=np.arange(2))
    with pytest.raises(ConfigError, match=r"npz files of your own have no data\.scaling"):
        load(f"folder:{tmp_path}", scaling="unit")
    with pytest.raises(ConfigError, match="a function scales its data itself"):
        load("somewhere:make", scaling="unit")
    write_medmnist(tmp_path, "octmnist")
    with pytest.raises(
        ConfigError, match=r"should be 'symmetric', 'unit', 'standard' or 'first', .* got 'odd'"
    ):
        load("octmnist", data_dir=tmp_path, scaling="odd")


def test_what_is_drawn_depends_on_the_seed_alone(tmp_path: Path) -> None:
    write_mnist(tmp_path, per_class=20)
    one, same, other = (
        load("mnist", partition="class", data_dir=tmp_path, train_per_class=5, seed=seed)
        for seed in (0, 0, 1)
    )
    assert one.y.bincount().tolist() == [5] * 10
    assert torch.equal(one.x, same.x)
    assert not torch.equal(one.x, other.x)
    assert len(one.x.flatten(1).unique(dim=0)) == 50  # drawn without replacement
    assert len(one.test_y) == 200


def test_classes_of_no_client_are_neither_kept_nor_tested(tmp_path: Path) -> None:
    write_mnist(tmp_path, per_class=3)
    data = load("mnist", partition="noc", clients=2, classes_per_client=2, data_dir=tmp_path)
    classes = data.y.unique()
    assert len(classes) == 4
    assert len(data.y) == 12
    assert torch.equal(data.test_y.unique(), classes)
    assert data.classes == 10
    assert (data.counts() > 0).sum(1).tolist() == [2, 2]


def test_given_is_for_own_data_only(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'given' is for your own data; for 'synthetic-3\.2k' use e\.g\. 'parity'"
    ):
        load("synthetic-3.2k", partition="given")
