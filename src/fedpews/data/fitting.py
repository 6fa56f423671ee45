"""A configuration's tables that fit somebody's own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedpews.data.client_files import UnequalSizes
from fedpews.data.federation import Federation
from fedpews.data.loading import load
from fedpews.errors import ConfigError
from fedpews.tasks import Regression

LARGEST = 64
"""What images of unequal sizes are brought to at most: more is slow on a CPU."""


@dataclass(frozen=True)
class Fit:
    """Own data as they are, and what a configuration says of them."""

    data: Federation
    tables: dict[str, dict[str, Any]]


def fit(name: str) -> Fit:
    """Read ``folder:PATH`` or ``module:function`` and choose its task, its model and the size of its images."""
    options: dict[str, Any] = {}
    task = {}
    try:
        try:
            data = load(name)
        except UnequalSizes as unequal:
            options["image_size"] = min(unequal.side, LARGEST)
            data = load(name, **options)
    except ConfigError as error:
        # targets that are fractions are no classes; any other fault is the one to hear of
        try:
            data = load(name, task=Regression(), **options)
        except ConfigError:
            raise error from None
        task = {"name": "regression"}
    if data.class_names:
        options["classes"] = list(data.class_names)
    shape = data.shape
    # cnn halves an image three times
    images = isinstance(shape, tuple) and len(shape) == 3 and min(shape[1:]) >= 8
    tables = {"data": {"name": name, **options}, "model": {"name": "cnn" if images else "mlp"}}
    return Fit(data, {**tables, "task": task} if task else tables)
