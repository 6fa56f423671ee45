"""What a task is: labels, a loss per sample, and the sums that its metrics need; and a task by its name."""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedpews.errors import ConfigError, first_line, nearest
from fedpews.options import Options
from fedpews.options import make as make_options
from fedpews.tasks.metrics import SCORES_AND_LABELS, Metric, Sums, Tallies, load_function, measure_function
from fedpews.tasks.names import TASKS, short
from fedpews.user_code import load_module

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Task(Options, ABC):
    """A learning task: loss, labels and metrics. Its fields are its options; the main metric is first in ``metrics``.

    Your own task is a subclass with ``loss``, ``labels`` and ``METRICS``, and ``tallies`` for further sums.

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
    """Replaces the task's own loss: (outputs, labels) -> one number per sample."""

    name: ClassVar[str]
    METRICS: ClassVar[Mapping[str, Metric]]
    ALWAYS: ClassVar[tuple[str, ...]] = ()
    """Sums that are computed whatever the metrics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for metric in self.metrics:
            if metric not in self.METRICS and ":" not in metric:
                raise ConfigError(f"{self.name} has no metric {metric!r}; {nearest(metric, self.METRICS)}")
        if not self.metrics:
            object.__setattr__(self, "metrics", (next(iter(self.METRICS), ""),))

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The training loss of each sample, (samples,)."""

    @abstractmethod
    def labels(self, y: Tensor, whose: str) -> Tensor:
        """Labels in the type of this task, or a ConfigError that says whose they are and what is wrong."""

    def weigh(self, labels: Tensor) -> Tensor | None:
        """The weight of each sample in a mean, (samples,); None where all weigh the same.

        A batch whose samples all have weight 0 (every pixel ignored) has loss 0 and moves nothing.
        """
        return None

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        """A function for each sum; only those that a chosen metric needs are called."""
        return {}

    def scores(self, outputs: Tensor) -> Tensor:
        """Outputs as a ``module:function`` metric takes them: probabilities where there are classes."""
        return outputs

    def width(self, y: Tensor) -> int:
        """The number of outputs that a model needs for these labels."""
        return 1

    def largest(self, y: Tensor) -> int | None:
        """The largest class among labels; None where labels are not classes."""
        return None

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        """What is wrong with a model's output shape (without the batch) for labels of a shape; "" if nothing is."""
        return ""

    def classes_of(self, y: Tensor) -> Tensor | None:
        """The class of each sample, for partitions by class; None where a sample does not have one class."""
        return None

    @cached_property
    def sample_loss(self) -> Criterion:
        """The loss per sample that is trained on."""
        return self.criterion or self.loss

    def sums(self, outputs: Tensor, labels: Tensor) -> Sums:
        """The sums over a batch that the chosen metrics need, with ``loss`` and ``weight``."""
        losses, weight = self.sample_loss(outputs, labels).double(), self.weigh(labels)
        weight = torch.ones_like(losses) if weight is None else weight.double()
        sums = {"loss": (losses * weight).sum(), "weight": weight.sum()}
        ways: dict[str, Callable[[], Tensor]] = {
            **self.tallies(outputs, labels),
            "kept_scores": lambda: self.scores(outputs),
            "kept_labels": lambda: labels,
        }
        sums |= {key: ways[key]() for key in self.sum_names if key not in sums}
        return {key: value.detach().cpu() for key, value in sums.items()}

    def measure(self, sums: Mapping[str, Tensor]) -> dict[str, float | None]:
        """Every chosen metric; None where the samples do not define it."""
        values = {}
        for name, metric in self._chosen.items():
            value = metric.value(*(sums[key] for key in metric.needs))
            values[name] = value if math.isfinite(value) else None
        return values

    @cached_property
    def sum_names(self) -> list[str]:
        """The names of the sums that the chosen metrics need."""
        needed = [key for metric in self._chosen.values() for key in metric.needs]
        return list(dict.fromkeys(["loss", "weight", *self.ALWAYS, *needed]))

    @cached_property
    def _chosen(self) -> dict[str, Metric]:
        """The chosen metrics by their names in a record."""
        return {
            short(name): self.METRICS.get(name) or Metric(SCORES_AND_LABELS, partial(measure_function, name))
            for name in self.metrics
        }


def per_sample(loss: Callable[..., Any]) -> Criterion:
    """Any loss as one number per sample, also one that returns the mean of a batch (``nn.MSELoss()``).

    >>> per_sample(torch.nn.L1Loss())(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))
    tensor([1., 3.])
    """

    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        values: Tensor = loss(outputs, labels)
        if values.dim() == 0:
            values = torch.vmap(lambda output, label: loss(output[None], label[None]))(outputs, labels)
        return values.flatten(1).mean(1) if values.dim() > 1 else values

    return losses


def make(
    task: str | Task = "classification",
    *,
    metrics: Sequence[str] = (),
    loss: Criterion | None = None,
    options: Mapping[str, Any] | None = None,
) -> Task:
    """A task by name, ``module:Class`` or ``path/to/file.py:Class``; or an object, with metrics and loss changed.

    Args:
        metrics: those to measure, the main one first; by default the task's first.
        loss: replaces the task's own: (outputs, labels) -> one number per sample, or a mean.

    >>> make("segmentation", metrics=["iou"], options={"ignore_index": 255}).ignore_index
    255
    """
    if isinstance(task, str):
        cls = task_class(task)
        task = make_options(cls, options or {}, "task.", f"task {task}")
    elif not isinstance(task, Task):
        raise ConfigError(f"task must be a name or a fedpews.tasks.Task; got {type(task).__name__}")
    changes: dict[str, Any] = {"metrics": tuple(metrics)} if metrics else {}
    if loss is not None:
        if not callable(loss):
            raise ConfigError(f"loss must be a function of (outputs, labels); got {type(loss).__name__}")
        changes["criterion"] = per_sample(loss)
    task = dataclasses.replace(task, **changes)
    for metric in task.metrics:
        # now, not after the first round was trained
        if ":" in metric:
            load_function(metric)
    return task


def task_class(name: str) -> type[Task]:
    """The class of a task's name."""
    module, colon, attribute = name.rpartition(":")
    if name in TASKS:
        module, colon, attribute = "fedpews.tasks.builtin", ":", name.capitalize()
    if not colon:
        raise ConfigError(f"there is no task {name!r}; {nearest(name, TASKS)} (Your own: module:Class.)")
    try:
        cls = getattr(load_module(module), attribute, None)
    except Exception as error:  # whatever the user's own file raises
        raise ConfigError(f"task {name!r} cannot be loaded: {first_line(error)}") from error
    if not isinstance(cls, type) or not issubclass(cls, Task):
        raise ConfigError(f"task {name!r}: {module!r} has no subclass {attribute!r} of fedpews.tasks.Task")
    return cls


def describe_tasks() -> list[tuple[str, str]]:
    """Every task's name with the first line of its docstring and its metrics."""
    classes = {name: task_class(name) for name in TASKS}
    return [
        (name, f"{(inspect.getdoc(cls) or '').splitlines()[0]} Metrics: {', '.join(cls.METRICS)}.")
        for name, cls in classes.items()
    ]
