"""Labels of tensors: the channel that each element belongs to, and the sets of channels that go together.

A label is one number for each element of a tensor: ``CONSTANT`` for what no input changes (or padding), ``WHOLE`` for
what depends on the input but belongs to no channel that could be masked, and from ``FIRST`` on the number of a channel
of some parameter. Labels are expanded tensors: a dimension along which they do not change has stride 0, so that the
labels of a large activation cost as much as a list of its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CONSTANT, WHOLE, FIRST = 0, 1, 2


class Sets:
    """Numbers joined into sets (union-find), many at a time; ``barred`` says why a number cannot be closed."""

    def __init__(self, size: int) -> None:
        self._parent = torch.arange(size)
        self.barred: dict[int, str] = {}
        self.mixed: dict[int, str] = {}

    def find(self, labels: Tensor) -> Tensor:
        """The number that stands for the set of each label."""
        roots = self._parent[labels]
        while not torch.equal(further := self._parent[roots], roots):
            roots = further
        # path compression: the next search for these is a single look-up
        self._parent[labels] = roots
        return roots

    def join(self, one: Tensor, other: Tensor) -> None:
        """Make the sets of the two numbers one, element by element; constants and the like are left alone."""
        one, other = (side.reshape(-1) for side in torch.broadcast_tensors(one, other))
        both = (one >= FIRST) & (other >= FIRST)
        one, other = self.find(one[both]), self.find(other[both])
        # One assignment may set the same parent several times, and only one of them stays: repeat for pairs
        # that are still apart. Parents are always smaller numbers, so there can be no cycle.
        while bool((apart := one != other).any()):
            one, other = one[apart], other[apart]
            self._parent[torch.maximum(one, other)] = torch.minimum(one, other)
            one, other = self.find(one), self.find(other)

    def bar(self, labels: Tensor, reason: str) -> None:
        """These channels, and all they are joined to, can never be closed."""
        for number in self.find(core(labels)).unique().tolist():
            if number >= FIRST:
                self.barred.setdefault(number, reason)

    def varies(self, labels: Tensor) -> frozenset[int]:
        """The dimensions along which the sets change."""
        return dims_of(reduced(self.find(core(labels))))

    def mix(self, labels: Tensor, dims: Iterable[int], reason: str) -> Tensor:
        """Join all that lies along these dimensions; the labels then, with size 1 there."""
        small = self.find(core(labels))
        for dim in dims:
            if small.shape[dim] > 1:
                # any channel is above CONSTANT and WHOLE, so the largest label is a channel if there is one
                most = small.amax(dim, keepdim=True)
                if bool(((small >= FIRST) & (small != most)).any()):
                    self.join(small, most)
                    for number in most.unique().tolist():
                        self.mixed.setdefault(number, reason)
                # a mix with something whole stays influenced by it, whatever is closed
                if bool((odd := (small == WHOLE) & (most >= FIRST)).any()):
                    self.bar(most.expand_as(small)[odd], "is mixed with what cannot be closed")
                small = self.find(most)
        kept = [1 if dim in set(dims) else size for dim, size in enumerate(labels.shape)]
        return small.expand(kept)


def core(labels: Tensor) -> Tensor:
    """The labels with size 1 along every dimension where they are known not to change."""
    for dim, (size, stride) in enumerate(zip(labels.shape, labels.stride(), strict=True)):
        if stride == 0 and size > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels


def reduced(labels: Tensor) -> Tensor:
    """The labels with size 1 along every dimension where they do not change."""
    small = core(labels)
    for dim, size in enumerate(small.shape):
        if size > 1 and torch.equal(small, (first := small.narrow(dim, 0, 1)).expand_as(small)):
            small = first
    return small


def compact(labels: Tensor) -> Tensor:
    """The same labels, expanded along every dimension where they do not change."""
    small = reduced(labels)
    if any(one < other for one, other in zip(small.shape, labels.shape, strict=True)):
        # a view would keep the full-size labels alive
        small = small.contiguous()
    return small.expand(labels.shape)


def constant(label: int, shape: Sequence[int]) -> Tensor:
    """The same label for every element."""
    return torch.full((1,) * len(shape), label).expand(list(shape))


def spread(labels: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """One label per position of a dimension, expanded to a shape."""
    return labels.view([-1 if d == dim % len(shape) else 1 for d in range(len(shape))]).expand(list(shape))


def dims_of(axis: Tensor) -> frozenset[int]:
    """The dimensions along which an axis of a weight runs."""
    return frozenset(dim for dim, size in enumerate(core(axis).shape) if size > 1)


@dataclass(frozen=True)
class Tag:
    """What is known of a tensor: labels of its shape.

    An activation has one label for each element. What is computed of parameters alone (``weight``) has the channel
    on each of the parameter's dimensions; ``readable`` as long as closing a channel there closes it here.
    """

    axes: tuple[Tensor, ...]
    weight: bool = False
    readable: bool = True

    @property
    def label(self) -> Tensor:
        return self.axes[0]

    def map(self, function: Callable[[Tensor], Tensor]) -> Tag:
        """The tag of a tensor to which the function is applied; every axis changes as the tensor does."""
        return replace(self, axes=tuple(map(function, self.axes)))

    def along(self, dim: int) -> list[Tensor]:
        """The axes that run along this dimension, and no other."""
        return [axis for axis in self.axes if dims_of(axis) == {dim}]


@dataclass(frozen=True)
class Dimension:
    """Dimension ``dim`` of a parameter or buffer; its positions are numbered from ``first`` on."""

    name: str
    dim: int
    first: int
    size: int

    @property
    def positions(self) -> slice:
        return slice(self.first, self.first + self.size)
