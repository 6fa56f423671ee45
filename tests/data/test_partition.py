"""Every partition: each sample to exactly one client, no client empty, the same seed the same split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpews.data.partition import PARTITIONS, partition
from fedpews.errors import ConfigError


@st.composite
def tasks(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    classes = draw(st.integers(1, 12))
    labels = np.array(draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=120)))
    return labels, classes, draw(st.integers(1, len(labels)))


def assert_dealt(shares: list[np.ndarray], rows: np.ndarray, clients: int) -> None:
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
    shares = partition(name, labels, classes, clients=clients, alpha=alpha, seed=seed)
    assert_dealt(shares, np.arange(len(labels)), clients)
    again = partition(name, labels, classes, clients=clients, alpha=alpha, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), classes=st.integers(1, 12), seed=st.integers(0, 99))
def test_noc_deals_each_chosen_class_whole_to_one_client(
    data: st.DataObject, classes: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), 4))
    clients = data.draw(st.integers(1, classes))
    each = data.draw(st.one_of(st.none(), st.integers(1, classes // clients)))
    shares = partition("noc", labels, classes, clients=clients, classes_per_client=each, seed=seed)
    held = [set(labels[share].tolist()) for share in shares]
    assert all(len(mine) == (each or classes // clients) for mine in held)
    chosen = set().union(*held)
    assert len(chosen) == sum(map(len, held))  # no class twice
    assert_dealt(shares, np.flatnonzero(np.isin(labels, list(chosen))), clients)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), classes=st.integers(2, 12), seed=st.integers(0, 99))
def test_class_parity_source_and_given_deal_whole_groups(
    data: st.DataObject, classes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes), 3))
    sources = rng.permutation(np.arange(len(labels)) % 3)
    clients = data.draw(st.integers(1, classes))
    by_class = partition("class", labels, classes, clients=clients)
    assert_dealt(by_class, np.arange(len(labels)), clients)
    assert sum(len(np.unique(labels[share])) for share in by_class) == classes
    parity = partition("parity", labels, classes)
    assert_dealt(parity, np.arange(len(labels)), 2)
    assert [set(labels[share] % 2) for share in parity] == [{0}, {1}]
    for name in ("source", "given"):
        by_source = partition(name, labels, classes, sources=sources)
        assert_dealt(by_source, np.arange(len(labels)), 3)
        assert [set(sources[share]) for share in by_source] == [{0}, {1}, {2}]


@settings(max_examples=60, deadline=None)
@given(
    lists=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_class_lists_are_obeyed_and_shared_classes_are_shared_out(lists: list[list[int]], seed: int) -> None:
    labels = np.repeat(np.arange(6), 8)
    shares = partition("classes", labels, 6, class_lists=lists, seed=seed)
    assert [set(labels[share].tolist()) for share in shares] == [set(wanted) for wanted in lists]
    listed = [label for wanted in lists for label in wanted]
    assert_dealt(shares, np.flatnonzero(np.isin(labels, listed)), len(lists))
    for label in set(listed):
        parts = [int((labels[share] == label).sum()) for share in shares if label in labels[share]]
        assert max(parts) - min(parts) <= 1


def test_a_class_each_for_four_clients() -> None:
    shares = partition("class", np.array([0, 1, 2, 3, 0, 1, 2, 3]), 4, clients=4)
    assert [share.tolist() for share in shares] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("name", ["dirichlet", "iid", "noc", "quantity"])
def test_another_seed_makes_another_split(name: str) -> None:
    labels = np.repeat(np.arange(10), 50)
    splits = [partition(name, labels, 10, clients=5, alpha=0.5, seed=seed) for seed in (0, 1)]
    assert any(not np.array_equal(a, b) for a, b in zip(*splits, strict=True))


def test_small_alpha_is_uneven_and_large_alpha_is_even() -> None:
    labels = np.repeat(np.arange(10), 500)

    def spread(name: str, alpha: float) -> float:
        shares = partition(name, labels, 10, clients=10, alpha=alpha)
        return float(np.std([np.bincount(labels[share], minlength=10) for share in shares]))

    for name in ("dirichlet", "quantity"):
        assert spread(name, 1e5) < 10 < 40 < spread(name, 0.1)


def test_ten_thousand_clients_are_dealt_quickly_and_none_is_empty() -> None:
    labels = np.arange(12_000) % 20
    shares = partition("dirichlet", labels, 20, clients=10_000, alpha=0.1)
    assert_dealt(shares, np.arange(12_000), 10_000)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dirichlet", {"clients": 41, "alpha": 1.0}, "41 clients cannot share 40 training samples"),
        ("iid", {"clients": 0}, "use between 1 and 40"),
        ("iid", {}, "needs the number of clients"),
        ("dirichlet", {"clients": 2}, "needs alpha"),
        ("dirichlet", {"clients": 2, "alpha": 0.0}, "above 0; got 0.0"),
        ("quantity", {"clients": 2, "alpha": float("inf")}, "finite number"),
        ("quantity", {"clients": 2, "alpha": float("nan")}, "finite number"),
        ("noc", {"clients": 5}, "there are 4"),
        ("noc", {"clients": 2, "classes_per_client": 3}, "need 6 classes, there are 4"),
        ("noc", {"clients": 2, "classes_per_client": 0}, "there are 4"),
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
def test_what_cannot_be_dealt_is_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(name, np.arange(40) % 4, 4, **options)  # type: ignore[arg-type]


def test_a_class_without_samples_leaves_no_silent_empty_client() -> None:
    with pytest.raises(ConfigError, match="leaves client 1 without samples"):
        partition("parity", np.zeros(8, np.int64), 4)


def test_every_partition_says_in_one_line_what_it_does() -> None:
    for function in PARTITIONS.values():
        assert (function.__doc__ or "").splitlines()[0].endswith(".")
