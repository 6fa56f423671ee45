"""What a model is trained for, and how it is evaluated: `make` gives a task by its name.

Names are imported when they are first used, so that a configuration is checked without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpews.tasks.classification import Classification
    from fedpews.tasks.dense import Segmentation, Tokens
    from fedpews.tasks.metrics import Metric
    from fedpews.tasks.multilabel import Multilabel
    from fedpews.tasks.regression import Regression
    from fedpews.tasks.task import Task, make

_MODULES = {
    "Classification": "classification",
    "Metric": "metrics",
    "Multilabel": "multilabel",
    "Regression": "regression",
    "Segmentation": "dense",
    "Task": "task",
    "Tokens": "dense",
    "make": "task",
}

__all__ = [
    "Classification",
    "Metric",
    "Multilabel",
    "Regression",
    "Segmentation",
    "Task",
    "Tokens",
    "make",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"fedpews.tasks.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'fedpews.tasks' has no attribute {name!r}")
