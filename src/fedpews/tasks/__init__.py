"""The tasks room: what a model is trained for, and how it is evaluated.

`make` is the way in by name. Names are imported when they are first used, so that a configuration can be checked
without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpews.tasks.classification import Classification
    from fedpews.tasks.contract import Metric, Task
    from fedpews.tasks.making import make
    from fedpews.tasks.multilabel import Multilabel
    from fedpews.tasks.regression import Regression
    from fedpews.tasks.segmentation import Segmentation
    from fedpews.tasks.tokens import Tokens

_HOMES = {
    "Classification": "classification",
    "Metric": "contract",
    "Multilabel": "multilabel",
    "Regression": "regression",
    "Segmentation": "segmentation",
    "Task": "contract",
    "Tokens": "tokens",
    "make": "making",
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
    if name in _HOMES:
        return getattr(import_module(f"fedpews.tasks.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedpews.tasks' has no attribute {name!r}")
