"""A Federation is checked once, where it is made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedpews.data import build, from_clients
from fedpews.errors import ConfigError

X, Y = torch.arange(24.0).view(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
HALVES = (torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5]))


class Pairs(Dataset[tuple[Tensor, int]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(row)), row % 3


def test_counts_are_the_samples_of_each_class_at_each_client() -> None:
    data = build(X, Y, (torch.tensor([0, 3, 1]), torch.tensor([2, 5, 4])), X, Y)
    assert len(data) == 2
    assert data.classes == 3
    # client 0 has labels 0, 0, 1; client 1 has 2, 2, 1
    assert data.counts().tolist() == [[2, 1, 0], [0, 1, 2]]


def test_tensors_arrays_and_datasets_make_the_same_federation() -> None:
    x, y = torch.stack([torch.full((4,), float(row)) for row in range(5)]), torch.arange(5) % 3
    kinds = [(x, y), (x.double().numpy(), y.numpy().astype(np.int32)), TensorDataset(x, y), Pairs(5)]
    for kind in kinds:
        data = from_clients([kind, (x, y)], test=kind)
        assert data.x.dtype == torch.float32
        assert data.y.dtype == torch.int64
        torch.testing.assert_close(data.x, torch.cat([x, x]))
        assert data.y.tolist() == [0, 1, 2, 0, 1] * 2
        assert [rows.tolist() for rows in data.clients] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_read_only_and_reversed_arrays_work_too() -> None:
    x = np.arange(12.0).reshape(3, 4)
    x.flags.writeable = False
    data = from_clients([(x[::-1], np.array([0, 1, 2]))], test=(x, [0, 1, 2]))
    assert data.x[:, 0].tolist() == [8.0, 4.0, 0.0]


def test_to_moves_every_tensor_and_keeps_the_rest() -> None:
    data = from_clients([(X, Y), (X, Y)], (X, Y), client_names=("a", "b"))
    moved = data.to("meta")
    for tensor in (moved.x, moved.y, moved.test_x, moved.test_y, *moved.clients):
        assert tensor.device.type == "meta"
    assert [len(rows) for rows in moved.clients] == [len(Y), len(Y)]
    assert moved.client_names == ("a", "b")
    same = data.to("cpu")
    assert all(torch.equal(a, b) for a, b in zip(same.clients, data.clients, strict=True))
    assert torch.equal(same.counts(), data.counts())


def test_clients_share_one_tensor_of_rows() -> None:
    data = build(torch.randn(10_000, 1), torch.zeros(10_000, dtype=torch.int64),
                 torch.arange(10_000).split(1), X[:1, :1], Y[:1])  # fmt: skip
    assert len({rows.untyped_storage().data_ptr() for rows in data.clients}) == 1


def with_value(value: float) -> Tensor:
    x = X.clone()
    x[4, 2] = value
    return x


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": with_value(float("nan"))}, "NaN or infinite values in 1 of 6 samples, first in sample 4"),
        ({"x": with_value(float("inf"))}, "NaN or infinite"),
        ({"x": with_value(float("-inf"))}, "NaN or infinite"),
        ({"test_x": with_value(float("nan"))}, "the test data: x has NaN"),
        ({"x": X.to(torch.complex64)}, "of numbers; got torch.complex64"),
        ({"y": Y + 1, "test_y": Y + 1, "classes": None}, "labels are 1 to 3 and none is 0"),
        ({"y": Y.float()}, "of integer labels .*got torch.float32"),
        ({"x": X[:5]}, "5 inputs but 6 labels"),
        ({"y": Y[:, None]}, r"y must be \(samples,\)"),
        ({"x": X[:, 0]}, r"x must be \(samples, ...\)"),
        ({"y": Y - 1}, "label -1 is below 0"),
        ({"classes": 2}, r"label 2 \(sample 2\) is outside the 2 classes"),
        ({"test_y": Y + 1, "classes": 3}, "the test data: label 3"),
        ({"classes": 0}, "classes must be a whole number above 0"),
        ({"test_x": X[:0], "test_y": Y[:0]}, "the test data: there are no samples"),
        ({"test_x": X[:, :3]}, "both must be the same"),
        ({"clients": (HALVES[0], HALVES[1][:0])}, "client 1 has no samples"),
        ({"clients": (HALVES[0], HALVES[0])}, "sample 0 is used 2 times"),
        ({"clients": (torch.tensor([0, 6]),)}, "there are 6 samples"),
        ({"clients": (torch.tensor([-1, 0]),)}, "there are 6 samples"),
        ({"clients": (torch.tensor([0.0]),)}, "one-dimensional int64"),
        ({"clients": ()}, "there are no clients"),
        ({"class_names": ("a",)}, "1 class names for 3 classes"),
        ({"client_names": ("a",)}, "1 client names for 2 clients"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(changed: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"x": X, "y": Y, "clients": HALVES, "test_x": X, "test_y": Y}
    with pytest.raises(ConfigError, match=message) as caught:
        build(**(good | changed))  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "must be a list"),
        (X, "must be a list"),
        ([X], "client 0 must be an"),
        ([(X, Y), (X[:, :2], Y)], "client 1 has inputs of shape"),
        ([(X, Y), (X[:0], Y[:0])], "client 1: there are no samples"),
        ([(X, Y), (with_value(float("nan")), Y)], "client 1: x has NaN"),
        ([(X, Y), Pairs(0)], "client 1 has no samples"),
        ([(X, Y), (np.array(["a"]), Y)], "client 1: x and y must be tensors"),
        ([(X, Y), 3], "client 1 must be an"),
    ],
)
def test_a_client_that_cannot_be_used_is_named(clients: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_clients(clients, test=(X, Y))  # type: ignore[arg-type]


def test_a_label_outside_the_classes_names_the_client() -> None:
    with pytest.raises(ConfigError, match="client 1: label 7"):
        from_clients([(X, Y), (X, Y + 5)], test=(X, Y), classes=3)
