"""Every partition: each sample to exactly one client, no client empty, the same seed the same split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpews.data.loading import data_table
from fedpews.data.partition import PARTITIONS, partition
from fedpews.errors import ConfigError


def split(
    name: str, labels: np.ndarray, classes: int, sources: np.ndarray | None = None, **options: object
) -> list[np.ndarray]:
    return partition(name, labels, classes, data_table(**options), sources)


@st.composite
def tasks(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    classes = draw(st.integers(1, 12))
    labels = np.array(draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=120)))
    return labels, classes, draw(st.integers(1, len(labels)))


def assert_assigned(shares: list[np.ndarray], rows: np.ndarray, clients: int) -> None:
    assert len(shares) == clients
    assert all(len(share) > 0 for share in shares)
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), rows)


@pytest.mark.parametrize("name", ["dirichlet", "iid", "quantity"])
@settings(max_examples=60, deadline=None)
@given(task=tasks(), alpha=st.floats(1e-12, 1e6), seed=st.integers(0, 2**40))
def test_every_sample_goes_to_exactly_one_client_and_no_client_is_empty(
    name: str, task: tuple[np.ndarray, int, int], alpha: float, seed: int
) -> None:
    labels, classes, clients = task
    shares = split(name, labels, classes, clients=clients, alpha=alpha, seed=seed)
    assert_assigned(shares, np.arange(len(labels)), clients)
    again = split(name, labels, classes, clients=clients, alpha=alpha, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), classes=st.integers(1, 12), seed=st.integers(0, 99))
def test_noc_assigns_each_chosen_class_whole_to_one_client(
    data: st.DataObject, classes: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), 4))
    clients = data.draw(st.integers(1, classes))
    each = data.draw(st.one_of(st.none(), st.integers(1, classes // clients)))
    shares = split("noc", labels, classes, clients=clients, classes_per_client=each, seed=seed)
    owned = [set(labels[share].tolist()) for share in shares]
    assert all(len(mine) == (each or classes // clients) for mine in owned)
    chosen = set().union(*owned)
    assert len(chosen) == sum(map(len, owned))  # no class twice
    assert_assigned(shares, np.flatnonzero(np.isin(labels, list(chosen))), clients)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), classes=st.integers(2, 12), seed=st.integers(0, 99))
def test_class_parity_source_and_given_assign_whole_groups(
    data: st.DataObject, classes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes), 3))
    sources = rng.permutation(np.arange(len(labels)) % 3)
    clients = data.draw(st.integers(1, classes))
    by_class = split("class", labels, classes, clients=clients)
    assert_assigned(by_class, np.arange(len(labels)), clients)
    assert sum(len(np.unique(labels[share])) for share in by_class) == classes
    parity = split("parity", labels, classes)
    assert_assigned(parity, np.arange(len(labels)), 2)
    assert [set(labels[share] % 2) for share in parity] == [{0}, {1}]
    for name in ("source", "given"):
        by_source = split(name, labels, classes, sources=sources)
        assert_assigned(by_source, np.arange(len(labels)), 3)
        assert [set(sources[share]) for share in by_source] == [{0}, {1}, {2}]


@settings(max_examples=60, deadline=None)
@given(
    lists=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_class_lists_are_obeyed_and_shared_classes_are_divided(lists: list[list[int]], seed: int) -> None:
    labels = np.repeat(np.arange(6), 8)
    shares = split("classes", labels, 6, class_lists=lists, seed=seed)
    assert [set(labels[share].tolist()) for share in shares] == [set(wanted) for wanted in lists]
    listed = [label for wanted in lists for label in wanted]
    assert_assigned(shares, np.flatnonzero(np.isin(labels, listed)), len(lists))
    for label in set(listed):
        sizes = [int((labels[share] == label).sum()) for share in shares if label in labels[share]]
        assert max(sizes) - min(sizes) <= 1


def test_a_class_each_for_four_clients() -> None:
    shares = split("class", np.array([0, 1, 2, 3, 0, 1, 2, 3]), 4, clients=4)
    assert [share.tolist() for share in shares] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("name", ["dirichlet", "iid", "noc", "quantity"])
def test_another_seed_makes_another_split(name: str) -> None:
    labels = np.repeat(np.arange(10), 50)
    two = [split(name, labels, 10, clients=5, alpha=0.5, seed=seed) for seed in (0, 1)]
    assert any(not np.array_equal(a, b) for a, b in zip(*two, strict=True))


def test_small_alpha_is_uneven_and_large_alpha_is_even() -> None:
    labels = np.repeat(np.arange(10), 500)

    def spread(name: str, alpha: float) -> float:
        shares = split(name, labels, 10, clients=10, alpha=alpha)
        return float(np.std([np.bincount(labels[share], minlength=10) for share in shares]))

    for name in ("dirichlet", "quantity"):
        assert spread(name, 1e5) < 10 < 40 < spread(name, 0.1)


def test_of_ten_thousand_clients_none_is_empty() -> None:
    labels = np.arange(12_000) % 20
    shares = split("dirichlet", labels, 20, clients=10_000, alpha=0.1)
    assert_assigned(shares, np.arange(12_000), 10_000)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dirichlet", {"clients": 41, "alpha": 1.0}, "41 clients cannot share 40 training samples"),
        ("iid", {"clients": 0}, "data.clients: input should be greater than or equal to 1, got 0"),
        ("iid", {}, r"needs data\.clients"),
        ("dirichlet", {"clients": 2}, r"needs data\.alpha"),
        ("dirichlet", {"clients": 2, "alpha": 0.0}, "data.alpha: input should be greater than 0, got 0.0"),
        ("quantity", {"clients": 2, "alpha": float("inf")}, "data.alpha: input should be a finite number"),
        ("quantity", {"clients": 2, "alpha": float("nan")}, "data.alpha: input should be a finite number"),
        ("noc", {"clients": 5}, "there are 4"),
        ("noc", {"clients": 2, "classes_per_client": 3}, "need 6 classes, there are 4"),
        ("noc", {"clients": 2, "classes_per_client": 0}, "data.classes_per_client: .* or equal to 1"),
        ("class", {"clients": 5}, "at most 4 clients"),
        ("parity", {"clients": 3}, "makes 2 clients here"),
        ("source", {"clients": 2}, "makes 1 clients here"),
        ("classes", {}, "needs class_lists"),
        ("classes", {"class_lists": [[0], [4]]}, r"client 1 has \[4\]"),
        ("classes", {"class_lists": [[0], []]}, r"client 1 has \[\]"),
        ("classes", {"class_lists": [[0], [1]], "clients": 3}, "makes 2 clients"),
        ("dirchlet", {"clients": 2}, "unknown partition 'dirchlet'; known are class, classes"),
    ],
)
def test_what_cannot_be_assigned_is_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(name, np.arange(40) % 4, 4, **options)


def test_a_class_without_samples_leaves_no_silent_empty_client() -> None:
    with pytest.raises(ConfigError, match="leaves client 1 without samples"):
        split("parity", np.zeros(8, np.int64), 4)


def test_every_partition_says_in_one_line_what_it_does() -> None:
    for function in PARTITIONS.values():
        assert (function.__doc__ or "").splitlines()[0].endswith(".")
