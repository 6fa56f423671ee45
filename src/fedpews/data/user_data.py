"""Your own data by name: a folder with an entry per client, or a function that makes the clients.

``folder:PATH`` is a folder with one entry per client and one called ``test``. An entry is

- ``clinic-a.npz`` (or a sub-folder ``clinic-a/`` with one npz file) holding ``x`` and ``y``: x is
  (samples, ...) floating point, or bytes: images (samples, height, width), (samples, height, width, 3) or
  (samples, channels, height, width), scaled to [-1, 1]; y is (samples,) whole numbers from 0; or
- a sub-folder ``clinic-a/`` with a sub-folder of images for each class (``clinic-a/cat/1.png``), all images
  of one size, scaled to [-1, 1].

``module:function`` (or ``path/to/file.py:function``) is called, with ``seed=...`` when it takes one, and
returns ``(clients, test)`` as `from_clients` takes them, or a `Federation`.

>>> import tempfile, numpy as np
>>> from fedpews.data import load
>>> with tempfile.TemporaryDirectory() as folder:
...     for name, label in (("clinic-a", 0), ("clinic-b", 1), ("test", 1)):
...         np.savez(f"{folder}/{name}.npz", x=np.random.rand(6, 5), y=np.full(6, label))
...     data = load(f"folder:{folder}")
>>> data.client_names, data.counts().tolist()
(('clinic-a', 'clinic-b'), [[6, 0], [0, 6]])
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from fedpews.data.client_folders import read_folder
from fedpews.data.federation import Federation, build, from_clients
from fedpews.data.inputs import Lazy, select
from fedpews.data.pool import Pool
from fedpews.errors import ConfigError, FedpewsError
from fedpews.tasks.classification import Classification
from fedpews.tasks.task import Task
from fedpews.user_code import load_named, working_directory


def load(
    name: str,
    seed: int = 0,
    task: Task | None = None,
    label: str | None = None,
    image_size: int | None = None,
    lazy: bool = False,
    classes: Sequence[str] = (),
    missing: str = "refuse",
    scaling: str | Sequence[str] | None = None,
) -> Pool | Federation:
    """The pool of ``folder:PATH`` or ``module:function``; each given client is a source.

    What is read batch by batch stays with the clients it was given to, so it is a Federation already.
    """
    task = Classification() if task is None else task
    if name.startswith("folder:"):
        folder = Path(name.removeprefix("folder:")).expanduser()
        data = read_folder(folder, name, task, label, image_size, classes, missing, scaling)
    elif scaling is not None:
        raise ConfigError(
            "data.scaling is for named images and for tables; a function scales its data itself."
        )
    else:
        data = _call(name, seed, task, lazy)
    if isinstance(data.x, Lazy):
        return data
    rows = torch.cat([*data.clients, *data.validation])
    sizes = torch.tensor([len(client) for client in (*data.clients, *data.validation)])
    numbers = torch.arange(len(data)).repeat(2 if data.validation else 1)
    whole = torch.equal(rows, torch.arange(len(data.y)))  # then nothing need be copied
    trained = sum(len(client) for client in data.clients)
    return Pool(
        data.x if whole else select(data.x, rows),
        data.y if whole else data.y[rows],
        torch.repeat_interleave(numbers, sizes),
        data.test_x,
        data.test_y,
        data.classes,
        data.name,
        data.class_names,
        data.client_names or tuple(f"client {number}" for number in range(len(data))),
        "given",
        data.task,
        data.test_owner,
        torch.arange(trained, len(rows)) if data.validation else None,
        data.columns,
    )


def _call(name: str, seed: int, task: Task, lazy: bool) -> Federation:
    what = name.rpartition(":")[2]
    with working_directory(), _blamed_on(name):
        function = load_named(name)
        takes_seed = "seed" in inspect.signature(function).parameters
        made = function(seed=seed) if takes_seed else function()
    if isinstance(made, Federation):
        samples = (made.x, made.y, made.clients, made.test_x, made.test_y)
        if type(made.task) is not type(task):
            raise ConfigError(
                f"data {name!r}: {what} makes data for {made.task.name}; set task.name to that, not {task.name}."
            )
        return build(
            *samples,
            made.classes,
            name,
            made.class_names,
            made.client_names,
            made.test_owner,
            task=task,
            validation=made.validation,
        )
    if isinstance(made, list):
        return from_clients(made, name=name, task=task, lazy=lazy)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError(
            f"data {name!r}: {what} must return (clients, test) or a Federation; "
            f"it returned {type(made).__name__}."
        )
    return from_clients(made[0], made[1], name=name, task=task, lazy=lazy)


@contextmanager
def _blamed_on(name: str) -> Iterator[None]:
    """Whatever the user's own code raises is reported as the user's; the cause stays attached."""
    try:
        yield
    except FedpewsError:
        raise
    except Exception as error:
        raise ConfigError(f"data {name!r} could not be made: {type(error).__name__}: {error}") from error
