"""A model and data given in Python: what a configuration records of them, since it cannot make them again."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.methods.contract import Method, Wrapper
from fedpews.results.schema import GIVEN

_STILL_USED = ("classes", "seed", "validation", "augment", "lazy")
"""Keys of ``[data]`` that matter for clients that are given, too."""


def record_given(experiment: Experiment, model: Any, clients: Any) -> Experiment:
    """The experiment with the truth about what was given."""
    values = experiment.to_dict()
    if clients is not None:
        table = {key: value for key, value in values["data"].items() if key in _STILL_USED}
        values["data"] = {"name": GIVEN} | table
    if model is not None:
        start = {key: value for key, value in values["model"].items() if key == "start"}
        code = _code(model)
        values["model"] = {"name": GIVEN} | start | ({"code": code} if code else {})
    return experiment if model is None and clients is None else Experiment(**values)


def add_fingerprints(experiment: Experiment, model: str, data: str) -> Experiment:
    """The experiment with the fingerprints of what was given."""
    values = experiment.to_dict()
    for table, found in (("model", model), ("data", data)):
        if values[table]["name"] == GIVEN:
            values[table]["fingerprint"] = found
    return Experiment(**values)


def check_given(experiment: Experiment, model: Any, clients: Any) -> None:
    """Refuse to go on without what an experiment was given in Python."""
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
    """Where a model is defined, as far as that is known: name, file and line."""
    made = type(model) if isinstance(model, nn.Module) else model
    while isinstance(made, partial):
        made = made.func
    try:
        file, line = inspect.getsourcefile(made), inspect.getsourcelines(made)[1]
    except (TypeError, OSError):
        return ""
    if file is None or made.__module__.startswith("torch."):
        return ""
    path, here = Path(file), Path.cwd()
    return f"{made.__qualname__}, {path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


def describe_object(method: Method) -> dict[str, str]:
    """A method's object as a configuration's table: enough to tell it from another, not to make it again.

    >>> from fedpews.methods.fedprox import FedProx
    >>> describe_object(FedProx(mu=0.5))["name"]
    'FedProx'
    """
    text = repr(method)
    if " object at 0x" in text:
        raise ConfigError(
            f"{type(method).__name__} does not say its options in its repr, so a run could not tell it from another; "
            "make it a frozen dataclass"
        )
    names = [type(method).__name__]
    while isinstance(method, Wrapper):
        method = method.inner
        names.append(type(method).__name__)
    return {"name": "+".join(reversed(names)), "object": text}
