"""The synthetic data is what its recipe says."""

from __future__ import annotations

import pytest
import torch

from fedpews.data import load
from fedpews.data.synthetic import TILTED, clusters, sample
from fedpews.errors import ConfigError


def test_clusters_run_down_to_the_right_from_four_corners_and_their_classes_alternate() -> None:
    centres, shapes, labels = clusters()
    # top left: (−4, 4) + k·(1, −1)
    assert centres[:4].tolist() == [[-4, 4], [-3, 3], [-2, 2], [-1, 1]]
    assert centres[[0, 4, 8, 12]].tolist() == [[-4, 4], [4, 4], [-4, -4], [4, -4]]
    assert labels.tolist() == [0, 2, 0, 2] * 2 + [1, 3, 1, 3] * 2
    assert shapes[0].tolist() == [[0.05, 0], [0, 0.45]]
    assert shapes[4].tolist() == shapes[8].tolist() == [[0.25, 0.15], [0.15, 0.25]]
    assert shapes[12].tolist() == [[0.25, 0], [0, 0.05]]


@pytest.mark.parametrize("purpose", ["train", "test"])
def test_each_set_is_standardised_by_its_own_statistics(purpose: str) -> None:
    x, y = sample(40, seed=3, purpose=purpose)
    torch.testing.assert_close(x.mean(0), torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(5))
    assert y.bincount().tolist() == [40] * 4


def test_features_are_x_y_and_their_products_of_normal_points_around_the_centres() -> None:
    x, y = (values.double() for values in sample(4000, seed=3, purpose="train"))
    centres, shapes, labels = clusters()
    mine = centres[labels == 2]  # (−3, 3) is the first
    # undo the standardisation: z-scores are affine in x, and over all points x has the mean of the centres
    middle = centres.mean(0)
    noise = (shapes.transpose(1, 2) @ shapes).mean(0)  # zᵀ-covariance AᵀA, averaged over the clusters
    spread = (centres.var(0, correction=0) + noise.diagonal()).sqrt()
    points = x[:, :2] * spread + middle
    # a class's points take its four clusters in turn
    group = points[y == 2].view(1000, 4, 2).mean(0)
    torch.testing.assert_close(group, mine, atol=0.1, rtol=0)
    # the third feature is x² up to its own scale: their correlation is one
    squares = points.square()
    for column, values in ((2, squares[:, 0]), (3, squares[:, 1]), (4, points.prod(1))):
        assert float(torch.corrcoef(torch.stack([x[:, column], values]))[0, 1]) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("name", "per_class"), [("synthetic-32k", 8000), ("synthetic-3.2k", 800)])
def test_even_and_odd_classes_go_to_two_clients(name: str, per_class: int) -> None:
    data = load(name, partition="parity", clients=2)
    assert data.counts().tolist() == [[per_class, 0, per_class, 0], [0, per_class, 0, per_class]]
    assert data.test_y.bincount().tolist() == [1600] * 4
    assert data.x.shape == (4 * per_class, 5)


def test_the_data_are_a_function_of_the_seed() -> None:
    one, same, other = (load("synthetic-3.2k", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.x, same.x)
    assert torch.equal(one.test_x, same.test_x)
    assert not torch.equal(one.x, other.x)
    assert not torch.equal(one.x[:800], one.test_x[:800])


def test_no_global_random_state_is_read_or_changed() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = load("synthetic-3.2k", partition="dirichlet", clients=5, alpha=0.5)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    second = load("synthetic-3.2k", partition="dirichlet", clients=5, alpha=0.5)
    assert torch.equal(first.x, second.x)
    assert all(torch.equal(a, b) for a, b in zip(first.clients, second.clients, strict=True))


def test_with_one_shape_the_clusters_are_tilted_everywhere_and_nothing_else_differs() -> None:
    centres, shapes, labels = clusters(TILTED)
    usual, _, same = clusters()
    assert torch.equal(centres, usual)
    assert torch.equal(labels, same)
    assert shapes.tolist() == [[[0.25, 0.15], [0.15, 0.25]]] * 16
    data = load("fedpews.data.synthetic:one_shape", partition="parity", seed=1)
    assert data.counts().tolist() == [[8000, 0, 8000, 0], [0, 8000, 0, 8000]]
    assert len(data.test_y) == 6400
    assert torch.equal(data.test_x, sample(1600, 1, "test", TILTED)[0])


@pytest.mark.parametrize("classes", [8, 16])
def test_with_more_classes_each_corner_has_its_own_and_the_clusters_stay(classes: int) -> None:
    (centres, shapes, labels), usual = clusters(classes=classes), clusters()
    assert torch.equal(centres, usual[0])
    assert torch.equal(shapes, usual[1])
    # 16 clusters, in the order of the corners; neighbours along a corner are of different classes
    assert labels.bincount().tolist() == [16 // classes] * classes
    assert [len(set(corner)) for corner in labels.view(4, 4).tolist()] == [classes // 4] * 4
    assert bool((labels.view(4, 4).diff() != 0).all())
    data = load(f"synthetic-{classes}", train_per_class=4, test_per_class=2)
    assert data.counts().tolist() == (4 * torch.eye(classes, dtype=torch.int64)).tolist()
    assert data.test_y.bincount().tolist() == [2] * classes


def test_load_takes_the_keys_of_the_data_table_and_refuses_others() -> None:
    data = load("synthetic-3.2k", train_per_class=10, validation=0.2)
    # 20 samples for each of two clients, a fifth of them held out
    assert [len(rows) for rows in (*data.clients, *data.validation)] == [16, 16, 4, 4]
    with pytest.raises(ConfigError, match=r"unknown key data\.partitions; did you mean 'data\.partition'"):
        load("synthetic-3.2k", partitions="iid")
