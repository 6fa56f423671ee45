"""The data of one site, and what the server has when the data is at the sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedpews.build import build_task, load_data
from fedpews.data import Federation
from fedpews.data.client_folders import TABLES, read_client_npz
from fedpews.data.client_tables import is_text, number_labels, read_table
from fedpews.data.federation import from_clients, hold_out
from fedpews.data.table import FEDERATED
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.tasks import Task
from fedpews.tasks.names import check_listed

AT_SITES = "sites"
"""The data.name of an experiment whose sites bring their own data."""

NO_ROWS = torch.zeros(0, dtype=torch.int64)


def server_data(experiment: Experiment, settings: Mapping[str, Any]) -> Federation | None:
    """What the server has if the data is at the sites: a test set or nothing. None if the data has a name."""
    if experiment.data.name != AT_SITES:
        return None
    sites, shape, classes = experiment.data.clients, experiment.flower.input_shape, _class_count(experiment)
    columns: tuple[str, ...] = ()
    if sites is None:
        raise ConfigError("data.name is 'sites', so data.clients must say how many sites there are")
    if settings.get("test"):
        test = _read_test(experiment, str(settings["test"]))
        shape, classes, columns = test.shape, classes or test.classes, test.columns
        test_x, test_y = test.test_x, test.test_y
    elif shape and classes:
        test_x, test_y = torch.zeros(0, *shape), NO_ROWS
    else:
        raise ConfigError(
            "data.name is 'sites' and the server has no test set, so flower.input_shape and data.classes (or "
            "flower.classes) must say what the model is for (or give the server one: test=FILE)"
        )
    return Federation(
        torch.zeros(1, *shape),
        test_y[:0],
        (NO_ROWS,) * sites,
        test_x,
        test_y,
        classes,
        task=build_task(experiment),
        columns=columns,
    )


def _read_test(experiment: Experiment, test: str) -> Federation:
    """The server's test set, as that of a federation with one client."""
    table, file = experiment.data, Path(test).expanduser()
    if table.scaling not in (None, FEDERATED):
        raise ConfigError(
            "data.scaling is by each site's own samples, so the server's test set has none; leave one of them out"
        )
    columns: tuple[str, ...] = ()
    if file.suffix in TABLES:
        rows = read_table(file, table.label)
        pair, columns = (rows.x, rows.y), rows.columns
    else:
        pair = read_client_npz(file)
    if table.classes and is_text(pair[1]):
        check_listed({test: {str(value) for value in pair[1].flat}}, table.classes)
        pair = pair[0], number_labels(pair[1], table.classes)
    checked = from_clients([pair], pair, _class_count(experiment), task=build_task(experiment))
    return replace(checked, columns=columns)


def site_data(experiment: Experiment, number: int, settings: Mapping[str, Any]) -> Federation:
    """A site's data: what its node config names, or its share of the experiment's data."""
    table, task, named = experiment.data, build_task(experiment), settings.get("data")
    if named is None and table.name == AT_SITES:
        raise ConfigError(
            "the experiment leaves the data to the sites: start this SuperNode with data in its --node-config, "
            'such as data="folder:/path" with one entry and a test, or data="/path/file.py:function"'
        )
    # the device is the site's choice, and a process that has used a GPU must not be forked
    runtime = experiment.runtime.model_copy(update={"device": "cpu"})
    local, folder = experiment.model_copy(update={"runtime": runtime}), settings.get("data-dir")
    if named is None:
        return load_data(local, data_dir=folder)
    # by the statistics of all sites, which the server sends
    scaling = None if table.scaling == FEDERATED else table.scaling
    changes = {"name": str(named), "clients": None, "validation": None, "scaling": scaling}
    own = table.model_copy(update=changes)
    classes = _class_count(experiment)
    data = load_data(
        local.model_copy(update={"data": own}), data_dir=folder, task=_with_classes(task, classes)
    )
    if len(data) != 1:
        raise ConfigError(f"data {named!r} has {len(data)} clients; a site is one, so it must have one")
    if data.class_names and not table.classes:
        raise ConfigError(
            f"this site's classes are {', '.join(data.class_names)}, and the experiment has no data.classes: list the "
            "classes of all sites there, so that a label means the same at each"
        )
    if classes is not None and classes < data.classes:
        raise ConfigError(f"this site has labels up to {data.classes - 1}, but flower.classes is {classes}")
    # a federation of all sites in which only this one has samples
    sites = range(table.clients or number + 1)
    rows = tuple(torch.arange(len(data.y)) if site == number else NO_ROWS for site in sites)
    owner = torch.full((len(data.test_y),), number)
    alone = Federation(
        data.x,
        data.y,
        rows,
        data.test_x,
        data.test_y,
        classes or data.classes,
        test_owner=owner,
        task=task,
        columns=data.columns,
        missing=tuple(data.missing[0] if site == number else () for site in sites) if data.missing else (),
    )
    return hold_out(alone, table.validation, table.seed) if isinstance(table.validation, float) else alone


def _class_count(experiment: Experiment) -> int | None:
    """The number of classes of all sites together, if the experiment says it."""
    return len(experiment.data.classes) if experiment.data.classes else experiment.flower.classes


def _with_classes(task: Task, classes: int | None) -> Task:
    """The task with the number of classes, if it has one: a single site need not have all of them."""
    if not classes or not hasattr(task, "classes"):
        return task
    changes: dict[str, Any] = {"classes": classes}
    return replace(task, **changes)
