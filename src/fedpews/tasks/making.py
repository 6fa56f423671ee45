"""From a name and options to a task."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from fedpews.errors import ConfigError, explain, first_line, nearest
from fedpews.tasks.contract import Criterion, Task, per_sample
from fedpews.tasks.foreign import find_foreign
from fedpews.tasks.names import TASKS
from fedpews.user_code import load_module

NOT_OPTIONS = {"metrics", "criterion"}


def make(
    task: str | Task = "classification",
    *,
    metrics: Sequence[str] = (),
    loss: Criterion | None = None,
    options: Mapping[str, Any] | None = None,
) -> Task:
    """A task by name, ``module:Class`` or ``path/to/file.py:Class``; or an object, with metrics and loss changed.

    Args:
        metrics: which to measure; the first one counts. By default the task's own first.
        loss: in the place of the task's own: (outputs, labels) -> one number per sample, or a mean.

    >>> make("segmentation", metrics=["iou"], options={"ignore_index": 255}).ignore_index
    255
    """
    if isinstance(task, str):
        made = _call(task, dict(options or {}))
    elif isinstance(task, Task):
        made = task
    else:
        raise ConfigError(f"task must be a name or a fedpews.tasks.Task; got {type(task).__name__}")
    changes: dict[str, Any] = {"metrics": tuple(metrics)} if metrics else {}
    if loss is not None:
        if not callable(loss):
            raise ConfigError(f"loss must be a function of (outputs, labels); got {type(loss).__name__}")
        changes["criterion"] = per_sample(loss)
    made = dataclasses.replace(made, **changes)
    for metric in made.metrics:
        # now, not after the first round was trained
        if ":" in metric:
            find_foreign(metric)
    return made


def task_class(name: str) -> type[Task]:
    """The class behind a name."""
    place, colon, attribute = TASKS.get(name, name).rpartition(":")
    if not colon:
        raise ConfigError(f"there is no task {name!r}; {nearest(name, TASKS)} (Your own: module:Class.)")
    try:
        found = getattr(load_module(place), attribute, None)
    except Exception as error:  # whatever the user's own file raises
        raise ConfigError(f"task {name!r} cannot be loaded: {first_line(error)}") from error
    if not isinstance(found, type) or not issubclass(found, Task):
        raise ConfigError(f"task {name!r}: {place!r} has no subclass {attribute!r} of fedpews.tasks.Task")
    return found


def _call(name: str, options: dict[str, Any]) -> Task:
    cls = task_class(name)
    known = [field.name for field in dataclasses.fields(cls) if field.name not in NOT_OPTIONS]
    for option in options:
        if option not in known:
            raise ConfigError(f"task {name} has no option task.{option}; {nearest(option, known)}")
    # TOML and the command line have lists only
    listed = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        checked = _model(cls)(**listed)
    except ValidationError as error:
        raise ConfigError(explain(error, "task.")) from None
    return cls(**{key: getattr(checked, key) for key in options})


@cache
def _model(cls: type[Task]) -> type[BaseModel]:
    """What checks the types of a task's options."""
    hints = get_type_hints(cls)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], None)
        for field in dataclasses.fields(cls)
        if field.name not in NOT_OPTIONS
    }
    return create_model(cls.__name__, __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)


def describe_tasks() -> list[tuple[str, str]]:
    """Every task's name with the first line of its docstring and its metrics."""
    found = []
    for name in TASKS:
        cls = task_class(name)
        about = (inspect.getdoc(cls) or "").splitlines()[0]
        found.append((name, f"{about} Metrics: {', '.join(cls.METRICS)}."))
    return found
