"""The one aggregation core: element by element, over the clients that own the element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpews.trees import Tree


@dataclass(frozen=True)
class Average:
    """Σ p_i m_i y_i / Σ p_i m_i; an element nobody owns keeps its old value.

    >>> average = Average((1.0, 1.0), ({"w": torch.tensor([True, False])}, None))
    >>> average([{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([3.0, 3.0])}], {"w": torch.zeros(2)})
    {'w': tensor([2., 3.])}
    """

    weights: tuple[float, ...]  # p_i, not necessarily summing to one
    masks: tuple[Mapping[str, Tensor] | None, ...]  # m_i; None owns everything, as does a name the mask lacks

    def __call__(self, values: Sequence[Mapping[str, Tensor]], old: Mapping[str, Tensor]) -> Tree:
        result = {}
        for name, kept in old.items():
            shares = [self._share(i, name, kept) for i in range(len(values))]
            total = torch.stack([share.expand_as(kept) for share in shares]).sum(0)
            # zeros where not owned, so that a value that was never sent (or is garbage there) cannot leak in
            parts = [
                torch.where(share > 0, share * value[name], 0.0)
                for share, value in zip(shares, values, strict=True)
            ]
            mean = torch.stack(parts).sum(0) / total.clamp_min(torch.finfo(total.dtype).tiny)
            result[name] = torch.where(total > 0, mean, kept)
        return result

    def covered(self, old: Mapping[str, Tensor]) -> Tree:
        """Which elements at least one client owns."""
        return {
            name: torch.stack(
                [self._share(i, name, kept).expand_as(kept) for i in range(len(self.masks))]
            ).sum(0)
            > 0
            for name, kept in old.items()
        }

    def _share(self, i: int, name: str, like: Tensor) -> Tensor:
        mask = self.masks[i]
        share = torch.tensor(self.weights[i], dtype=like.dtype, device=like.device)
        return share if mask is None or name not in mask else share * mask[name].to(like.dtype)
