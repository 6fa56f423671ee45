"""The tables of a configuration that fit a user's own data."""

from __future__ import annotations

from typing import Any

from fedpews.data.client_files import UnequalSizes
from fedpews.data.federation import Federation
from fedpews.data.loading import load
from fedpews.errors import ConfigError
from fedpews.tasks import Regression

LARGEST = 64
"""The size that images of unequal sizes get at most: more is slow on a CPU."""


def fit(name: str) -> tuple[Federation, dict[str, dict[str, Any]]]:
    """Read ``folder:PATH`` or ``module:function``: its data, and tables with its task, model and image size."""
    options: dict[str, Any] = {}
    task = {}
    try:
        try:
            data = load(name)
        except UnequalSizes as unequal:
            options["image_size"] = min(unequal.side, LARGEST)
            data = load(name, **options)
    except ConfigError as error:
        # fractions are targets of regression; if that fails too, the first error is the one to report
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
    return data, {**tables, "task": task} if task else tables
