"""Every way to assign labelled samples to clients.

A partition is a function of a `Request` that returns each client's rows. The first line of its docstring is what
`fedpews list data` prints.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpews.data.table import DataTable
from fedpews.errors import ConfigError, first_line, nearest, need_extra
from fedpews.seeds import fold

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """The partition's name, the samples' labels and sources, a random generator, and the user's options."""

    name: str
    labels: Rows  # (samples,)
    sources: Rows  # (samples,) the data set, or the given client, of each sample
    classes: int
    rng: np.random.Generator
    options: DataTable


def by_source(request: Request) -> list[Rows]:
    """One client per source of a combination (CIFAR-10 to the first, MNIST to the second)."""
    _expect_clients(request, len(np.unique(request.sources)))
    return _grouped(request.sources)


def given(request: Request) -> list[Rows]:
    """Your own data as you gave it: one client per file, folder or entry of the list."""
    _expect_clients(request, len(np.unique(request.sources)))
    return _grouped(request.sources)


def by_class(request: Request) -> list[Rows]:
    """Neighbouring classes in blocks, one block per client; by default a class each."""
    clients = request.options.clients or request.classes
    if clients > request.classes:
        raise ConfigError(f"partition 'class': use at most {request.classes} clients, one per class.")
    blocks = np.array_split(np.arange(request.classes), clients)
    return [np.flatnonzero(np.isin(request.labels, block)) for block in blocks]


def by_class_lists(request: Request) -> list[Rows]:
    """The classes listed for each client (class_lists); a class listed twice is divided evenly."""
    lists = request.options.class_lists
    if not lists:
        raise ConfigError("partition 'classes' needs class_lists, e.g. [[0, 2], [1, 3]].")
    _expect_clients(request, len(lists))
    for number, wanted in enumerate(lists):
        unknown = [label for label in wanted if label not in range(request.classes)]
        if unknown or not wanted or len(set(wanted)) != len(wanted):
            raise ConfigError(
                f"class_lists: client {number} has {wanted}; list classes below {request.classes}."
            )
    shares: list[list[Rows]] = [[] for _ in lists]
    # sorted: a set has no order, and all classes draw from one generator
    for label in sorted({label for wanted in lists for label in wanted}):
        owners = [number for number, wanted in enumerate(lists) if label in wanted]
        rows = request.rng.permutation(np.flatnonzero(request.labels == label))
        for owner, share in zip(owners, np.array_split(rows, len(owners)), strict=True):
            shares[owner].append(share)
    return [np.concatenate(share) for share in shares]


def by_parity(request: Request) -> list[Rows]:
    """Two clients: the even classes, the odd classes."""
    _expect_clients(request, 2)
    return [np.flatnonzero(request.labels % 2 == side) for side in (0, 1)]


def dirichlet(request: Request) -> list[Rows]:
    """Each class spread over the clients in shares drawn from Dirichlet(alpha): small alpha, uneven classes.

    A client left empty is given one sample of the client that has most.
    """
    clients, alpha = _option(request, "clients"), _option(request, "alpha")
    shares: list[list[Rows]] = [[] for _ in range(clients)]
    for label in range(request.classes):
        rows = request.rng.permutation(np.flatnonzero(request.labels == label))
        chunks = np.split(rows, _cuts(request.rng.dirichlet(np.full(clients, alpha)), len(rows)))
        for share, chunk in zip(shares, chunks, strict=True):
            share.append(chunk)
    return _fill_empty([np.concatenate(share) for share in shares])


def noc(request: Request) -> list[Rows]:
    """Non-overlapping classes: each client all samples of equally many classes, drawn without replacement.

    Classes that no client draws are left out, of the test set too.
    """
    clients = _option(request, "clients")
    each = request.options.classes_per_client or max(1, request.classes // clients)
    if each * clients > request.classes:
        raise ConfigError(
            f"partition 'noc': {clients} clients with {each} classes each need {clients * each} classes, there are "
            f"{request.classes}; use fewer clients or a smaller classes_per_client."
        )
    # (clients, classes of each)
    drawn = request.rng.permutation(request.classes)[: each * clients].reshape(clients, each)
    return [np.flatnonzero(np.isin(request.labels, labels)) for labels in drawn]


def iid(request: Request) -> list[Rows]:
    """All samples shuffled and assigned in equal shares."""
    return np.array_split(request.rng.permutation(len(request.labels)), _option(request, "clients"))


def quantity(request: Request) -> list[Rows]:
    """All samples shuffled and assigned in shares whose sizes are drawn from Dirichlet(alpha).

    A client left empty is given one sample of the client that has most.
    """
    clients, alpha = _option(request, "clients"), _option(request, "alpha")
    rows = request.rng.permutation(len(request.labels))
    return _fill_empty(np.split(rows, _cuts(request.rng.dirichlet(np.full(clients, alpha)), len(rows))))


def by_flwr(request: Request) -> list[Rows]:
    """A partitioner of flwr-datasets over a dataset with the columns ``label`` and ``source``.

    Its options are ``data.partitioner``; the number of clients, the label's column and a seed are filled in.
    """
    try:
        partitioners = import_module("flwr_datasets.partitioner")
    except ImportError as error:
        raise ConfigError(f"partition {request.name!r} needs: pip install flwr-datasets ({error})") from error
    datasets = need_extra("hf", "datasets", f"partition {request.name!r}")
    known = [key for key in partitioners.__all__ if key.endswith("Partitioner") and key != "Partitioner"]
    class_name = request.name.removeprefix(FLWR)
    if class_name not in known:
        raise ConfigError(f"flwr-datasets has no partitioner {class_name!r}; {nearest(class_name, known)}")
    cls = getattr(partitioners, class_name)
    offered = {
        "num_partitions": request.options.clients,
        "partition_by": "label",
        "seed": int(request.rng.integers(2**31)),
        "alpha": request.options.alpha,
    }
    known_options = inspect.signature(cls).parameters
    fitting = {key: value for key, value in offered.items() if key in known_options and value is not None}
    try:
        partitioner = cls(**fitting | request.options.partitioner)
        columns = {"label": request.labels, "source": request.sources, "row": np.arange(len(request.labels))}
        partitioner.dataset = datasets.Dataset.from_dict(columns)
        parts = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
        return [np.array(part["row"], dtype=np.int64) for part in parts]
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"partition {request.name!r}: {first_line(error)}") from error


FLWR = "flwr:"

PARTITIONS: dict[str, Callable[[Request], list[Rows]]] = {
    "class": by_class,
    "classes": by_class_lists,
    "dirichlet": dirichlet,
    "given": given,
    "iid": iid,
    "noc": noc,
    "parity": by_parity,
    "quantity": quantity,
    "source": by_source,
}


def partition(
    name: str, labels: Rows, classes: int, options: DataTable, sources: Rows | None = None
) -> list[Rows]:
    """Assign samples to clients: each client's rows, in rising order, no row twice, no client empty.

    A partition ignores the options that it does not use (``alpha`` for 'iid').

    >>> [rows.tolist() for rows in partition("parity", np.array([0, 1, 2, 3]), 4, DataTable())]
    [[0, 2], [1, 3]]
    """
    if name not in PARTITIONS and not name.startswith(FLWR):
        known = f"{', '.join(sorted(PARTITIONS))}, and {FLWR} with the name of a partitioner of flwr-datasets"
        raise ConfigError(f"unknown partition {name!r}; known are {known}.")
    if options.clients is not None and options.clients > len(labels):
        raise ConfigError(f"{options.clients} clients cannot share {len(labels)} training samples.")
    sources = np.zeros(len(labels), np.int64) if sources is None else sources
    # by name, so that two partitions of one seed are independent draws
    rng = np.random.default_rng(fold(options.seed, "partition", name))
    request = Request(name, labels, sources, classes, rng, options)
    shares = by_flwr(request) if name.startswith(FLWR) else PARTITIONS[name](request)
    for number, share in enumerate(shares):
        if len(share) == 0:
            raise ConfigError(f"partition {name!r} leaves client {number} without samples.")
    # in rising order a client's samples do not depend on how a partition happened to draw them
    return [np.sort(share).astype(np.int64) for share in shares]


def _option(request: Request, key: str) -> Any:
    """An option that the partition cannot do without."""
    value = getattr(request.options, key)
    if value is None:
        raise ConfigError(f"partition {request.name!r} needs data.{key}.")
    return value


def _expect_clients(request: Request, number: int) -> None:
    clients = request.options.clients
    if clients not in (None, number):
        raise ConfigError(f"partition {request.name!r} makes {number} clients here, not {clients}.")


def _grouped(keys: Rows) -> list[Rows]:
    """The rows of each key, for as many keys as there are clients, in one sort."""
    # stable: within a key the rows keep rising
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def _cuts(shares: NDArray[np.float64], total: int) -> Rows:
    """Where to cut ``total`` rows into the given shares; rounding never loses a row."""
    # cumulative shares are rounded, not each share: neighbours have the same cut between them
    return np.clip(np.rint(np.cumsum(shares)[:-1] * total), 0, total).astype(np.int64)


def _fill_empty(shares: Sequence[Rows]) -> list[Rows]:
    """Give every empty client one sample of the largest; there are at least as many samples as clients."""
    shares = list(shares)
    sizes = np.array([len(share) for share in shares])
    for empty in np.flatnonzero(sizes == 0):
        # looked up again for every empty client, so that none is drained
        largest = int(sizes.argmax())
        shares[empty], shares[largest] = shares[largest][-1:], shares[largest][:-1]
        sizes[empty], sizes[largest] = 1, sizes[largest] - 1
    return shares
