"""The masked average: every element is averaged over the clients that own it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from fedpews.trees import Tree, bit_pattern, stack

BLOCK = 32
"""Clients that are summed in one call. The sums of blocks are added in the cohort's order, ``BLOCK`` at a time again,
so the order of additions depends on the cohort's size alone, and memory does not grow with the cohort."""


@dataclass(frozen=True)
class Average:
    """Σ p_i m_i y_i / Σ p_i m_i; an element that no client owns keeps its old value.

    >>> average = Average((1.0, 1.0), ({"w": torch.tensor([True, False])}, None))
    >>> average([{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([3.0, 3.0])}], {"w": torch.zeros(2)})
    {'w': tensor([2., 3.])}
    """

    weights: tuple[float, ...]  # p_i, not necessarily summing to one
    masks: tuple[Mapping[str, Tensor] | None, ...]  # m_i; None owns everything, as does a name the mask lacks
    zero_unowned: bool = field(default=False, kw_only=True)
    """Whether the server's step moves an element that no client owns to zero, instead of keeping its value."""

    def __call__(self, values: Sequence[Mapping[str, Tensor]], old: Mapping[str, Tensor]) -> Tree:
        """The average of the clients' values ``y_i``, for every name of ``old``."""
        result = {}
        for name, kept in old.items():
            shares, total = self.shares(name, kept)
            # of a parameter that all own there is no zero to write, and no old value to keep
            is_whole = min(self.weights) > 0 and all(mask is None or name not in mask for mask in self.masks)
            sums = []
            for first in range(0, len(values), BLOCK):
                # (clients of the block, *shape of the parameter)
                block = stack([value[name] for value in values[first : first + BLOCK]])
                if shares is not None and is_whole:
                    block = shares[first : first + BLOCK] * block
                elif shares is not None:
                    share = shares[first : first + BLOCK]
                    owned = share if share.dtype == torch.bool else share > 0
                    block = block if owned is share else share * block
                    # zeros where not owned: a value that was never sent may be anything, even NaN. Bits times one or
                    # zero, in a tenth of the time that torch.where takes on a processor
                    block = (bit_pattern(block) * owned).view(block.dtype)
                sums.append(block.sum(0))
            # torch.where computes both sides: no 0 / 0 where no client owns the element
            mean = add_blocks(sums) / total.clamp_min(torch.finfo(total.dtype).tiny)
            result[name] = mean if is_whole else torch.where(total > 0, mean, kept)
        return result

    def covered(self, old: Mapping[str, Tensor]) -> Tree:
        """Which elements at least one client owns."""
        return {name: (self.shares(name, kept)[1] > 0).expand_as(kept) for name, kept in old.items()}

    def shares(self, name: str, like: Tensor) -> tuple[Tensor | None, Tensor]:
        """p_i m_i of each client, (clients, ...), and Σ p_i m_i; both broadcast against the parameter.

        With equal weights the shares are boolean; they are None where every client owns the whole parameter.
        """
        count, ones = len(self.weights), [1] * like.dim()
        masks = [None if mask is None else mask.get(name) for mask in self.masks]
        shares: Tensor | None = None
        if any(mask is not None for mask in masks):
            whole = torch.ones((), dtype=torch.bool, device=like.device)
            filled = [whole if mask is None else mask for mask in masks]
            is_alike = all(mask.shape == filled[0].shape for mask in filled)
            stacked = stack(filled if is_alike else torch.broadcast_tensors(*filled))
            shares = stacked.reshape(count, *ones[stacked.dim() - 1 :], *stacked.shape[1:]).bool()
        if set(self.weights) != {1.0}:
            weights = torch.tensor(self.weights, dtype=like.dtype, device=like.device).view(count, *ones)
            shares = weights if shares is None else weights * shares
        if shares is None:
            return None, torch.full(ones, count, dtype=like.dtype, device=like.device)
        blocks = shares.split(BLOCK)
        if shares.dtype == torch.bool:
            # bytes: a third of the time that a sum of booleans takes
            counts = [block.view(torch.uint8).sum(0, dtype=torch.int32).to(like.dtype) for block in blocks]
            return shares, add_blocks(counts)
        return shares, add_blocks([block.sum(0) for block in blocks])


def add_blocks(sums: Sequence[Tensor]) -> Tensor:
    """The sums of consecutive blocks added in their order, ``BLOCK`` of them at a time."""
    while len(sums) > 1:
        sums = [reduce(torch.add, sums[first : first + BLOCK]) for first in range(0, len(sums), BLOCK)]
    return sums[0]
