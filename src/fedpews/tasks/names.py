"""The names of tasks, metrics and classes, without torch, so that a configuration is checked quickly."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedpews.errors import ConfigError

TASKS = {
    "classification": "accuracy",
    "multilabel": "auroc",
    "regression": "mae",
    "segmentation": "dice",
    "tokens": "accuracy",
}
"""The tasks of `fedpews.tasks.builtin`, and the main metric of each by default."""

LOWER_IS_BETTER = {"calibration_error", "loss", "mae", "mse", "perplexity", "rmse", "train_loss"}

UNBOUNDED = {"loss", "mae", "mse", "perplexity", "r2", "rmse", "train_loss"}
"""Metrics that are not shown in percent."""

LIST = "data.classes"
"""The key of the list of all classes."""


def higher_is_better(metric: str) -> bool:
    """Whether a metric is to rise, by its name; your own that is to fall ends in ``_loss`` or ``_error``.

    >>> higher_is_better("auroc"), higher_is_better("mae"), higher_is_better("pinball_loss")
    (True, False, False)
    """
    return metric not in LOWER_IS_BETTER and not metric.endswith(("_loss", "_error"))


def is_share(metric: str) -> bool:
    """Whether a metric is between 0 and 1 and shown in percent."""
    return metric not in UNBOUNDED and not metric.endswith("_loss")


def show(metric: str, value: float | None) -> str:
    """A value in words.

    >>> show("accuracy", 0.5), show("mae", 1.23456), show("auroc", None)
    ('50.0 %', '1.235', 'undefined')
    """
    if value is None:
        return "undefined"
    return f"{100 * value:.1f} %" if is_share(metric) else f"{value:.4g}"


def short(metric: str) -> str:
    """The name of a metric in a record.

    >>> short("accuracy"), short("torchmetrics.functional.classification:binary_cohen_kappa")
    ('accuracy', 'binary_cohen_kappa')
    """
    return metric.rpartition(":")[2]


@dataclass(frozen=True)
class Goal:
    """A metric, and the value that a run is to reach, if there is one."""

    metric: str = "accuracy"
    value: float | None = None

    @property
    def higher_is_better(self) -> bool:
        return higher_is_better(self.metric)

    def is_reached(self, value: float | None) -> bool:
        """Whether a value is as good as the goal.

        >>> Goal("mae", 0.5).is_reached(0.4), Goal("accuracy", 0.5).is_reached(0.4), Goal("mae").is_reached(0)
        (True, False, False)
        """
        if value is None or self.value is None:
            return False
        return value >= self.value if self.higher_is_better else value <= self.value

    def better(self, value: float, other: float) -> bool:
        """Whether a value is better than another."""
        return value > other if self.higher_is_better else value < other

    def __str__(self) -> str:
        return f"{self.metric} {show(self.metric, self.value)}" if self.value is not None else self.metric


def check_spellings(by_client: Mapping[str, Collection[str]]) -> None:
    """Refuse names that differ only in case, spaces or Unicode form: whether they are one class is not guessed.

    Args:
        by_client: the class names of each client.

    >>> check_spellings({"north": ["cnv"], "south": ["CNV"]})
    Traceback (most recent call last):
    ...
    fedpews.errors.ConfigError: classes 'cnv' (north) and 'CNV' (south) differ only in case or spaces; use one name.
    """
    spellings: dict[str, dict[str, list[str]]] = {}
    for client, names in by_client.items():
        for name in names:
            plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
            spellings.setdefault(plain, {}).setdefault(name, []).append(client)
    for ways in spellings.values():
        if len(ways) > 1:
            shown = " and ".join(f"{name!r} ({', '.join(names)})" for name, names in ways.items())
            raise ConfigError(f"classes {shown} differ only in case or spaces; use one name.")


def check_listed(by_client: Mapping[str, Collection[str]], classes: Sequence[str], where: str = LIST) -> None:
    """Refuse a name that is not in the list of all classes; the error shows both lists."""
    check_spellings({where: classes, **by_client})
    for client, names in by_client.items():
        unknown = sorted(set(names) - set(classes))
        if unknown:
            raise ConfigError(
                f"class {unknown[0]!r} is not in {where}: {client} has {', '.join(sorted(names))}; {where} has "
                f"{', '.join(classes)}."
            )


def check_list(classes: Sequence[str], counts: Mapping[str, int | None]) -> None:
    """Refuse a list of all classes that contradicts itself, or the number of classes in another table."""
    check_spellings({LIST: classes})
    if not classes or len(set(classes)) < len(classes) or not all(name.strip() for name in classes):
        raise ConfigError(f"{LIST} must name every class exactly once")
    for table, count in counts.items():
        if count not in (None, len(classes)):
            raise ConfigError(
                f"{table}.classes is {count}, but {LIST} has {len(classes)} names; leave {table}.classes out"
            )
