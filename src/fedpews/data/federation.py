"""What an experiment trains on: every client's own samples, and what models are tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedpews.data.inputs import Inputs, Lazy, concatenate, device, move, shape, take
from fedpews.data.samples import Pair, Samples, describe, parts_of, read_pair
from fedpews.errors import ConfigError
from fedpews.seeds import fold
from fedpews.tasks.classification import Classification
from fedpews.tasks.task import Task

__all__ = ["Federation", "Samples", "build", "from_clients", "hold_out"]


MOST_CLASSES = 1_000_000
"""Also the largest vocabulary; a label above it is an identifier, or damaged."""


@dataclass(frozen=True)
class Federation:
    """Training data that never leaves its client, and what models are tested on.

    All inputs lie in one resident tensor (or a tuple or dict of tensors); a client is the list of its rows. So
    10,000 clients cost no more memory than one. Make one with `build` or `from_clients`, which check it.
    """

    x: Inputs  # (samples, ...), the training inputs of all clients
    y: Tensor  # (samples, ...) as the task has its labels
    clients: tuple[Tensor, ...]  # per client: int64 rows of x and y
    test_x: Inputs
    test_y: Tensor
    classes: int  # or however many outputs the task asks for
    name: str = "custom"
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    test_owner: Tensor | None = None
    """(tests,) int64: whose a test sample is, −1 for nobody's; None if they are common to all."""
    task: Task = field(default_factory=Classification)
    validation: tuple[Tensor, ...] = ()
    """Per client: rows of x held out for choosing; () when there are none."""
    columns: tuple[str, ...] = ()
    """Of tables: the name and type of each column of x, then the label's."""

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.clients)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return device(self.x)

    @property
    def shape(self) -> Any:
        """The shape of one input, or of each of its parts."""
        return shape(self.x)

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names; their numbers where none were given."""
        return self.client_names or tuple(str(number) for number in range(len(self)))

    def batch(self, rows: Tensor | slice) -> tuple[Any, Tensor]:
        """Training samples, ready for a model."""
        return take(self.x, rows), self.y[rows]

    def to(self, device: torch.device | str) -> Federation:
        """The same with all tensors on a device."""
        return replace(
            self,
            x=move(self.x, device),
            y=self.y.to(device),
            clients=_moved(self.clients, device),
            test_x=move(self.test_x, device),
            test_y=self.test_y.to(device),
            test_owner=None if self.test_owner is None else self.test_owner.to(device),
            validation=_moved(self.validation, device),
        )

    @property
    def test_clients(self) -> tuple[Tensor, ...]:
        """Per client: its rows of the test set; () when that is common to all."""
        if self.test_owner is None:
            return ()
        return tuple((self.test_owner == client).nonzero().flatten() for client in range(len(self)))

    @property
    def judged_on(self) -> str:
        """What a client's own accuracy is measured on."""
        if self.test_owner is None:
            return "the common test set, at each client's mix of classes"
        return "each client's own test samples"

    @property
    def outputs(self) -> str:
        """How many classes, labels or targets a model predicts, in words."""
        names = {"regression": "target", "multilabel": "label"}
        other = "class" if self.task.largest(self.y) is not None else "output"
        word = names.get(self.task.name, other)
        return f"{self.classes} {word}{'' if self.classes == 1 else 'es' if word == 'class' else 's'}"

    def counts(self) -> Tensor:
        """How many training samples of each class each client has: (clients, classes) int64.

        Where a sample has no one class, all samples are in one column.
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
    """A checked Federation; whatever cannot be trained on is a ConfigError that says what and where.

    ``classes`` is by default the largest label plus one, or what the task says. ``test_owner`` says whose each test
    sample is.
    """
    task = Classification() if task is None else task
    x, y = _checked(x, y, "the training data", task)
    test_x, test_y = _checked(test_x, test_y, "the test data", task)
    if shape(x) != shape(test_x):
        raise ConfigError(
            f"training inputs have shape {shape(x)} but test inputs {shape(test_x)}; both must be the same."
        )
    if y.shape[1:] != test_y.shape[1:]:
        raise ConfigError(
            f"training labels have shape {tuple(y.shape[1:])} but test labels {tuple(test_y.shape[1:])}."
        )
    if classes is None:
        every = torch.cat([y, test_y])
        classes = task.width(every)
        _notice_from_one(task, every)
    _check_labels(y, classes, "the training data", task)
    _check_labels(test_y, classes, "the test data", task)
    if len(clients) * classes > 200 * MOST_CLASSES and task.classes_of(y) is not None:
        raise ConfigError(f"{len(clients):,} clients with {classes:,} classes are too many to count.")
    if class_names and len(class_names) != classes:
        raise ConfigError(f"{len(class_names)} class names for {classes} classes; give one each, or none.")
    if client_names and len(client_names) != len(clients):
        raise ConfigError(
            f"{len(client_names)} client names for {len(clients)} clients; give one each, or none."
        )
    rows = _rows([*clients, *validation], len(y), len(clients))
    if test_owner is not None and (
        test_owner.shape != test_y.shape[:1]
        or not -1 <= int(test_owner.min()) <= int(test_owner.max()) < len(clients)
    ):
        raise ConfigError(
            f"test_owner must give each test sample a client from 0 to {len(clients) - 1}, or −1."
        )
    return Federation(
        x,
        y,
        rows[: len(clients)],
        test_x,
        test_y,
        classes,
        name,
        tuple(class_names),
        tuple(client_names),
        test_owner,
        task,
        rows[len(clients) :],
    )


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
    (input, label) pairs. x may also be a tuple or dict of tensors, for a model that takes several. A client may be a
    dict of such with its own ``train``, ``val`` and ``test``; then ``test`` may be left out. The test set may also be a
    list with one for each client; the global model is judged on all of them, a client's own metrics are those on its
    own.

    Args:
        classes: by default the largest label plus one.
        task: what labels are; by default one class per sample.
        lazy: read the inputs of Datasets batch by batch, for data that does not fit in memory.

    >>> clients = [(torch.randn(8, 5), torch.zeros(8, dtype=torch.int64)), (np.ones((4, 5)), np.ones(4, int))]
    >>> data = from_clients(clients, test=(torch.randn(2, 5), torch.tensor([0, 1])))
    >>> len(data), data.classes, data.counts().tolist()
    (2, 2, [[8, 0], [0, 4]])
    """
    if isinstance(clients, Tensor | np.ndarray | Dataset) or not isinstance(clients, Sequence) or not clients:
        raise ConfigError(
            "clients must be a list with an (x, y) pair or a torch Dataset per client; "
            f"got {describe(clients)}."
        )
    task = Classification() if task is None else task
    parts = [parts_of(samples, f"client {number}") for number, samples in enumerate(clients)]
    read: dict[str, dict[int, Pair]] = {"train": {}, "val": {}, "test": {}}
    for number, mine in enumerate(parts):
        for part, samples in mine.items():
            whose = f"client {number}" if part == "train" else f"client {number}'s {part}"
            read[part][number] = read_pair(samples, whose, task, lazy)
    for part in ("val", "test"):
        if read[part] and len(read[part]) < len(clients) and (part == "val" or test is None):
            lacking = next(number for number in range(len(clients)) if number not in read[part])
            raise ConfigError(f"client {lacking} has no {part} part, others have; give all of them one.")
    sets: list[Any] = list(test) if _is_list_of_sets(test) else []  # type: ignore[arg-type]
    if sets and len(sets) != len(clients):
        raise ConfigError(f"{len(sets)} test sets for {len(clients)} clients; give one, or one for each.")
    if sets:
        read["test"] = {n: read_pair(one, f"client {n}'s test", task, lazy) for n, one in enumerate(sets)}
    elif test is not None:
        # what is nobody's own is tested with the rest, and counts for no client
        read["test"][-1] = read_pair(test, "the test data", task, lazy)
    elif not read["test"]:
        raise ConfigError("there is no test set; give test=(x, y), or each client a 'test' of its own.")
    trained, tested = [*read["train"].values(), *read["val"].values()], [*read["test"].values()]
    _same_shapes(trained)
    if classes is not None:
        for number, pair in read["train"].items():
            _check_labels(pair.y, classes, f"client {number}", task)
    rows = torch.arange(sum(len(pair.y) for pair in trained)).split([len(pair.y) for pair in trained])
    sizes = torch.tensor([len(pair.y) for pair in tested])
    owner = torch.repeat_interleave(torch.tensor([*read["test"]]), sizes)
    return build(
        _joined(trained),
        torch.cat([pair.y for pair in trained]),
        rows[: len(clients)],
        _joined(tested),
        torch.cat([pair.y for pair in tested]),
        classes,
        name,
        class_names,
        client_names,
        None if [*read["test"]] == [-1] else owner,
        task=task,
        validation=rows[len(clients) :],
    )


def _is_list_of_sets(test: Any) -> bool:
    """Whether it is a test set for each client, rather than one pair of inputs and labels."""
    sets = isinstance(test, list | tuple) and len(test) > 0
    return sets and all(
        isinstance(one, Dataset) or (isinstance(one, tuple) and len(one) == 2) for one in test
    )


def hold_out(data: Federation, part: float, seed: int = 0) -> Federation:
    """The same with a part of each client's training samples held out for validation, drawn at random.

    A client keeps at least one sample to train on; one with a single sample has none to validate with.

    >>> data = from_clients([(torch.randn(10, 2), torch.arange(10) % 2)], (torch.randn(2, 2), torch.arange(2)))
    >>> held = hold_out(data, 0.2)
    >>> len(held.clients[0]), len(held.validation[0])
    (8, 2)
    """
    if not 0 < part < 1:
        raise ConfigError(f"data.validation must be between 0 and 1; got {part}.")
    kept, held = [], []
    for number, rows in enumerate(data.clients):
        size = min(max(1, round(part * len(rows))), len(rows) - 1)
        generator = torch.Generator().manual_seed(fold(seed, number, "validation"))
        order = torch.randperm(len(rows), generator=generator)
        held.append(rows[order[:size].sort().values])
        kept.append(rows[order[size:].sort().values])
    return replace(data, clients=tuple(kept), validation=tuple(held))


def _checked(x: Inputs, y: Tensor, whose: str, task: Task) -> tuple[Inputs, Tensor]:
    pair = Pair(x, y) if isinstance(x, Lazy) else read_pair((x, y), whose, task)
    return pair.x, pair.y


def _joined(pairs: Sequence[Pair]) -> Inputs:
    if pairs[0].dataset is not None:
        return Lazy([pair.dataset for pair in pairs])
    return pairs[0].x if len(pairs) == 1 else concatenate([pair.x for pair in pairs])


def _same_shapes(pairs: Sequence[Pair]) -> None:
    if len({pair.dataset is None for pair in pairs}) > 1:
        raise ConfigError(
            "some clients are Datasets to be read batch by batch and some are not; make all one kind."
        )
    if pairs[0].dataset is not None:
        return
    first, labels = shape(pairs[0].x), pairs[0].y.shape[1:]
    for number, pair in enumerate(pairs):
        if shape(pair.x) != first:
            raise ConfigError(
                f"client {number} has inputs of shape {shape(pair.x)}, client 0 of {first}; "
                "all clients need the same."
            )
        if pair.y.shape[1:] != labels:
            raise ConfigError(
                f"client {number} has labels of shape {tuple(pair.y.shape[1:])}, client 0 of {tuple(labels)}."
            )


def _notice_from_one(task: Task, y: Tensor) -> None:
    """Refuse labels 1 to K: they would silently make a class 0 without samples."""
    if isinstance(task, Classification) and task.classes is None and task.class_weights is None:
        present = y.unique().tolist()
        if present[0] == 1 and present == list(range(1, len(present) + 1)):
            top = present[-1]
            raise ConfigError(
                f"labels are 1 to {top} and none is 0, but they count from 0: subtract 1. If class 0 is meant and "
                f"only lacks samples, say so: classes={top + 1}, or task.classes = {top + 1}."
            )


def _check_labels(y: Tensor, classes: int, whose: str, task: Task) -> None:
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ConfigError(f"classes must be a whole number above 0; got {classes!r}.")
    largest = task.largest(y)
    if largest is not None and largest >= MOST_CLASSES:
        raise ConfigError(
            f"{whose}: label {largest} is no class: there are at most {MOST_CLASSES:,}, from 0 on."
        )
    if largest is not None and largest >= classes:
        at = int((y == largest).reshape(len(y), -1).any(1).nonzero()[0])
        raise ConfigError(
            f"{whose}: label {largest} (sample {at}) is outside the {classes} classes 0 to {classes - 1}."
        )


def _rows(shares: Sequence[Tensor], samples: int, clients: int) -> tuple[Tensor, ...]:
    """The clients' rows, and those held out, as views of one tensor, checked: none empty, none outside, none twice."""
    if not shares or not clients:
        raise ConfigError("there are no clients; give at least one.")
    if len(shares) not in (clients, 2 * clients):
        raise ConfigError(
            f"{len(shares) - clients} lists of rows held out for {clients} clients; each needs one."
        )
    for number, rows in enumerate(shares):
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.ndim != 1:
            raise ConfigError(
                f"client {number % clients}: its rows must be a one-dimensional int64 tensor; got {describe(rows)}."
            )
        if len(rows) == 0 and number < clients:
            raise ConfigError(f"client {number} has no samples; leave it out or give it some.")
    every = torch.cat(list(shares))
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
    return tuple(every.split_with_sizes([len(rows) for rows in shares]))


def _moved(shares: tuple[Tensor, ...], device: torch.device | str) -> tuple[Tensor, ...]:
    """Rows on a device: one copy, not one per client."""
    if not shares:
        return ()
    return tuple(torch.cat(shares).to(device).split_with_sizes([len(mine) for mine in shares]))
