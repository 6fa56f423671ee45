"""Metrics: sums over samples, and the numbers that are computed from them.

The sums of two shares of a test set add up to those of the whole, so it may be evaluated chunk by chunk, client by
client, or at sites that keep their samples. Areas under curves are computed from histograms of the log-odds and differ
by less than 0.001 from those of the sorted samples. A ``module:function`` metric needs every score and label instead.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedpews.errors import ConfigError, first_line, need_extra
from fedpews.user_code import load_named

BINS = 4096
REACH = 16.0
"""Log-odds beyond ±16 share the outermost bins."""

CONFIDENCES = 15

SCORES_AND_LABELS = ("kept_scores", "kept_labels")
"""The names under which all scores and labels are kept for a ``module:function`` metric."""

Sums = dict[str, Tensor]
"""Sums over some samples, by name."""

Tallies = Mapping[str, Callable[[], Tensor]]
"""A function for each sum, called if a metric needs it."""


@dataclass(frozen=True)
class Metric:
    """A number computed from sums.

    Args:
        needs: the names of the sums, in the order in which ``value`` takes them.
        value: from the sums to the number; NaN where it is undefined (a class without samples).
    """

    needs: tuple[str, ...]
    value: Callable[..., float]


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Sums:
    """The sums over two sets of samples together; kept scores and labels are concatenated."""
    return {key: torch.cat([a[key], b[key]]) if key.startswith("kept_") else a[key] + b[key] for key in a}


def count_classes(predicted: Tensor, labels: Tensor, width: int) -> Tallies:
    """Of each of ``width`` classes the correct and all labels, and the confusion table; its rows are the labels."""
    cells = labels * width + predicted
    return {
        "correct": lambda: torch.bincount(labels[predicted == labels], minlength=width),
        "seen": lambda: torch.bincount(labels, minlength=width),
        "confusion": lambda: torch.bincount(cells, minlength=width * width).view(width, width),
    }


def log_odds(outputs: Tensor) -> Tensor:
    """log p/(1−p) of each class, (samples, classes)."""
    p = torch.log_softmax(outputs.double(), 1)
    return p - torch.log1p(-p.exp().clamp_max(1 - 1e-12))


def ranks(odds: Tensor, truth: Tensor) -> Tensor:
    """(2, labels, BINS) counts of the log-odds, of samples without and with each label."""
    share = (odds.double().clamp(-REACH, REACH) + REACH) / (2 * REACH)
    index = (share * (BINS - 1)).round().long()
    width = odds.shape[1]
    cell = (truth.long() * width + torch.arange(width, device=odds.device)) * BINS + index
    return torch.bincount(cell.flatten(), minlength=2 * width * BINS).view(2, width, BINS)


def calibration(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(3, CONFIDENCES): samples, their summed confidence and correct answers, by confidence."""
    confidence, predicted = probabilities.double().max(1)
    index = (confidence * CONFIDENCES).long().clamp_max(CONFIDENCES - 1)
    right = (predicted == labels).double()
    rows = [torch.ones_like(confidence), confidence, right]
    return torch.stack([torch.bincount(index, row, CONFIDENCES) for row in rows])


def accuracy(correct: Tensor, seen: Tensor) -> float:
    """Correct answers over all."""
    # of Python's numbers: tensors would divide in single precision, where 0.7 < 0.7
    return int(correct.sum()) / int(seen.sum()) if int(seen.sum()) else math.nan


def macro_f1(table: Tensor) -> float:
    """2·TP/(2·TP + FP + FN), the mean over the classes that occur or are predicted."""
    right = table.diagonal()
    return mean_share(2 * right, table.sum(0) + table.sum(1))


def sensitivity(table: Tensor) -> float:
    """Recall: of class 1 when there are two classes, else the mean over the classes that occur."""
    right, seen = table.diagonal(), table.sum(1)
    return mean_share(right[1:], seen[1:]) if len(table) == 2 else mean_share(right, seen)


def specificity(table: Tensor) -> float:
    """TN/(TN + FP): of class 1 when there are two classes, else the mean over all classes."""
    negatives = table.sum() - table.sum(1)
    wrong = table.sum(0) - table.diagonal()
    classes = slice(1, None) if len(table) == 2 else slice(None)
    return mean_share((negatives - wrong)[classes], negatives[classes])


def auroc(counts: Tensor) -> float:
    """The mean over the labels that some samples have and some do not; ties count half."""
    without, having = counts.double()
    below = without.cumsum(1) - without
    won = (having * (below + without / 2)).sum(1)
    return mean_share(won, having.sum(1) * without.sum(1))


def auprc(counts: Tensor) -> float:
    """Average precision, the mean over the labels that some samples have."""
    without, having = counts.double().flip(2)
    hits = having.cumsum(1)
    precision = hits / (hits + without.cumsum(1)).clamp_min(1)
    return mean_share((precision * having).sum(1), having.sum(1))


def calibration_error(table: Tensor) -> float:
    """Mean difference of confidence and accuracy over 15 bins of confidence."""
    samples, confidence, right = table
    return float((confidence - right).abs().sum() / samples.sum())


def mean_share(numerators: Tensor, denominators: Tensor) -> float:
    """The mean of the fractions whose denominator is above 0; NaN when there are none."""
    known = denominators > 0
    fractions = numerators[known].double() / denominators[known].double()
    return float(fractions.mean()) if bool(known.any()) else math.nan


def measure_function(name: str, scores: Tensor, labels: Tensor) -> float:
    """The value of ``module:function``, called with (scores, labels) and the sizes that its signature has."""
    function = load_function(name)
    width = scores.shape[1] if scores.dim() > 1 else 1
    known = inspect.signature(function).parameters
    sizes = {key: width for key in ("num_classes", "num_labels", "num_outputs") if key in known}
    try:
        return float(function(scores, labels, **sizes))
    except Exception as error:
        raise ConfigError(f"metric {name!r} fails: {first_line(error)}") from error


@cache
def load_function(name: str) -> Any:
    """The function of a ``module:function`` metric, such as those of torchmetrics' functional API."""
    if name.startswith("torchmetrics"):
        need_extra("metrics", "torchmetrics", f"metric {name!r}")
    try:
        return load_named(name)
    except Exception as error:
        raise ConfigError(f"metric {name!r} cannot be loaded: {first_line(error)}") from error
