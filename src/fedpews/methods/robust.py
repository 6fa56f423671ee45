"""Robust averages, which a few bad clients cannot move far, over the clients that own each element.

- ``median``: of the owners' values (Yin et al. 2018);
- ``trimmed``: their mean without a share at each end (same paper);
- ``krum``: the mean of the clients closest to each other (Multi-Krum, Blanchard et al. 2017);
- ``clipped``: the mean, with every client's change clipped to the median norm.

During a warmup an element may have one owner only, or two; nothing can tell which of two is right. They help where
several clients own what is attacked, and after the warmup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import Upload
from fedpews.trees import Tree

Mask = Mapping[str, Tensor] | None
Rule = Literal["median", "trimmed", "krum", "clipped"]


def make_robust(
    average: Average, uploads: Sequence[Upload], rule: Rule, trim: float = 0.2, byzantine: int | None = None
) -> Average:
    """The average to use in place of the plain one.

    Args:
        trim: with ``trimmed``, the share left out at each end, below one half.
        byzantine: with ``krum``, how many clients may be bad; by default the largest possible number, (n − 3)/2.
    """
    if rule == "krum":
        chosen = choose_krum(uploads, average.masks, byzantine)
        weights = tuple(weight if i in chosen else 0.0 for i, weight in enumerate(average.weights))
        return Average(weights, average.masks)
    return RobustAverage(average.weights, average.masks, rule=rule, trim=trim)


@dataclass(frozen=True)
class RobustAverage(Average):
    """Median, trimmed mean or clipped mean. The first two count every owner alike, whatever its weight.

    >>> average = RobustAverage((1.0, 1.0, 1.0), (None, None, {"w": torch.tensor([False])}), rule="median")
    >>> average([{"w": torch.tensor([v])} for v in (1.0, 2.0, 1e30)], {"w": torch.zeros(1)})
    {'w': tensor([1.5000])}
    """

    rule: Rule = "median"
    trim: float = 0.2

    def __call__(self, values: Sequence[Mapping[str, Tensor]], old: Mapping[str, Tensor]) -> Tree:
        if not old:
            return {}
        if self.rule == "clipped":
            return super().__call__(clip(values, self.masks, old), old)
        result = {}
        for name, kept in old.items():
            owned = torch.stack([_owned(mask, name, kept) for mask in self.masks])  # (clients, ...)
            stacked = torch.stack([value[name] for value in values])
            # clients that do not own the element sort behind all others, and are not counted
            ordered = torch.where(owned, stacked, torch.inf).sort(dim=0).values
            owners = owned.sum(0)
            middle = _middle(ordered, owners, 0.5 if self.rule == "median" else self.trim)
            result[name] = torch.where(owners > 0, middle.to(kept.dtype), kept)
        return result


def clip(
    values: Sequence[Mapping[str, Tensor]], masks: Sequence[Mask], old: Mapping[str, Tensor]
) -> list[Tree]:
    """The values with each client's change, over what it owns, cut to the length of the median client's."""
    changes = [
        {name: torch.where(_owned(mask, name, kept), value[name] - kept, 0.0) for name, kept in old.items()}
        for value, mask in zip(values, masks, strict=True)
    ]
    squares = [torch.stack([value.double().pow(2).sum() for value in tree.values()]) for tree in changes]
    lengths = torch.stack([square.sum() for square in squares]).sqrt()
    limit = lengths.median()  # of an even number the lower one
    scales = (limit / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)).clamp(max=1.0)
    return [
        {name: kept + (scale * change[name]).to(kept.dtype) for name, kept in old.items()}
        for change, scale in zip(changes, scales, strict=True)
    ]


def choose_krum(uploads: Sequence[Upload], masks: Sequence[Mask], byzantine: int | None = None) -> list[int]:
    """The indices of the n − f uploads with the smallest distance to their n − f − 2 nearest.

    The distance of two uploads is the mean squared difference of the elements both own.
    """
    count = len(uploads)
    bad = max((count - 3) // 2, 0) if byzantine is None else byzantine
    if count < 2 * bad + 3:
        raise ConfigError(
            f"krum tolerates {bad} bad clients among at least {2 * bad + 3}, and this round has {count}; "
            "lower train.byzantine or use train.aggregate = 'median'"
        )
    distances = torch.zeros(count, count, dtype=torch.float64)
    for a in range(count):
        for b in range(a):
            distances[a, b] = distances[b, a] = _distance(uploads[a], uploads[b], masks[a], masks[b])
    nearest = distances.sort(dim=1).values[:, 1 : count - bad - 1]  # without oneself
    return sorted(nearest.sum(1).argsort(stable=True)[: count - bad].tolist())


def _middle(ordered: Tensor, owners: Tensor, part: float) -> Tensor:
    """The mean of the sorted values without a share at each end; at least one or two remain."""
    drop = torch.minimum((part * owners).floor().long(), (owners - 1).clamp_min(0) // 2)
    index = torch.arange(len(ordered), device=ordered.device).view(-1, *[1] * owners.dim())
    kept = (index >= drop) & (index < owners - drop)
    total = torch.where(kept, ordered, 0.0).double().sum(0)
    return total / kept.sum(0).clamp_min(1)


def _distance(a: Upload, b: Upload, mask_a: Mask, mask_b: Mask) -> float:
    total, count = 0.0, 0
    for name, value in a.params.items():
        both = _owned(mask_a, name, value) & _owned(mask_b, name, value)
        difference = torch.where(both, value.double() - b.params[name].double(), 0.0)
        total, count = total + float(difference.pow(2).sum()), count + int(both.sum())
    return total / max(count, 1)


def _owned(mask: Mask, name: str, like: Tensor) -> Tensor:
    if mask is None or name not in mask:
        return torch.ones_like(like, dtype=torch.bool)
    return mask[name].bool().expand_as(like)
