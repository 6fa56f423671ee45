"""Maths on trees: dicts that map a parameter's name to its tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Tensor]

Nest = dict[str, Any]
"""A nested dict whose leaves are tensors: what methods keep, and what is saved."""


def map_tree(
    function: Callable[..., Tensor], first: Mapping[str, Tensor], *rest: Mapping[str, Tensor]
) -> Tree:
    """Apply ``function`` name by name; every tree must have the first one's names.

    >>> map_tree(torch.add, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    return {name: function(value, *(tree[name] for tree in rest)) for name, value in first.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float | Tensor = 1.0) -> Tree:
    """a + scale·b."""
    return {name: value + scale * b[name] for name, value in a.items()}


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """a − b."""
    return {name: value - b[name] for name, value in a.items()}


def zeros_like(tree: Mapping[str, Tensor]) -> Tree:
    """The same names and shapes, all zero."""
    return {name: torch.zeros_like(value) for name, value in tree.items()}


def pick(tree: Mapping[str, Tensor], names: Mapping[str, object] | tuple[str, ...]) -> Tree:
    """The part of a tree with these names, in their order."""
    return {name: tree[name] for name in names}


def where(mask: Mapping[str, Tensor], yes: Mapping[str, Tensor], no: Mapping[str, Tensor]) -> Tree:
    """Element-wise choice by a mask of 0/1 values or booleans; a name the mask lacks is taken from ``yes``."""
    return {
        name: torch.where(mask[name].bool(), value, no[name]) if name in mask else value
        for name, value in yes.items()
    }


def norm(tree: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean norm of all elements together."""
    return torch.stack([value.float().pow(2).sum() for value in tree.values()]).sum().sqrt()


def is_finite(tree: Mapping[str, Tensor]) -> bool:
    """Whether no element is NaN or infinite."""
    return all(bool(torch.isfinite(value).all()) for value in tree.values())
