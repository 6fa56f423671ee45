"""From a data set's name to a Federation: get the samples, then assign them to clients."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from fedpews.data import synthetic
from fedpews.data.catalogue import SOURCES, named, obtain
from fedpews.data.client_folders import read_folder
from fedpews.data.federation import Federation, compact, from_clients, hold_out, number_classes, with_clients
from fedpews.data.files import UnequalSizes
from fedpews.data.hugging_face import read_hugging_face
from fedpews.data.images import combine, read
from fedpews.data.inputs import Lazy, prepare, select
from fedpews.data.partition import partition
from fedpews.data.statistics import Privacy, Statistics, describe, values_of
from fedpews.data.table import FEDERATED, DataTable
from fedpews.errors import ConfigError, FedpewsError, explain
from fedpews.tasks.builtin import Classification, Regression
from fedpews.tasks.task import Task
from fedpews.torch_private import tree_map_only
from fedpews.user_code import load_named, working_directory

BY_LABEL = {"class", "classes", "dirichlet", "noc", "parity"}
"""Partitions that use a sample's class."""

AS_GIVEN = ("given", "source")
"""Partitions that keep the clients of a folder or function, or the data sets of a combination."""

LARGEST = 64
"""The size that images of unequal sizes get at most: more is slow on a CPU."""


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
    # federated scaling comes last, by the clients' statistics
    plain = table.model_copy(update={"scaling": None}) if table.scaling == FEDERATED else table
    if ":" in table.name:
        data, default = _load_own(plain, task or Classification()), "given"
    else:
        data = _load_named(plain, task or Classification(), data_dir)
        default = SOURCES[table.name].partition if table.name in SOURCES else "source"
    if table.classes:
        data = number_classes(data, table.classes)
    return hold_out_and_scale(assign(data, table, default), table)


def hold_out_and_scale(data: Federation, table: DataTable) -> Federation:
    """The federation with validation samples and federated scaling, if the table has them."""
    if isinstance(table.validation, float):
        data = hold_out(data, table.validation, table.seed)
    # without samples, the data is at the sites
    if table.scaling == FEDERATED and len(data.y):
        privacy = Privacy(table.min_count)
        sums = {str(client): describe(data, client, privacy) for client in range(len(data))}
        data = scale(data, Statistics(data.name, [], privacy, sums).scaling())
    return data


def scale(data: Federation, scaling: tuple[Sequence[float], Sequence[float]]) -> Federation:
    """The federation with every feature of its inputs moved by a centre and divided by a spread."""
    if isinstance(data.x, Lazy):
        raise ConfigError("data.scaling = 'federated' needs the inputs in memory; set data.lazy to false.")

    def scaled(inputs: Any) -> Any:
        numbers = iter(zip(*scaling, strict=True))

        def scale_leaf(x: Tensor) -> Any:
            pairs = [next(numbers) for _ in values_of(x[:1], data)[1]]
            if not (x.is_floating_point() or x.dtype == torch.uint8):
                return x
            # (1, features, 1, ...)
            centre, spread = torch.tensor(pairs, device=x.device).T.view(2, 1, -1, *[1] * (x.dim() - 2))
            return (prepare(x) - centre) / spread

        return tree_map_only(Tensor, scale_leaf, inputs)

    return replace(data, x=scaled(data.x), test_x=scaled(data.test_x) if len(data.test_y) else data.test_x)


def fit(name: str) -> tuple[Federation, dict[str, dict[str, Any]]]:
    """Read ``folder:PATH`` or ``module:function``: its data, and tables with its task, model and image size."""
    options: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
    try:
        try:
            data = load(name)
        except UnequalSizes as unequal:
            options["image_size"] = min(unequal.side, LARGEST)
            data = load(name, **options)
    except ConfigError as error:
        # fractions are targets of regression; if that fails too, the first error is reported
        try:
            data = load(name, task=Regression(), **options)
        except ConfigError:
            raise error from None
        tables["task"] = {"name": "regression"}
    if data.class_names:
        options["classes"] = list(data.class_names)
    shape = data.shape
    # cnn halves an image three times
    images = isinstance(shape, tuple) and len(shape) == 3 and min(shape[1:]) >= 8
    model = {"name": "cnn" if images else "mlp"}
    return data, {"data": {"name": name, **options}, "model": model, **tables}


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
            tested = torch.isin(data.test_y, data.y).nonzero().flatten()
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


def _load_named(table: DataTable, task: Task, data_dir: Path | str | None) -> Federation:
    """A data set of the catalogue, or several; each source is a client."""
    sources, known = named(table.name), SOURCES.get(table.name)
    if known is not None:
        draws = {
            "train_per_class": table.train_per_class or known.train_per_class,
            "test_per_class": table.test_per_class or known.test_per_class,
        }
        table = table.model_copy(update=draws)
    own_validation = table.validation == "given"
    for source in sources:
        if source.multi_label != (task.name == "multilabel"):
            labels = "several labels at once" if source.multi_label else "one label"
            raise ConfigError(f"{source.name} gives a sample {labels}, so task.name cannot be {task.name}.")
        if own_validation and source.kind != "medmnist":
            raise ConfigError(f"{source.name} has no validation split of its own; set data.validation = 0.1.")
    if known is not None and known.kind == "synthetic":
        if table.scaling is not None:
            raise ConfigError(f"scaling is for images; {known.name} has none.")
        train = synthetic.sample(table.train_per_class or 1, table.seed, "train", classes=known.classes)
        test = synthetic.sample(table.test_per_class or 1, table.seed, "test", classes=known.classes)
        names = (known.name, [*map(str, range(known.classes))], [known.name])
        return from_clients([train], test, known.classes, *names, task=task)
    paths = [obtain(source, data_dir) for source in sources]  # all of them, before the first is read
    images = [read(source, files, own_validation) for source, files in zip(sources, paths, strict=True)]
    return combine(table, sources, images, task)


def _load_own(table: DataTable, task: Task) -> Federation:
    """The clients of ``folder:PATH``, ``hf:PATH`` or ``module:function``."""
    if (table.train_per_class, table.test_per_class, table.storage) != (None,) * 3:
        raise ConfigError("train_per_class, test_per_class and storage are not for your own data.")
    if table.name.startswith("folder:"):
        data = read_folder(table, task)
    elif table.scaling is not None:
        raise ConfigError("data.scaling is for images and tables; a function scales its data itself.")
    else:
        data = read_hugging_face(table, task) if table.name.startswith("hf:") else _call(table, task)
    kept = table.partition in (None, *AS_GIVEN)
    if table.pool and kept:
        raise ConfigError("data.pool pools your own clients' samples; set data.partition too.")
    if not kept and not table.pool and len(data) > 1:
        shown = ", ".join(data.names[:5]) + (", ..." if len(data) > 5 else "")
        raise ConfigError(
            f"{table.name} has {len(data)} clients of its own ({shown}), and data.partition = {table.partition!r} "
            "would mix them; remove it, or set data.pool = true to pool and repartition their samples."
        )
    data = replace(data, client_names=data.client_names or tuple(f"client {i}" for i in range(len(data))))
    rows = torch.cat([*data.clients, *data.validation])
    # already in the order of the clients: nothing need be copied
    return data if torch.equal(rows, torch.arange(len(data.y))) else compact(data)


def _call(table: DataTable, task: Task) -> Federation:
    """The clients that ``module:function`` returns."""
    name = table.name
    try:
        with working_directory():
            function = load_named(name)
            takes_seed = "seed" in inspect.signature(function).parameters
            returned = function(seed=table.seed) if takes_seed else function()
    except FedpewsError:
        raise
    except Exception as error:
        raise ConfigError(f"data {name!r} could not be made: {type(error).__name__}: {error}") from error
    if isinstance(returned, Federation):
        if type(returned.task) is not type(task):
            raise ConfigError(f"data {name!r} is for the task {returned.task.name}, not {task.name}.")
        return replace(returned, name=name, task=task)
    pair = (returned, None) if isinstance(returned, list) else returned
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ConfigError(
            f"data {name!r} must return (clients, test) or a Federation; it returned {type(returned).__name__}."
        )
    clients, test = pair
    return from_clients(clients, test, name=name, task=task, lazy=table.lazy)
