"""Metrics that are no sums: any function of all scores and labels, such as those of torchmetrics' functional API."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import Tensor

from fedpews.errors import ConfigError, first_line, need_extra
from fedpews.user_code import load_named

KEPT = ("kept_scores", "kept_labels")
"""The names under which a test set's scores and labels are kept for such a metric."""


def measure_foreign(name: str, scores: Tensor, labels: Tensor) -> float:
    """The value of ``module:function``, called with (scores, labels) and the sizes that its signature asks for."""
    function = find_foreign(name)
    width = scores.shape[1] if scores.dim() > 1 else 1
    offered = {"num_classes": width, "num_labels": width, "num_outputs": width}
    known = inspect.signature(function).parameters
    given = {key: value for key, value in offered.items() if key in known}
    try:
        return float(function(scores, labels, **given))
    except Exception as error:
        raise ConfigError(f"metric {name!r} fails: {first_line(error)}") from error


@cache
def find_foreign(name: str) -> Any:
    """The function behind ``module:function``."""
    if name.startswith("torchmetrics"):
        need_extra("metrics", "torchmetrics", f"metric {name!r}")
    try:
        return load_named(name)
    except Exception as error:
        raise ConfigError(f"metric {name!r} cannot be loaded: {first_line(error)}") from error
