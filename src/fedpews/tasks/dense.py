"""Tasks with a class for every pixel or token: which places count, and how many classes there are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedpews.tasks.contract import Task


@dataclass(frozen=True, kw_only=True)
class Dense(Task):
    """A task whose labels are a class for every pixel or token; those with ``ignore_index`` do not count."""

    classes: int | None = None
    ignore_index: int = -100

    def width(self, y: Tensor) -> int:
        return self.classes or (self.largest(y) or 0) + 1

    def largest(self, y: Tensor) -> int | None:
        counted = y[y != self.ignore_index]
        return int(counted.max()) if counted.numel() else None
