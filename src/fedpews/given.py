"""What users give in Python beside a configuration (a model, data, a task, a method), as the configuration says it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedpews.config import override
from fedpews.data.federation import Federation
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.methods.contract import Method, Wrapper
from fedpews.results.schema import GIVEN
from fedpews.tasks import Classification, Task
from fedpews.tasks.names import TASKS

_STILL_USED = ("classes", "seed", "validation", "augment", "lazy")
"""Keys of ``[data]`` that matter for clients that are given, too."""


def resolve(experiment: Experiment | str | Path | None, settings: Mapping[str, Any]) -> Experiment:
    """An experiment, a recipe's name or a file, with settings such as ``rounds=5`` or ``train={"lr": 0.1}``."""
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            changes |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            changes["method.name" if key == "method" else key] = value
    if isinstance(experiment, Experiment):
        return Experiment(**override(experiment.to_dict(), changes)) if changes else experiment
    return Experiment(**override({}, changes)) if experiment is None else Experiment.load(experiment, changes)


def task_settings(
    task: str | Task | Mapping[str, Any] | None, metrics: Sequence[str], clients: Any
) -> tuple[dict[str, Any], Task | None]:
    """The table of a task in any of the forms users give it, and the task if it is an object."""
    if task is None and isinstance(clients, Federation) and clients.task != Classification():
        task = clients.task
    if isinstance(task, Task):
        cls = type(task)
        name = task.name if task.name in TASKS else f"{cls.__module__}:{cls.__qualname__}"
        options = {
            field.name: getattr(task, field.name) for field in fields(task) if field.name != "criterion"
        }
        table = {key: value for key, value in options.items() if value is not None}
        table |= {"name": name, "metrics": list(task.metrics)}
    else:
        table = {"name": task} if isinstance(task, str) else dict(task or {})
    if metrics:
        table["metrics"] = list(metrics)
    return ({"task": table} if table else {}), task if isinstance(task, Task) else None


def record_given(experiment: Experiment, model: Any, clients: Any) -> Experiment:
    """The experiment, saying that its model or its data were given in Python."""
    values = experiment.to_dict()
    if clients is not None:
        table = {key: value for key, value in values["data"].items() if key in _STILL_USED}
        values["data"] = {"name": GIVEN} | table
    if model is not None:
        start = {key: value for key, value in values["model"].items() if key in ("start", "fresh", "lora")}
        code = _code(model)
        values["model"] = {"name": GIVEN} | start | ({"code": code} if code else {})
    return experiment if model is None and clients is None else Experiment(**values)


def check_given(experiment: Experiment, model: Any, clients: Any) -> None:
    """Refuse an experiment whose model or data must be given in Python, and are not."""
    missing = {}
    if model is None and experiment.model.name == GIVEN:
        code = (experiment.model.model_extra or {}).get("code")
        missing["model=…"] = f"model ({code})" if code else "model"
    if clients is None and experiment.data.name == GIVEN:
        missing["clients=…, test=…"] = "data"
    if missing:
        raise ConfigError(
            f"this experiment's {' and '.join(missing.values())} {'were' if len(missing) > 1 else 'was'} given in "
            f"Python: run it there, with fedpews.run(CONFIG, {', '.join(missing)})"
        )


def _code(model: Any) -> str:
    """The name, file and line of a model's definition; empty if unknown."""
    source = type(model) if isinstance(model, nn.Module) else model
    while isinstance(source, partial):
        source = source.func
    try:
        file, line = inspect.getsourcefile(source), inspect.getsourcelines(source)[1]
    except (TypeError, OSError):
        return ""
    if file is None or source.__module__.startswith("torch."):
        return ""
    path, here = Path(file), Path.cwd()
    return f"{source.__qualname__}, {path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


def describe_object(method: Method) -> dict[str, str]:
    """A method's object as a configuration's table: enough to tell it from another, not to make it again.

    >>> from fedpews.methods.fedprox import FedProx
    >>> describe_object(FedProx(mu=0.5))["name"]
    'FedProx'
    """
    text = repr(method)
    if " object at 0x" in text:
        raise ConfigError(
            f"{type(method).__name__} does not show its options in its repr, so a run cannot tell it from another; "
            "make it a frozen dataclass"
        )
    names = [type(method).__name__]
    while isinstance(method, Wrapper):
        method = method.inner
        names.append(type(method).__name__)
    return {"name": "+".join(reversed(names)), "object": text}
