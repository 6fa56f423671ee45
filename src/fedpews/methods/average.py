"""The one aggregation core: element by element, over the clients that own the element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import torch
from torch import Tensor

from fedpews.trees import Tree, count_true, keep, stack

BLOCK = 32
"""Clients that are summed in one go. Sums of blocks are added in the cohort's order, ``BLOCK`` at a time again, so
the tree of additions is a function of the cohort's size alone: whoever holds whole blocks (a process, a site's
gateway) may sum them by itself, and the numbers stay the same to the bit."""


@dataclass(frozen=True)
class Sums:
    """Σ p_i m_i y_i and Σ p_i m_i over some clients: all that their average needs to know of them.

    >>> one, two = (Sums({"w": torch.tensor([y])}, {"w": torch.tensor([1.0])}) for y in (2.0, 4.0))
    >>> Sums.join([one, two]).mean({"w": torch.zeros(1)})
    {'w': tensor([3.])}
    """

    values: Tree  # Σ p_i m_i y_i
    shares: Tree  # Σ p_i m_i, in a shape that broadcasts against the value

    @classmethod
    def join(cls, blocks: Sequence[Sums]) -> Sums:
        """The sums of consecutive blocks of clients, as one."""
        names = blocks[0].values
        return cls(
            {name: add_blocks([block.values[name] for block in blocks]) for name in names},
            {name: add_blocks([block.shares[name] for block in blocks]) for name in names},
        )

    def mean(self, old: Mapping[str, Tensor]) -> Tree:
        """The average; an element nobody owns keeps its old value."""
        result = {}
        for name, kept in old.items():
            total = self.shares[name]
            # torch.where computes both sides: no 0 / 0 where nobody owns
            mean = self.values[name] / total.clamp_min(torch.finfo(total.dtype).tiny)
            result[name] = torch.where(total > 0, mean, kept)
        return result


@dataclass(frozen=True)
class Average:
    """Σ p_i m_i y_i / Σ p_i m_i; an element nobody owns keeps its old value.

    >>> average = Average((1.0, 1.0), ({"w": torch.tensor([True, False])}, None))
    >>> average([{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([3.0, 3.0])}], {"w": torch.zeros(2)})
    {'w': tensor([2., 3.])}
    """

    weights: tuple[float, ...]  # p_i, not necessarily summing to one
    masks: tuple[Mapping[str, Tensor] | None, ...]  # m_i; None owns everything, as does a name the mask lacks
    zero_unowned: bool = field(default=False, kw_only=True)
    """Whether the server's step moves an element that nobody owns to zero, instead of leaving it as it is."""
    _known: dict[tuple[str, torch.dtype], tuple[Tensor | None, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def _is_plain(self) -> bool:
        """Whether everybody owns everything, with equal weights."""
        return not any(self.masks) and set(self.weights) == {1.0}

    def __call__(self, values: Sequence[Mapping[str, Tensor]], old: Mapping[str, Tensor]) -> Tree:
        return self.sums(values, old).mean(old)

    def sums(self, values: Sequence[Mapping[str, Tensor]], like: Mapping[str, Tensor]) -> Sums:
        """The two sums over the clients' values, a block of clients at a time: memory does not grow with them."""
        added, totals = {}, {}
        for name, kept in like.items():
            shares, totals[name] = self._shares(name, kept)
            blocks = []
            for first in range(0, len(values), BLOCK):
                # (clients of the block, *shape of the parameter)
                stacked = stack([value[name] for value in values[first : first + BLOCK]])
                if shares is not None:
                    share = shares[first : first + BLOCK]
                    # equal weights leave the shares boolean, and nothing to multiply by
                    owned = share if share.dtype == torch.bool else share > 0
                    # zeros where not owned, so that a value that was never sent (or is garbage there) cannot leak in
                    stacked = keep(owned, stacked if owned is share else share * stacked)
                blocks.append(stacked.sum(0))
            added[name] = add_blocks(blocks)
        return Sums(added, totals)

    def covered(self, old: Mapping[str, Tensor]) -> Tree:
        """Which elements at least one client owns."""
        return {name: (self._shares(name, kept)[1] > 0).expand_as(kept) for name, kept in old.items()}

    def _shares(self, name: str, like: Tensor) -> tuple[Tensor | None, Tensor]:
        """p_i m_i of every client, (clients, ...), and their sum; both broadcast against the tensor.

        None is one for everybody, booleans are ones and zeros. Kept, since an average is often asked for a second
        time: the server's step wants to know what was covered.
        """
        key = name, like.dtype
        if key not in self._known and self._is_plain:
            total = torch.full([1] * like.dim(), len(self.weights), dtype=like.dtype, device=like.device)
            self._known[key] = None, total
        if key not in self._known:
            # one object stands for all that is not masked, so that identity tells whether anything is
            everything = torch.ones((), dtype=torch.bool, device=like.device)
            masks = [everything if mask is None else mask.get(name, everything) for mask in self.masks]
            masked, weighted = set(map(id, masks)) != {id(everything)}, set(self.weights) != {1.0}
            shares = torch.ones((), dtype=torch.bool, device=like.device).expand(
                len(masks), *[1] * like.dim()
            )
            if masked:
                # masks of different shapes are brought to one that fits all, and the tensor
                alike = all(mask.shape == masks[0].shape for mask in masks)
                stacked = stack(masks if alike else torch.broadcast_tensors(*masks))
                missing = [1] * (like.dim() + 1 - stacked.dim())
                shares = stacked.reshape(len(masks), *missing, *stacked.shape[1:])
                shares = shares if shares.dtype == torch.bool else shares != 0
            if weighted:
                weights = torch.tensor(self.weights, dtype=like.dtype, device=like.device)
                shares = weights.view(-1, *[1] * like.dim()) * shares
            total = add_blocks(
                [
                    count_true(part, like.dtype) if part.dtype == torch.bool else part.sum(0)
                    for part in shares.split(BLOCK)
                ]
            )
            self._known[key] = shares if masked or weighted else None, total
        return self._known[key]


def add_blocks(sums: Sequence[Tensor]) -> Tensor:
    """Sums of consecutive blocks added in their order, ``BLOCK`` of them at a time."""
    while len(sums) > 1:
        sums = [reduce(torch.add, sums[first : first + BLOCK]) for first in range(0, len(sums), BLOCK)]
    return sums[0]
