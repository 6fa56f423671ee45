"""What a task is: from a model's outputs to a loss per sample, and to sums that metrics are made of."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedpews.errors import ConfigError, nearest
from fedpews.tasks import names
from fedpews.tasks.foreign import KEPT, measure_foreign

Sums = dict[str, Tensor]
"""Over some samples. Those of two parts of a test set are added entry by entry, whoever holds the parts."""

Criterion = Callable[[Tensor, Tensor], Tensor]
Tallies = Mapping[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Metric:
    """A number made of sums.

    Args:
        needs: the names of the sums, in the order in which ``value`` takes them.
        value: from the sums to the number; NaN where it is undefined (a class that nobody has).
    """

    needs: tuple[str, ...]
    value: Callable[..., float]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A kind of problem. Its fields are its options; ``metrics`` are the names of those to measure, the first one
    counting.

    Your own is a subclass: ``loss``, ``labels``, ``tallies`` and ``METRICS`` are all it needs.

    >>> class Quantile(Task):
    ...     name = "quantile"
    ...     METRICS = {"pinball_loss": Metric(("loss", "weight"), lambda loss, weight: float(loss / weight))}
    ...     def loss(self, outputs, labels):
    ...         error = labels - outputs.squeeze(1)
    ...         return torch.maximum(0.75 * error, -0.25 * error)
    ...     def labels(self, y, whose):
    ...         return y.float()
    >>> task = Quantile()
    >>> task.measure(task.sums(torch.zeros(2, 1), torch.tensor([1.0, -1.0])))
    {'pinball_loss': 0.5}
    """

    metrics: tuple[str, ...] = ()
    criterion: Criterion | None = None
    """In the place of the task's own loss: (outputs, labels) -> one number per sample."""

    name: ClassVar[str]
    METRICS: ClassVar[Mapping[str, Metric]]
    ALWAYS: ClassVar[tuple[str, ...]] = ()
    """Sums that are kept whatever the metrics."""

    def __post_init__(self) -> None:
        for metric in self.metrics:
            if metric not in self.METRICS and ":" not in metric:
                raise ConfigError(f"{self.name} has no metric {metric!r}; {nearest(metric, self.METRICS)}")
        if not self.metrics:
            first = names.FIRST.get(self.name, next(iter(self.METRICS), ""))
            object.__setattr__(self, "metrics", (first,))

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The training loss of each sample, (samples,)."""

    @abstractmethod
    def labels(self, y: Tensor, whose: str) -> Tensor:
        """Labels as this task wants them, or a ConfigError that names ``whose`` they are and what is wrong."""

    def weigh(self, labels: Tensor) -> Tensor | None:
        """How much each sample weighs in a mean, (samples,); None where all weigh the same.

        A batch whose samples all weigh nothing (every pixel ignored) has loss 0 and moves nothing.
        """
        return None

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        """How to make each sum; only those that a chosen metric needs are made."""
        return {}

    def scores(self, outputs: Tensor) -> Tensor:
        """Outputs as a third-party metric wants them: probabilities where there are classes."""
        return outputs

    def width(self, y: Tensor) -> int:
        """How many outputs a model needs for these labels."""
        return 1

    def largest(self, y: Tensor) -> int | None:
        """The largest class among labels; None where labels are no classes."""
        return None

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        """What is wrong with a model's output shape (without the batch) for labels of a shape; "" if nothing is."""
        return ""

    def classes_of(self, y: Tensor) -> Tensor | None:
        """The one class of each sample, for partitions by class; None where a sample has none."""
        return None

    def sample_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss per sample that is trained on."""
        return (self.criterion or self.loss)(outputs, labels)

    def sums(self, outputs: Tensor, labels: Tensor) -> Sums:
        """The sums over a batch that the chosen metrics need, with ``loss`` and ``weight``."""
        losses, weight = self.sample_loss(outputs, labels).double(), self.weigh(labels)
        if weight is None:
            found = {"loss": losses.sum(), "weight": torch.tensor(float(len(losses)), dtype=torch.float64)}
        else:
            found = {"loss": (losses * weight).sum(), "weight": weight.double().sum()}
        ways = {**self.tallies(outputs, labels), **self._keep(outputs, labels)}
        found |= {key: ways[key]() for key in self.sum_names() if key not in found}
        return {key: value.detach().cpu() for key, value in found.items()}

    def measure(self, sums: Mapping[str, Tensor]) -> dict[str, float | None]:
        """Every chosen metric; None where the samples do not define it."""
        values = {
            metric: measure_foreign(metric, *(sums[key] for key in KEPT))
            if metric not in self.METRICS
            else self.METRICS[metric].value(*(sums[key] for key in self.METRICS[metric].needs))
            for metric in self.metrics
        }
        return {
            names.short(metric): value if math.isfinite(value) else None for metric, value in values.items()
        }

    def _keep(self, outputs: Tensor, labels: Tensor) -> Tallies:
        return dict(zip(KEPT, (lambda: self.scores(outputs), lambda: labels), strict=True))

    def sum_names(self) -> list[str]:
        """What ``sums`` has for the chosen metrics."""
        wanted = ["loss", "weight", *self.ALWAYS]
        for metric in self.metrics:
            wanted += self.METRICS[metric].needs if metric in self.METRICS else KEPT
        return list(dict.fromkeys(wanted))


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Sums:
    """The sums over two parts together; what is kept sample by sample is put one behind the other."""
    return {key: torch.cat([a[key], b[key]]) if key.startswith("kept_") else a[key] + b[key] for key in a}


def per_sample(loss: Callable[..., Any]) -> Criterion:
    """Any loss as one number per sample, also one that returns the mean of a batch (``nn.MSELoss()``).

    >>> per_sample(torch.nn.L1Loss())(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))
    tensor([1., 3.])
    """

    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = loss(outputs, labels)
        if found.dim() == 0:
            found = torch.vmap(lambda one, label: loss(one[None], label[None]))(outputs, labels)
        return found.flatten(1).mean(1) if found.dim() > 1 else found

    return losses
