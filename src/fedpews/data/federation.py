"""The data of an experiment: every client's samples, and the test set."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedpews.data.inputs import (
    SPLITS,
    Inputs,
    Lazy,
    Samples,
    check_samples,
    concatenate,
    describe,
    read_samples,
    select,
    shape,
    take,
)
from fedpews.errors import ConfigError
from fedpews.seeds import fold
from fedpews.tasks.builtin import Classification
from fedpews.tasks.names import LIST, check_listed
from fedpews.tasks.task import Task
from fedpews.torch_private import tree_leaves, tree_map

MOST_CLASSES = 1_000_000
"""Also the largest vocabulary; a label above it is an identifier, or damaged."""


@dataclass(frozen=True)
class Federation:
    """The training samples of all clients, and the test set.

    All inputs are in one tensor (or a tuple or dict of tensors), and a client is a list of rows, so 10,000 clients need
    no more memory than one. `build` and `from_clients` make a Federation and check it.
    """

    x: Inputs  # (samples, ...), the training inputs of all clients
    y: Tensor  # (samples, ...) as the task has its labels
    clients: tuple[Tensor, ...]  # per client: int64 rows of x and y
    test_x: Inputs
    test_y: Tensor
    classes: int  # or the number of outputs of another task
    name: str = "custom"
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    test_owner: Tensor | None = None
    """(tests,) int64: the client of each test sample, −1 for none; None if the test set is common to all."""
    task: Task = field(default_factory=Classification)
    validation: tuple[Tensor, ...] = ()
    """Per client: rows of x held out for validation; () when there are none."""
    columns: tuple[str, ...] = ()
    """Of tables: the name and type of each column of x, then the label's."""
    missing: tuple[tuple[int, ...], ...] = ()
    """Of tables: per client, how many values of each column were missing in its training rows."""

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.clients)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        device: torch.device = tree_leaves(self.x)[0].device
        return device

    @property
    def shape(self) -> Any:
        """The shape of one input; of a tuple or dict, that of each entry."""
        return shape(self.x)

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names; their numbers where none were given."""
        return self.client_names or tuple(str(number) for number in range(len(self)))

    def to(self, device: torch.device | str) -> Federation:
        """The federation with all tensors on a device."""
        return _with_rows(
            self,
            torch.cat([*self.clients, *self.validation]).to(device),
            x=tree_map(lambda leaf: leaf.to(device), self.x),
            y=self.y.to(device),
            test_x=tree_map(lambda leaf: leaf.to(device), self.test_x),
            test_y=self.test_y.to(device),
            test_owner=None if self.test_owner is None else self.test_owner.to(device),
        )

    @property
    def test_clients(self) -> tuple[Tensor, ...]:
        """Per client: its rows of the test set; () when that is common to all."""
        if self.test_owner is None:
            return ()
        return tuple((self.test_owner == client).nonzero().flatten() for client in range(len(self)))

    @property
    def outputs(self) -> str:
        """The number of classes, labels or targets that a model predicts, in words."""
        names = {"regression": "target", "multilabel": "label"}
        other = "class" if self.task.largest(self.y) is not None else "output"
        word = names.get(self.task.name, other)
        return f"{self.classes} {word}{'' if self.classes == 1 else 'es' if word == 'class' else 's'}"

    def counts(self) -> Tensor:
        """The number of training samples of each class at each client: (clients, classes) int64.

        Where a sample does not have one class, all samples are in one column.
        """
        labels, classes = self.task.classes_of(self.y), self.classes
        if labels is None:
            labels, classes = torch.zeros(len(self.y), dtype=torch.int64), 1
        sizes = torch.tensor([len(rows) for rows in self.clients])
        owner = torch.repeat_interleave(torch.arange(len(self)), sizes)
        cell = owner * classes + labels[torch.cat(self.clients)].cpu()
        return torch.bincount(cell, minlength=len(self) * classes).view(len(self), classes)


def build(
    x: Inputs,
    y: Tensor,
    clients: Sequence[Tensor],
    test_x: Inputs,
    test_y: Tensor,
    classes: int | None = None,
    name: str = "custom",
    class_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    test_owner: Tensor | None = None,
    *,
    task: Task | None = None,
    validation: Sequence[Tensor] = (),
) -> Federation:
    """A checked Federation; a ConfigError says which samples cannot be used, and why.

    ``classes`` is by default the largest label plus one, or the task's. ``test_owner`` is the client of each test
    sample.
    """
    task = task or Classification()
    x, y = check_samples(x, y, "the training data", task)
    test_x, test_y = check_samples(test_x, test_y, "the test data", task)
    for what, ours, other in (("inputs", shape(x), shape(test_x)), ("labels", y.shape[1:], test_y.shape[1:])):
        if ours != other:
            raise ConfigError(f"training {what} are {ours}, test {what} {other}; both must be the same.")
    if classes is None:
        labels = torch.cat([y, test_y])
        classes = task.width(labels)
        _refuse_from_one(task, labels)
    check_labels(y, classes, "the training data", task)
    check_labels(test_y, classes, "the test data", task)
    if class_names and len(class_names) != classes:
        raise ConfigError(f"{len(class_names)} class names for {classes} classes; give one each.")
    if client_names and len(client_names) != len(clients):
        raise ConfigError(f"{len(client_names)} client names for {len(clients)} clients; give one each.")
    if test_owner is not None and test_owner.shape != test_y.shape[:1]:
        raise ConfigError(f"test_owner must have a client for each of {len(test_y)} test samples.")
    names = tuple(class_names), tuple(client_names)
    data = Federation(x, y, (), test_x, test_y, classes, name, *names, test_owner, task)
    return with_clients(data, clients, validation)


def from_clients(
    clients: Sequence[Samples],
    test: Samples | Sequence[Samples] | None = None,
    classes: int | None = None,
    name: str = "custom",
    class_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    *,
    task: Task | None = None,
    lazy: bool = False,
) -> Federation:
    """Your own data as a Federation: a list of clients and a test set.

    A client, like the test set, is an ``(x, y)`` pair of tensors or NumPy arrays, or a torch Dataset of
    (input, label) pairs. x may also be a tuple or dict of tensors, for models with several inputs. A client may be
    a dict with ``train``, ``test`` and optionally ``val``; then omit ``test``. The test set may also be a list with one
    per client: the global model is evaluated on all of them, and the metrics of a client on its own.

    Args:
        classes: by default the largest label plus one.
        task: the task of the labels; by default classification.
        lazy: read the inputs of Datasets batch by batch, for data that do not fit in memory.

    >>> clients = [(torch.randn(8, 5), torch.zeros(8, dtype=torch.int64)), (np.ones((4, 5)), np.ones(4, int))]
    >>> data = from_clients(clients, test=(torch.randn(2, 5), torch.tensor([0, 1])))
    >>> len(data), data.classes, data.counts().tolist()
    (2, 2, [[8, 0], [0, 4]])
    """
    if isinstance(clients, Tensor | np.ndarray | Dataset) or not isinstance(clients, Sequence) or not clients:
        raise ConfigError(
            f"clients must be a list with an (x, y) pair or a torch Dataset per client; got {describe(clients)}."
        )
    task = task or Classification()
    splits = [_splits(samples, number) for number, samples in enumerate(clients)]
    if isinstance(test, list | tuple) and test and all(map(_is_pair, test)):
        if len(test) != len(clients):
            raise ConfigError(f"{len(test)} test sets for {len(clients)} clients; give one, or one for each.")
        splits = [each | {"test": samples} for each, samples in zip(splits, test, strict=True)]
        test = None
    pairs: dict[str, dict[int, tuple[Inputs, Tensor]]] = {split: {} for split in SPLITS}
    for number, samples in enumerate(splits):
        for split, given in samples.items():
            whose = f"client {number}" if split == "train" else f"client {number}'s {split}"
            pairs[split][number] = read_samples(given, whose, task, lazy)
    for split in ("val", "test"):
        if 0 < len(pairs[split]) < len(clients) and (split == "val" or test is None):
            lacking = min(set(range(len(clients))) - set(pairs[split]))
            raise ConfigError(f"client {lacking} has no {split} part, others have; give all of them one.")
    if test is not None:
        # the samples of no client are tested with the rest, and are in no client's metrics
        pairs["test"][-1] = read_samples(test, "the test data", task, lazy)
    if not pairs["test"]:
        raise ConfigError("there is no test set; give test=(x, y), or each client a 'test' of its own.")
    train = [*pairs["train"].values(), *pairs["val"].values()]
    forms = [_form(*pair) for pair in train]
    for number, form in enumerate(forms):
        if form != forms[0]:
            raise ConfigError(
                f"client {number % len(clients)} has {form}, client 0 has {forms[0]}; all clients need the same."
            )
    if classes is not None:
        for number, (_, y) in pairs["train"].items():
            check_labels(y, classes, f"client {number}", task)
    (x, y), (test_x, test_y) = _join(train), _join([*pairs["test"].values()])
    rows = torch.arange(len(y)).split([len(y) for _, y in train])
    owner = None
    if [*pairs["test"]] != [-1]:
        sizes = torch.tensor([len(y) for _, y in pairs["test"].values()])
        owner = torch.tensor([*pairs["test"]]).repeat_interleave(sizes)
    names = (name, class_names, client_names)
    data = (x, y, rows[: len(clients)], test_x, test_y, classes, *names, owner)
    return build(*data, task=task, validation=rows[len(clients) :])


def _is_pair(samples: Any) -> bool:
    return isinstance(samples, Dataset) or (isinstance(samples, tuple) and len(samples) == 2)


def _form(x: Inputs, y: Tensor) -> str:
    lazy = " that are read batch by batch" if isinstance(x, Lazy) else ""
    return f"inputs of shape {shape(x)}{lazy} and labels of shape {tuple(y.shape[1:])}"


def _join(pairs: Sequence[tuple[Inputs, Tensor]]) -> tuple[Inputs, Tensor]:
    return concatenate([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _splits(samples: Any, client: int) -> dict[str, Any]:
    """A client's train, val and test samples; most have only the first."""
    if not isinstance(samples, Mapping):
        return {"train": samples}
    if "train" not in samples or not samples.keys() <= set(SPLITS):
        raise ConfigError(
            f"client {client}: a dict has the keys 'train' and, if there are any, 'val' and 'test'; "
            f"it has {', '.join(map(repr, samples))}. Inputs of several tensors go in a pair: (dict, labels)."
        )
    return dict(samples)


def with_clients(
    data: Federation, clients: Sequence[Tensor], validation: Sequence[Tensor] = ()
) -> Federation:
    """The federation with other rows for its clients, checked: none empty, none outside, none twice."""
    if not clients:
        raise ConfigError("there are no clients; give at least one.")
    if len(clients) * data.classes > 200 * MOST_CLASSES and data.task.classes_of(data.y) is not None:
        raise ConfigError(f"{len(clients):,} clients with {data.classes:,} classes are too many to count.")
    shares = [*clients, *validation]
    for number, rows in enumerate(shares):
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.ndim != 1:
            raise ConfigError(
                f"a client's rows must be a one-dimensional int64 tensor, not {describe(rows)}."
            )
        if len(rows) == 0 and number < len(clients):
            raise ConfigError(f"client {number} has no samples; leave it out or give it some.")
    rows = torch.cat(shares)
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= len(data.y):
        raise ConfigError(f"the clients' rows are {low} to {high}, but there are {len(data.y)} samples.")
    used = torch.bincount(rows, minlength=len(data.y))
    if int(used.max()) > 1:
        raise ConfigError(f"sample {int(used.argmax())} is used {int(used.max())} times, not once.")
    return _with_rows(replace(data, clients=tuple(clients), validation=tuple(validation)), rows)


def compact(data: Federation) -> Federation:
    """The federation with only the samples that it uses, in the order of its clients, then of its validation rows."""
    used = torch.cat([*data.clients, *data.validation])
    return _with_rows(data, torch.arange(len(used)), x=select(data.x, used), y=data.y[used])


def hold_out(data: Federation, share: float, seed: int = 0) -> Federation:
    """The federation with a random share of each client's training samples held out for validation.

    A client keeps at least one sample to train on; one with a single sample has none for validation.

    >>> x, y = torch.randn(10, 2), torch.arange(10) % 2
    >>> data = hold_out(build(x, y, [torch.arange(10)], x, y), 0.2)
    >>> len(data.clients[0]), len(data.validation[0])
    (8, 2)
    """
    train, validation = [], []
    for number, rows in enumerate(data.clients):
        size = min(max(1, round(share * len(rows))), len(rows) - 1)
        generator = torch.Generator().manual_seed(fold(seed, number, "validation"))
        order = torch.randperm(len(rows), generator=generator)
        validation.append(rows[order[:size].sort().values])
        train.append(rows[order[size:].sort().values])
    return replace(data, clients=tuple(train), validation=tuple(validation))


def number_classes(data: Federation, classes: Sequence[str]) -> Federation:
    """The federation with its labels numbered by a list of class names; labels without names are numbers already."""
    if data.class_names:
        check_listed({data.name: data.class_names}, classes)
        number = torch.tensor([classes.index(name) for name in data.class_names])
        data = replace(data, y=number[data.y], test_y=number[data.test_y])
    else:
        exact = len(data.y) > 0 and data.task.largest(data.y) is None
        if data.classes > len(classes) or (exact and data.classes != len(classes)):
            raise ConfigError(
                f"{data.name} has labels up to {data.classes - 1}, but {LIST} has {len(classes)} names: "
                f"{', '.join(classes)}."
            )
    return replace(data, classes=len(classes), class_names=tuple(classes))


def digest(data: Federation) -> str:
    """A digest of all samples and of their clients; the first two samples stand for inputs read batch by batch."""
    state = hashlib.blake2b(digest_size=8)
    first = slice(0, 2)
    x, test_x = (tree_leaves(take(x, first) if isinstance(x, Lazy) else x) for x in (data.x, data.test_x))
    rows = [torch.cat(shares) for shares in (data.clients, data.test_clients, data.validation) if shares]
    for tensor in (*x, data.y, *test_x, data.test_y, *rows):
        state.update(str(tuple(tensor.shape)).encode())
        state.update(tensor.cpu().contiguous().numpy().data)
    state.update(str([len(client) for client in data.clients]).encode())
    return state.hexdigest()


def _refuse_from_one(task: Task, y: Tensor) -> None:
    """Refuse labels 1 to K: they would silently make a class 0 without samples."""
    if isinstance(task, Classification) and task.classes is None and task.class_weights is None:
        present = y.unique().tolist()
        if present[0] == 1 and present == list(range(1, len(present) + 1)):
            top = present[-1]
            raise ConfigError(
                f"labels are 1 to {top} and none is 0: subtract 1, or set task.classes = {top + 1} if 0 is a class."
            )


def check_labels(y: Tensor, classes: int, whose: str, task: Task) -> None:
    """Refuse labels outside the classes."""
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ConfigError(f"classes must be a whole number above 0; got {classes!r}.")
    largest = task.largest(y)
    if largest is None:
        return
    if largest >= MOST_CLASSES:
        raise ConfigError(
            f"{whose}: label {largest} is too large: at most {MOST_CLASSES:,} classes are supported."
        )
    if largest >= classes:
        at = int((y == largest).reshape(len(y), -1).any(1).nonzero()[0])
        raise ConfigError(f"{whose}: label {largest} (sample {at}) is outside the {classes} classes.")


def _with_rows(data: Federation, rows: Tensor, **changes: Any) -> Federation:
    """The federation with these rows, as many for each client as before; views of one tensor, not a copy each."""
    views = rows.split_with_sizes([len(share) for share in (*data.clients, *data.validation)])
    return replace(data, clients=views[: len(data)], validation=views[len(data) :], **changes)
