"""From a data set's name to a Federation: get the samples, then assign them to clients."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from fedpews.data import readers, store, synthetic
from fedpews.data.catalogue import SOURCES
from fedpews.data.client_folders import read_folder
from fedpews.data.combine import combine
from fedpews.data.federation import Federation, build, compact, hold_out, number_classes, with_clients
from fedpews.data.hugging_face import read_hugging_face
from fedpews.data.inputs import Lazy, select
from fedpews.data.partition import partition
from fedpews.data.samples import from_clients
from fedpews.data.statistics import federated_scaling
from fedpews.data.table import FEDERATED, DataTable
from fedpews.errors import ConfigError, FedpewsError, explain
from fedpews.tasks.builtin import Classification
from fedpews.tasks.task import Task
from fedpews.user_code import load_named, working_directory

BY_LABEL = {"class", "classes", "dirichlet", "noc", "parity"}
"""Partitions that use a sample's class."""

AS_GIVEN = ("given", "source")
"""Partitions that keep the clients of a folder or function, or the data sets of a combination."""


def load(
    name: str, *, data_dir: Path | str | None = None, task: Task | None = None, **options: Any
) -> Federation:
    """A data set by name, assigned to clients.

    Args:
        name: one of `SOURCES`, several joined by ``+`` (``"pathmnist+octmnist"``), or your own data:
            ``"folder:PATH"`` (see `fedpews.data.client_folders`), ``"hf:PATH"``, or ``"module:function"``. The function
            is called, with ``seed=...`` when it takes one, and returns ``(clients, test)`` as `from_clients` takes
            them, or a `Federation`.
        data_dir: where to look for files first; then FEDPEWS_DATA, then the cache; else they are downloaded.
        task: what the labels are; by default one class per sample.
        options: the other keys of a configuration's ``[data]`` table (`fedpews list keys`): ``partition``,
            ``clients``, ``seed``, ...

    >>> data = load("synthetic-3.2k", partition="parity")
    >>> data.counts().tolist()
    [[800, 0, 800, 0], [0, 800, 0, 800]]
    """
    return load_table(data_table(name=name, **options), data_dir, task)


def data_table(**options: Any) -> DataTable:
    """The options as a checked table, or a ConfigError."""
    try:
        return DataTable(**options)
    except ValidationError as error:
        known = [f"data.{key}" for key in DataTable.model_fields]
        raise ConfigError(explain(error, "data.", known)) from None


def load_table(table: DataTable, data_dir: Path | str | None = None, task: Task | None = None) -> Federation:
    """The data that a table describes."""
    task = task or Classification()
    if table.scaling == FEDERATED:
        plain = table.model_copy(update={"scaling": None})
        return federated_scaling(load_table(plain, data_dir, task), table.min_count)
    if ":" in table.name:
        data, default = _load_own(table, task), "given"
        _check_partition(table, data.names)
    else:
        data = _load_named(table, task, data_dir)
        default = SOURCES[table.name].partition if table.name in SOURCES else "source"
    if table.classes:
        data = number_classes(data, table.classes)
    # inputs that are read batch by batch stay with the clients they were given to
    if not isinstance(data.x, Lazy):
        data = assign(data, table, default)
    return hold_out(data, table.validation, table.seed) if isinstance(table.validation, float) else data


def assign(data: Federation, table: DataTable, default: str) -> Federation:
    """Assign samples to clients by the table's partition, or else the default.

    Samples that no client gets are dropped, and classes that no client has are not tested.
    """
    name = table.partition or default
    if name == "given" and default != "given":
        raise ConfigError(f"partition 'given' is for your own data; for {data.name!r} use e.g. {default!r}.")
    labels = data.task.classes_of(data.y)
    if labels is None and name in BY_LABEL:
        raise ConfigError(
            f"partition {name!r} needs one class per sample, which {data.task.name} does not have; use iid, quantity, "
            "source or given."
        )
    rows = torch.cat(data.clients)
    sizes = torch.tensor([len(client) for client in data.clients])
    sources = torch.repeat_interleave(torch.arange(len(data)), sizes)
    known = torch.zeros_like(rows) if labels is None else labels[rows]
    shares = partition(name, known.numpy(), data.classes, table, sources.numpy())
    clients = [rows[torch.from_numpy(share)] for share in shares]
    if name in AS_GIVEN:
        return with_clients(data, clients, data.validation)
    data = with_clients(data, clients, _split_validation(data, clients))
    data = replace(data, client_names=(), test_owner=None, missing=())
    if sum(map(len, (*data.clients, *data.validation))) < len(data.y):
        data = compact(data)
        if labels is not None:
            tested = torch.isin(data.test_y, data.y)
            data = replace(data, test_x=select(data.test_x, tested), test_y=data.test_y[tested])
    return data


def _split_validation(data: Federation, clients: list[Tensor]) -> list[Tensor]:
    """Split all validation rows among new clients, in proportion to their training rows."""
    if not data.validation:
        return []
    rows = torch.cat(data.validation)
    sizes = torch.tensor([0, *map(len, clients)], dtype=torch.float64)
    cuts = (sizes.cumsum(0) / sizes.sum() * len(rows)).round().long().tolist()
    return [rows[start:end] for start, end in pairwise(cuts)]


def _check_partition(table: DataTable, clients: tuple[str, ...]) -> None:
    """The user's own clients are kept, unless the table says that their samples are pooled."""
    kept = table.partition in (None, *AS_GIVEN)
    if table.pool and kept:
        raise ConfigError(
            "data.pool puts your own clients' samples together, so data.partition must say how to split them."
        )
    if not kept and not table.pool and len(clients) > 1:
        shown = ", ".join(clients[:5]) + (", ..." if len(clients) > 5 else "")
        raise ConfigError(
            f"{table.name} has {len(clients)} clients of its own ({shown}), and data.partition = {table.partition!r} "
            "would mix them; leave it out, or set data.pool = true to put their samples together and split them anew."
        )


def _load_named(table: DataTable, task: Task, data_dir: Path | str | None) -> Federation:
    """A data set of the catalogue, or several; each source is a client."""
    sources, known = store.named(table.name), SOURCES.get(table.name)
    if known is not None:
        draws = {
            "train_per_class": table.train_per_class or known.train_per_class,
            "test_per_class": table.test_per_class or known.test_per_class,
        }
        table = table.model_copy(update=draws)
    for source in sources:
        if source.multi_label != (task.name == "multilabel"):
            raise ConfigError(
                f"{source.name} gives an image several labels at once; set task.name to multilabel."
                if source.multi_label
                else f"{source.name} gives a sample one label, so it is not for {task.name}."
            )
        if table.validation == "given" and source.kind != "medmnist":
            raise ConfigError(
                f"{source.name} has no validation split of its own; give data.validation a share, such as 0.1."
            )
    if known is not None and known.kind == "synthetic":
        if table.scaling is not None:
            raise ConfigError(f"scaling is for images; {known.name} has none.")
        x, y = synthetic.sample(table.train_per_class or 1, table.seed, "train", classes=known.classes)
        test = synthetic.sample(table.test_per_class or 1, table.seed, "test", classes=known.classes)
        names = tuple(map(str, range(known.classes)))
        return build(
            x, y, [torch.arange(len(y))], *test, known.classes, known.name, names, (known.name,), task=task
        )
    paths = [store.obtain(source, data_dir) for source in sources]  # all of them, before the first is read
    own_validation = table.validation == "given"
    images = [
        readers.read(source, files, own_validation) for source, files in zip(sources, paths, strict=True)
    ]
    return combine(table, sources, images, task)


def _load_own(table: DataTable, task: Task) -> Federation:
    """The clients of ``folder:PATH`` or ``module:function``."""
    if (table.train_per_class, table.test_per_class, table.storage) != (None,) * 3:
        raise ConfigError(
            "train_per_class, test_per_class and storage are for named data sets, not your own data."
        )
    if table.name.startswith("folder:"):
        data = read_folder(table, task)
    elif table.scaling is not None:
        raise ConfigError(
            "data.scaling is for named images and for tables; a function scales its data itself."
        )
    elif table.name.startswith("hf:"):
        data = read_hugging_face(table, task)
    else:
        data = _call(table, task)
    if isinstance(data.x, Lazy):
        return data
    names = data.client_names or tuple(f"client {number}" for number in range(len(data)))
    data = replace(data, client_names=names)
    rows = torch.cat([*data.clients, *data.validation])
    # already in the order of the clients: nothing need be copied
    return data if torch.equal(rows, torch.arange(len(data.y))) else compact(data)


def _call(table: DataTable, task: Task) -> Federation:
    name, function_name = table.name, table.name.rpartition(":")[2]
    with working_directory(), _reported_as(name):
        function = load_named(name)
        takes_seed = "seed" in inspect.signature(function).parameters
        made = function(seed=table.seed) if takes_seed else function()
    if isinstance(made, Federation):
        if type(made.task) is not type(task):
            raise ConfigError(
                f"data {name!r}: {function_name} makes data for {made.task.name}; set task.name to that, not "
                f"{task.name}."
            )
        given = {**vars(made), "name": name, "task": task}
        del given["columns"], given["missing"]
        return build(**given)
    made = (made, None) if isinstance(made, list) else made
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError(
            f"data {name!r}: {function_name} must return (clients, test) or a Federation; "
            f"it returned {type(made).__name__}."
        )
    return from_clients(*made, name=name, task=task, lazy=table.lazy)


@contextmanager
def _reported_as(name: str) -> Iterator[None]:
    """Report what the user's code raises as a ConfigError about this name; the cause stays attached."""
    try:
        yield
    except FedpewsError:
        raise
    except Exception as error:
        raise ConfigError(f"data {name!r} could not be made: {type(error).__name__}: {error}") from error
