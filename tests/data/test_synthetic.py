"""The synthetic data is what its recipe says."""

from __future__ import annotations

import math

import pytest
import torch

from fedpews.data import load
from fedpews.data.synthetic import centres, sample


def test_centres_lie_on_two_circles_and_each_class_has_two_on_each() -> None:
    points, labels = centres()
    torch.testing.assert_close(points.norm(dim=1), torch.tensor([4.0] * 8 + [2.0] * 8).double())
    assert labels[:8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert labels[8:].tolist() == [2, 3, 0, 1, 2, 3, 0, 1]
    # the inner circle is turned by half a step: 22.5°
    assert math.degrees(math.atan2(float(points[8, 1]), float(points[8, 0]))) == pytest.approx(22.5)


def test_features_are_x_y_and_their_products_around_the_centres() -> None:
    x, y = sample(400, seed=3, purpose="train")
    a, b = x[:, 0], x[:, 1]
    torch.testing.assert_close(x[:, 2:], torch.stack([a * a, b * b, a * b], 1))
    points, labels = centres()
    distance, nearest = torch.cdist(x[:, :2].double(), points).min(1)
    assert torch.equal(labels[nearest], y)  # clusters are 1.6 apart or more, 16 standard deviations
    assert nearest.bincount().tolist() == [100] * 16
    # mean squared distance in 2-D is 2·σ² = 0.02
    assert float(distance.square().mean()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(("name", "per_class"), [("synthetic-32k", 8000), ("synthetic-3.2k", 800)])
def test_even_and_odd_classes_go_to_two_clients(name: str, per_class: int) -> None:
    data = load(name, partition="parity", clients=2)
    assert data.counts().tolist() == [[per_class, 0, per_class, 0], [0, per_class, 0, per_class]]
    assert data.test_y.bincount().tolist() == [2000] * 4
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
