"""Maths on trees: dicts that map a parameter's name to its tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

Tree = dict[str, Tensor]

Nest = dict[str, Any]
"""A nested dict whose leaves are tensors: what methods keep, and what is saved."""


Layout = tuple[tuple[str, Any], ...]
"""How a nest's tensors make it up: (key, None) for a tensor, (key, layout) for a dict within."""


def flatten(nest: Mapping[str, Any]) -> tuple[list[Tensor], Layout]:
    """All tensors of a nest in its order, and how they make it up.

    >>> flatten({"a": {"w": torch.ones(1)}, "b": {}})
    ([tensor([1.])], (('a', (('w', None),)), ('b', ())))
    """
    leaves, layout = [], []
    for key, value in nest.items():
        inner = None
        if isinstance(value, dict):
            tensors, inner = flatten(value)
            leaves += tensors
        else:
            leaves.append(value)
        layout.append((key, inner))
    return leaves, tuple(layout)


def unflatten(leaves: Iterator[Tensor], layout: Layout) -> Nest:
    """The inverse of ``flatten``; takes as many of the tensors as the layout has."""
    return {key: next(leaves) if inner is None else unflatten(leaves, inner) for key, inner in layout}


def leaves(nest: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nest with its path.

    >>> [path for path, _ in leaves({"a": {"w": torch.ones(1)}, "b": {}})]
    ['a/w']
    """
    for key, value in nest.items():
        # a slash in a key is no step of the path
        path = f"{prefix}{quote(str(key), safe='')}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}/")
        else:
            yield path, value


def map_leaves(function: Callable[[Tensor], Tensor], nest: Mapping[str, Any]) -> Nest:
    """A nest with ``function`` applied to every tensor."""
    return {
        key: map_leaves(function, value) if isinstance(value, dict) else function(value)
        for key, value in nest.items()
    }


def place_like(nest: Mapping[str, Any], like: Mapping[str, Any], device: torch.device) -> Nest:
    """A nest read from disk, each tensor on the device of ``like``'s of the same name; others on ``device``."""
    placed: Nest = {}
    for key, value in nest.items():
        same = like.get(key)
        if isinstance(value, dict):
            placed[key] = place_like(value, same if isinstance(same, dict) else {}, device)
        else:
            placed[key] = value.to(same.device if isinstance(same, Tensor) else device)
    return placed


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.stack``, but without a copy where the tensors are evenly spaced rows of one, as ``unbind`` gives them.

    The result is read-only: it may share its memory.

    >>> rows = torch.arange(6).view(3, 2)
    >>> stack(rows.unbind()[::2]).data_ptr() == rows.data_ptr()
    True
    """
    first = tensors[0]
    whole, shape, start = first._base, first.shape, first.storage_offset()
    if whole is None or len(tensors) < 2 or not first.is_contiguous():
        return torch.stack([*tensors])
    gap = tensors[1].storage_offset() - start
    for i, one in enumerate(tensors):
        if one._base is not whole or one.shape != shape or one.storage_offset() != start + i * gap:
            return torch.stack([*tensors])
    return whole.as_strided((len(tensors), *shape), (gap, *first.stride()), start)


LARGEST_COPY = 2**20
"""How many numbers are copied at once to look at them."""


def stacks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors of one shape, as many in one stack as make ``LARGEST_COPY`` numbers, to look at them in one call.

    With many small clients calls cost more than numbers; large tensors are not copied for it.

    >>> [len(rows) for rows in stacks([torch.zeros(2**19)] * 3)]
    [2, 1]
    """
    together = max(1, LARGEST_COPY // max(1, tensors[0].numel()))
    return (stack(tensors[first : first + together]) for first in range(0, len(tensors), together))


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_pattern(values: Tensor) -> Tensor:
    """The values' bits as whole numbers: of a zero they are 0, of −0 they are not."""
    return values.view(_BITS[values.element_size()])


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
    """Element-wise choice by a mask of 0/1 values or booleans; a name the mask lacks comes from ``yes``."""
    return {
        name: torch.where(mask[name].bool(), value, no[name]) if name in mask else value
        for name, value in yes.items()
    }


def norm(tree: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean norm of all elements together, the same to the bit in whatever order the names come."""
    return torch.stack([tree[name].float().pow(2).sum() for name in sorted(tree)]).sum().sqrt()


def is_finite(tree: Mapping[str, Tensor]) -> bool:
    """Whether no element is NaN or infinite."""
    return all(bool(torch.isfinite(value).all()) for value in tree.values())


def mean_cosine(
    starts: Sequence[Mapping[str, Tensor]],
    ends: Sequence[Mapping[str, Tensor]],
    masks: Sequence[Mapping[str, Tensor] | None] | None = None,
    elements: int | None = None,
) -> float | None:
    """The mean cosine between the updates of two clients, on the elements both own; below 0 they cancel out.

    None if no two clients have an element in common, or if nothing moved. The names are those of the first start.

    Args:
        masks: the elements that each client owns; None, or a name that a mask lacks, is all of them.
        elements: of a larger tensor about so many elements, evenly spread, are compared; by default all.

    >>> start = {"w": torch.zeros(2)}
    >>> mean_cosine([start] * 2, [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 3.0])}])
    0.0
    """
    count = len(ends)
    # (i, j): the inner product of two updates, and ‖update of i‖² on what j owns too; double, as it adds up
    # millions of small products
    inner = torch.zeros(count, count, dtype=torch.float64)
    squares = torch.zeros_like(inner)
    for name, like in starts[0].items():
        step = max(1, -(-like.numel() // (elements or max(1, like.numel()))))
        begun = [like] if all(start[name] is like for start in starts) else [start[name] for start in starts]
        owned = None
        if masks is not None and any(mask is not None and name in mask for mask in masks):
            whole = torch.ones_like(like, dtype=torch.bool)
            owned = [whole if mask is None else mask.get(name, whole).expand_as(like) for mask in masks]
        # a piece of a large tensor at a time, so that memory does not grow with the clients
        width = step * max(1, LARGEST_COPY // count)
        for first in range(0, like.numel(), width):
            piece = slice(first, first + width, step)
            moved = (_rows([end[name] for end in ends], piece) - _rows(begun, piece)).cpu().double()
            if owned is None:
                squares += moved.square().sum(1, keepdim=True)
            else:
                # zeros outside what a client owns leave the elements that both own in the product
                kept = _rows(owned, piece).cpu().double()
                moved *= kept
                squares += moved.square() @ kept.T
            inner += moved @ moved.T
    one, other = torch.triu_indices(count, count, 1)
    lengths = (squares * squares.T).sqrt()[one, other]
    cosines = (inner[one, other] / lengths)[lengths > 0]
    # six digits: sums in another order, on another number of threads, still write the same bytes
    return round(float(cosines.mean().clamp(-1, 1)), 6) if len(cosines) else None


def _rows(values: Sequence[Tensor], piece: slice) -> Tensor:
    """A piece of each of these tensors, (tensors, elements)."""
    if len(values) * values[0].numel() <= LARGEST_COPY:
        return stack(values).detach().reshape(len(values), -1)[:, piece]
    return torch.stack([value.detach().reshape(-1)[piece] for value in values])
