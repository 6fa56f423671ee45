"""What a model is trained for, and how it is evaluated: `make` gives a task by its name.

Names are imported when they are first used, so that a configuration is checked without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpews.tasks.builtin import Classification, Multilabel, Regression, Segmentation, Tokens
    from fedpews.tasks.metrics import Metric
    from fedpews.tasks.task import Task, make

__all__ = ["Classification", "Metric", "Multilabel", "Regression", "Segmentation", "Task", "Tokens", "make"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedpews.tasks' has no attribute {name!r}")
    module = {"Metric": "metrics", "Task": "task", "make": "task"}.get(name, "builtin")
    return getattr(import_module(f"fedpews.tasks.{module}"), name)
