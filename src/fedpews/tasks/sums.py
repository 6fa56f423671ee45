"""Sums over samples, and the metrics that can be read off them.

Sums of two parts add up to those of the whole, so a test set may be measured chunk by chunk, client by client, or at
sites that keep their samples. Areas under curves are made of histograms of the log-odds, fine enough that values
differ from those of the sorted samples by less than 0.001.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BINS = 4096
REACH = 16.0
"""Log-odds beyond ±16 share the outermost bins."""

CONFIDENCES = 15


def confusion(predicted: Tensor, labels: Tensor, width: int) -> Tensor:
    """(width, width) counts; rows are the true classes."""
    cells = labels.flatten() * width + predicted.flatten()
    return torch.bincount(cells, minlength=width * width).view(width, width)


def log_odds(outputs: Tensor) -> Tensor:
    """log p/(1−p) of each class, (samples, classes)."""
    p = torch.log_softmax(outputs.double(), 1)
    return p - torch.log1p(-p.exp().clamp_max(1 - 1e-12))


def ranks(odds: Tensor, truth: Tensor) -> Tensor:
    """(2, labels, BINS) counts of the log-odds, of samples without and with each label."""
    share = (odds.double().clamp(-REACH, REACH) + REACH) / (2 * REACH)
    place = (share * (BINS - 1)).round().long()
    width = odds.shape[1]
    cell = (truth.long() * width + torch.arange(width, device=odds.device)) * BINS + place
    return torch.bincount(cell.flatten(), minlength=2 * width * BINS).view(2, width, BINS)


def calibration(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(3, CONFIDENCES): samples, their summed confidence and right answers, by confidence."""
    confidence, predicted = probabilities.double().max(1)
    place = (confidence * CONFIDENCES).long().clamp_max(CONFIDENCES - 1)
    right = (predicted == labels).double()
    rows = [torch.ones_like(confidence), confidence, right]
    return torch.stack([torch.bincount(place, row, CONFIDENCES) for row in rows])


def accuracy(correct: Tensor, seen: Tensor) -> float:
    """Right answers over all; of tensors it would be single precision: 0.7 < 0.7."""
    return int(correct.sum()) / int(seen.sum()) if int(seen.sum()) else math.nan


def balanced_accuracy(correct: Tensor, seen: Tensor) -> float:
    """The mean recall of the classes that there are."""
    return mean_share(correct, seen)


def macro_f1(table: Tensor) -> float:
    """2·TP/(2·TP + FP + FN), the mean over the classes that there are or that were predicted."""
    right = table.diagonal()
    return mean_share(2 * right, table.sum(0) + table.sum(1))


def sensitivity(table: Tensor) -> float:
    """Recall: of class 1 when there are two classes, else the mean over the classes that there are."""
    right, seen = table.diagonal(), table.sum(1)
    return mean_share(right[1:], seen[1:]) if len(table) == 2 else mean_share(right, seen)


def specificity(table: Tensor) -> float:
    """TN/(TN + FP): of class 1 when there are two classes, else the mean over all classes."""
    negatives = table.sum() - table.sum(1)
    wrong = table.sum(0) - table.diagonal()
    part = slice(1, None) if len(table) == 2 else slice(None)
    return mean_share((negatives - wrong)[part], negatives[part])


def auroc(counts: Tensor) -> float:
    """The mean over labels that some samples have and some have not; ties count half."""
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


def mean_share(parts: Tensor, wholes: Tensor) -> float:
    """The mean of part/whole where there is a whole; NaN when there is none."""
    known = wholes > 0
    return float((parts[known].double() / wholes[known].double()).mean()) if bool(known.any()) else math.nan
