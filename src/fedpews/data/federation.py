"""What an experiment trains on: every client's own samples and one common test set."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedpews.errors import ConfigError

Samples = tuple[Any, Any] | Dataset[Any]
"""What stands for one client: (x, y) as tensors or arrays, or a torch Dataset of (input, label) pairs."""


@dataclass(frozen=True)
class Federation:
    """Training data that never leaves its client, and one common test set.

    All inputs lie in one resident tensor; a client is the list of its rows. So 10,000 clients cost no more
    memory than one. Make one with `build` or `from_clients`, which check it.
    """

    x: Tensor  # (samples, ...) float32, the training inputs of all clients
    y: Tensor  # (samples,) int64
    clients: tuple[Tensor, ...]  # per client: int64 rows of x and y
    test_x: Tensor  # (tests, ...) float32
    test_y: Tensor  # (tests,) int64
    classes: int
    name: str = "custom"
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    test_owner: Tensor | None = (
        None  # (tests,) int64: whose a test sample is, −1 for nobody's; None if not known
    )

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.clients)

    def to(self, device: torch.device | str) -> Federation:
        """The same with all tensors on a device."""
        rows = torch.cat(self.clients).to(device)  # one copy, not one per client
        return replace(
            self,
            x=self.x.to(device),
            y=self.y.to(device),
            clients=tuple(rows.split_with_sizes([len(mine) for mine in self.clients])),
            test_x=self.test_x.to(device),
            test_y=self.test_y.to(device),
            test_owner=None if self.test_owner is None else self.test_owner.to(device),
        )

    @property
    def judged_on(self) -> str:
        """What a client's own accuracy is measured on."""
        if self.test_owner is None:
            return "the common test set, at each client's mix of classes"
        return "each client's own test samples"

    def counts(self) -> Tensor:
        """How many training samples of each class each client has: (clients, classes) int64."""
        sizes = torch.tensor([len(rows) for rows in self.clients])
        owner = torch.repeat_interleave(torch.arange(len(self)), sizes)
        cell = owner * self.classes + self.y[torch.cat(self.clients)].cpu()
        return torch.bincount(cell, minlength=len(self) * self.classes).view(len(self), self.classes)


def build(
    x: Tensor,
    y: Tensor,
    clients: Sequence[Tensor],
    test_x: Tensor,
    test_y: Tensor,
    classes: int | None = None,
    name: str = "custom",
    class_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    test_owner: Tensor | None = None,
) -> Federation:
    """A checked Federation; whatever cannot be trained on is a ConfigError that says what and where.

    ``classes`` is by default the largest label plus one. ``test_owner`` says whose each test sample is.
    """
    x, y = _samples(x, y, "the training data")
    test_x, test_y = _samples(test_x, test_y, "the test data")
    if x.shape[1:] != test_x.shape[1:]:
        raise ConfigError(
            f"training inputs have shape {tuple(x.shape[1:])} but test inputs {tuple(test_x.shape[1:])}; "
            "both must be the same."
        )
    if classes is None:
        classes = int(torch.cat([y, test_y]).max()) + 1
    _check_labels(y, classes, "the training data")
    _check_labels(test_y, classes, "the test data")
    if class_names and len(class_names) != classes:
        raise ConfigError(f"{len(class_names)} class names for {classes} classes; give one each, or none.")
    if client_names and len(client_names) != len(clients):
        raise ConfigError(
            f"{len(client_names)} client names for {len(clients)} clients; give one each, or none."
        )
    rows = _rows(clients, len(y))
    if test_owner is not None and (
        test_owner.shape != test_y.shape
        or not -1 <= int(test_owner.min()) <= int(test_owner.max()) < len(rows)
    ):
        raise ConfigError(f"test_owner must give each test sample a client from 0 to {len(rows) - 1}, or −1.")
    names = tuple(class_names), tuple(client_names)
    return Federation(x, y, rows, test_x, test_y, classes, name, *names, test_owner)


def from_clients(
    clients: Sequence[Samples],
    test: Samples | Sequence[Samples],
    classes: int | None = None,
    name: str = "custom",
    class_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
) -> Federation:
    """Your own data as a Federation: a list of clients and a test set.

    A client, like the test set, is an ``(x, y)`` pair of tensors or NumPy arrays, or a torch Dataset of
    (input, label) pairs. Inputs are floating point, labels are integers from 0. The test set may also be a list with
    one for each client; the global model is judged on all of them, a client's own accuracy is that on its own.

    >>> clients = [(torch.randn(8, 5), torch.zeros(8, dtype=torch.int64)), (np.ones((4, 5)), np.ones(4, int))]
    >>> data = from_clients(clients, test=(torch.randn(2, 5), torch.tensor([0, 1])))
    >>> len(data), data.classes, data.counts().tolist()
    (2, 2, [[8, 0], [0, 4]])
    """
    if isinstance(clients, Tensor | np.ndarray | Dataset) or not isinstance(clients, Sequence) or not clients:
        raise ConfigError(
            "clients must be a list with an (x, y) pair or a torch Dataset per client; "
            f"got {_describe(clients)}."
        )
    pairs = [_pair(samples, f"client {number}") for number, samples in enumerate(clients)]
    shape = pairs[0][0].shape[1:]
    for number, (x, _) in enumerate(pairs):
        if x.shape[1:] != shape:
            raise ConfigError(
                f"client {number} has inputs of shape {tuple(x.shape[1:])}, client 0 of {tuple(shape)}; "
                "all clients need the same."
            )
    sizes = [len(y) for _, y in pairs]
    x, y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    tests: list[Any] = [*test] if _is_list_of_sets(test) else [test]  # type: ignore[misc]
    if len(tests) not in (1, len(pairs)):
        raise ConfigError(f"{len(tests)} test sets for {len(pairs)} clients; give one, or one for each.")
    tested = [_pair(one, "the test data") for one in tests]
    test_x, test_y = torch.cat([x for x, _ in tested]), torch.cat([y for _, y in tested])
    owner = torch.repeat_interleave(torch.arange(len(tested)), torch.tensor([len(y) for _, y in tested]))
    if classes is not None:
        for number, (_, labels) in enumerate(pairs):
            _check_labels(labels, classes, f"client {number}")
    rows = torch.arange(len(y)).split_with_sizes(sizes)
    own = owner if _is_list_of_sets(test) else None
    return build(x, y, rows, test_x, test_y, classes, name, class_names, client_names, own)


def _is_list_of_sets(test: Any) -> bool:
    """Whether it is a test set for each client, rather than one pair of inputs and labels."""
    sets = isinstance(test, list | tuple) and len(test) > 0
    return sets and all(
        isinstance(one, Dataset) or (isinstance(one, tuple) and len(one) == 2) for one in test
    )


def _pair(samples: Any, whose: str) -> tuple[Tensor, Tensor]:
    """The (x, y) tensors of one client or of the test set, checked."""
    if isinstance(samples, TensorDataset) and len(samples.tensors) == 2:
        return _samples(*samples.tensors, whose)
    if isinstance(samples, tuple | list) and len(samples) == 2:
        return _samples(samples[0], samples[1], whose)
    is_dataset = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
    if not is_dataset or isinstance(samples, tuple | list | Tensor | np.ndarray):
        raise ConfigError(
            f"{whose} must be an (x, y) pair or a torch Dataset with a length; got {_describe(samples)}."
        )
    if len(samples) == 0:
        raise ConfigError(f"{whose} has no samples; leave it out or give it some.")
    items = [samples[row] for row in range(len(samples))]
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise ConfigError(f"{whose}: each item of its Dataset must be an (input, label) pair.")
    try:
        x = torch.stack([torch.as_tensor(item[0]) for item in items])
        y = torch.stack([torch.as_tensor(item[1]) for item in items])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{whose}: the items of its Dataset cannot be stacked into one tensor: {error}"
        ) from None
    return _samples(x, y, whose)


def _samples(x: Any, y: Any, whose: str) -> tuple[Tensor, Tensor]:
    """Inputs as float32 and labels as int64, or a ConfigError that names ``whose`` they are."""
    try:
        x, y = _tensor(x), _tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{whose}: x and y must be tensors or numeric arrays: {error}") from None
    if not x.is_floating_point():
        raise ConfigError(
            f"{whose}: x must be floating point, got {x.dtype}; scale it first, e.g. x / 127.5 - 1."
        )
    if y.is_floating_point() or y.is_complex():
        raise ConfigError(f"{whose}: y must hold integer labels, got {y.dtype}.")
    if y.ndim != 1 or x.ndim < 2:
        raise ConfigError(
            f"{whose}: x must be (samples, ...) and y (samples,); got {tuple(x.shape)} and {tuple(y.shape)}."
        )
    if len(x) != len(y):
        raise ConfigError(f"{whose}: {len(x)} inputs but {len(y)} labels; each input needs one label.")
    if len(x) == 0 or x[0].numel() == 0:
        raise ConfigError(f"{whose}: there are no samples (x has shape {tuple(x.shape)}).")
    x = x.detach().to("cpu", torch.float32).contiguous()
    low, high = torch.aminmax(x)  # NaN wins both, so this finds what isfinite finds, without its memory
    if not (torch.isfinite(low) and torch.isfinite(high)):
        bad = ~torch.isfinite(x.flatten(1)).all(1)
        raise ConfigError(
            f"{whose}: x has NaN or infinite values in {int(bad.sum())} of {len(x)} samples, "
            f"first in sample {int(bad.nonzero()[0])}; clean them first."
        )
    y = y.detach().to("cpu", torch.int64).contiguous()
    if int(y.min()) < 0:
        raise ConfigError(f"{whose}: label {int(y.min())} is below 0; labels count from 0.")
    return x, y


def digest(data: Federation) -> str:
    """A digest of all samples and of who holds which."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in (data.x, data.y, data.test_x, data.test_y, torch.cat(data.clients)):
        found.update(str(tuple(tensor.shape)).encode())
        found.update(tensor.cpu().contiguous().numpy().data)
    found.update(str([len(rows) for rows in data.clients]).encode())
    return found.hexdigest()


def _tensor(values: Any) -> Tensor:
    if isinstance(values, np.ndarray):  # read-only and reversed arrays must be copied first
        values = np.require(values, requirements=["C", "W"])
    return torch.as_tensor(values)


def _check_labels(y: Tensor, classes: int, whose: str) -> None:
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ConfigError(f"classes must be a whole number above 0; got {classes!r}.")
    if int(y.max()) >= classes:
        raise ConfigError(
            f"{whose}: label {int(y.max())} (sample {int(y.argmax())}) is outside the {classes} classes "
            f"0 to {classes - 1}."
        )


def _rows(clients: Sequence[Tensor], samples: int) -> tuple[Tensor, ...]:
    """The clients' rows as views of one tensor, checked: none empty, none outside, none twice."""
    if not clients:
        raise ConfigError("there are no clients; give at least one.")
    for number, rows in enumerate(clients):
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.ndim != 1:
            raise ConfigError(
                f"client {number}: its rows must be a one-dimensional int64 tensor; got {_describe(rows)}."
            )
        if len(rows) == 0:
            raise ConfigError(f"client {number} has no samples; leave it out or give it some.")
    every = torch.cat(list(clients))
    if int(every.min()) < 0 or int(every.max()) >= samples:
        raise ConfigError(
            f"the clients' rows reach from {int(every.min())} to {int(every.max())}, "
            f"but there are {samples} samples."
        )
    used = torch.bincount(every, minlength=samples)
    if int(used.max()) > 1:
        raise ConfigError(
            f"sample {int(used.argmax())} is given {int(used.max())} times; a sample belongs to one client."
        )
    return tuple(every.split_with_sizes([len(rows) for rows in clients]))


def _describe(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return (
        f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
    )
