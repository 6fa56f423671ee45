"""Where channels are read and made: products of matrices, convolutions and embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedpews.neurons.follow import FIRST, WHOLE, Follower, Tag, core, spread, structure

Arguments = dict[str, Any]
Tags = list[Tag | None]


def _turned(tag: Tag | None) -> Tag | None:
    """The tag of the transposed matrices."""
    return tag and Tag(tuple(axis.transpose(1, 2) for axis in tag.axes), tag.weight, tag.readable)


def product(
    follower: Follower, one: Tag | None, other: Tag | None, shape: tuple[int, int, int, int]
) -> Tag | None:
    """The tag of matrix products, (batch, m, k) by (batch, k, n); ``shape`` is (batch, m, k, n)."""
    batch, m, k, n = shape
    if one is not None and one.weight and other is not None and other.weight:
        # learnt queries, for example: the left operand counts as an activation
        one = Tag((follower.activation(one, frozenset({2})),))
    if one is not None and one.weight:
        # W·x = (xᵀ·Wᵀ)ᵀ, so the weight is always on the right below
        return _turned(product(follower, _turned(other), _turned(one), (batch, n, k, m)))
    if other is not None and other.weight:
        return _by_weight(follower, one, other, (batch, m, n))
    if one is None and other is None:
        return None
    # two activations: what is summed over (k) becomes one on each side
    left = None if one is None else follower.sets.mix(one.label, [2], "product").expand(batch, m, n)
    right = None if other is None else follower.sets.mix(other.label, [1], "product").expand(batch, m, n)
    if left is None or right is None:
        return Tag((left if right is None else right,))  # type: ignore[arg-type]
    return Tag((_by_activation(follower, left, right),))


def _by_activation(follower: Follower, left: Tensor, right: Tensor) -> Tensor:
    """Attention: what weighs whole rows of channels is one with them, if it does so head by head.

    With a single head the whole layer would be one neuron: then the channels keep their own, and what weighs them
    is left whole.
    """
    # how many different channels each side has
    kinds = [int((follower.sets.find(core(side)).unique() >= FIRST).sum()) for side in (left, right)]
    if not all(kinds):
        return right if kinds[1] else left
    if 2 not in follower.sets.varies(right) and 1 in follower.sets.varies(left):
        # the channels are on the left, the weights that attend to them on the right
        left, right, kinds = right, left, kinds[::-1]
    if kinds[0] == 1 < kinds[1]:
        follower.sets.bar(left, "weighs all channels alike")
        return right
    one, two = torch.broadcast_tensors(core(left), core(right))
    follower.sets.join(one, two)
    odd = (one < FIRST) != (two < FIRST)
    follower.sets.bar(torch.maximum(one, two)[odd], "is weighed by what cannot be closed")
    return torch.where(odd, torch.full_like(one, WHOLE), torch.maximum(one, two)).expand(right.shape)


def _by_weight(follower: Follower, one: Tag | None, weight: Tag, shape: tuple[int, int, int]) -> Tag:
    # a weight is (batch, k, n): it reads along k and makes neurons along n
    reads = [axis for axis in weight.axes if structure(axis) == {1}]
    makes = [axis for axis in weight.axes if structure(axis) == {2}]
    for axis in weight.axes:
        if structure(axis) not in ({1}, {2}):
            follower.sets.bar(axis, "is used in more than one role at once")
    if one is None and not reads:
        return Tag((_made(follower, makes, shape, 2),))
    read(follower, one, reads, weight.readable, channel=2, axis_dim=1)
    return Tag((_made(follower, makes, shape, 2),))


def read(
    follower: Follower, given: Tag | None, reads: list[Tensor], readable: bool, channel: int, axis_dim: int
) -> None:
    """A weight reads the channels it is given; join the ones to the others."""
    if given is None:
        return
    label = follower.sets.canonical(given.label)
    others = [dim for dim in range(label.dim()) if dim != channel]
    # A channel is closed where it is read, by a zero in the weight. A weight that is computed (normalised,
    # or a sum) need not be zero where its parameter is.
    if not reads or not readable:
        follower.sets.bar(label, "is read by a weight that is computed, or by a single input")
        for axis in reads:
            follower.sets.bar(axis, "is part of a weight that is computed")
        return
    first, *more = reads
    flat = core(first).reshape(-1)
    follower.channels.read[flat] = True
    # one label a channel, broadcast over all other dimensions of the activation
    wide = spread(flat, channel, [1 if dim in others else len(flat) for dim in range(label.dim())])
    follower.sets.join(core(label), wide)
    closed = (
        (core(label) == WHOLE).expand(label.shape) if core(label).shape != label.shape else label == WHOLE
    )
    if bool(closed.any()):
        follower.sets.bar(flat[_any(core(label) == WHOLE, channel, len(flat))], "reads what cannot be closed")
    for axis in more:
        follower.sets.bar(axis, "is used in more than one role at once")


def _any(where: Tensor, channel: int, size: int) -> Tensor:
    others = [dim for dim in range(where.dim()) if dim != channel]
    return where.sum(others).bool().expand(size) if others else where.expand(size)


def _made(follower: Follower, makes: list[Tensor], shape: tuple[int, ...], channel: int) -> Tensor:
    if not makes:
        return follower.whole(shape).label
    flat = core(makes[0]).reshape(-1)
    follower.channels.make(flat)
    for axis in makes[1:]:
        follower.sets.bar(axis, "is used in more than one role at once")
    return spread(flat, channel, shape)


def _matrices(follower: Follower, first: Tensor, second: Tensor) -> Tag | None:
    """The tag of a product of matrices or of batches of them."""
    tags = []
    for value in (first, second):
        tag = follower.tag(value)
        if tag is not None and value.dim() == 2:
            tag = Tag(tuple(axis.unsqueeze(0) for axis in tag.axes), tag.weight, tag.readable)
        tags.append(tag)
    batch = first.shape[0] if first.dim() == 3 else 1
    tag = product(follower, tags[0], tags[1], (batch, first.shape[-2], first.shape[-1], second.shape[-1]))
    if tag is not None and first.dim() == 2:
        tag = Tag(tuple(axis.squeeze(0) for axis in tag.axes), tag.weight, tag.readable)
    return tag


def _mm(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    second = bound["mat2"]
    return [_matrices(follower, bound["self"], second)]


def _addmm(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    names = ("mat1", "mat2") if "mat1" in bound else ("batch1", "batch2")
    tag = _matrices(follower, bound[names[0]], bound[names[1]])
    return [
        follower.combine([(tag, results[0]), (follower.tag(bound["self"]), bound["self"])], results[0].shape)
    ]


def _mv(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    matrix, vector = bound["self"], bound["vec"]
    tags = [follower.tag(matrix), follower.tag(vector)]
    one, other = (
        tag and Tag(tuple(axis.unsqueeze(0) for axis in tag.axes), tag.weight, tag.readable) for tag in tags
    )
    other = other and Tag(tuple(axis.unsqueeze(2) for axis in other.axes), other.weight, other.readable)
    # a power iteration (spectral norm), say
    if other is None and one is not None and one.weight:
        follower.bar(one, "goes into a product of its weights")
        return [None]
    tag = product(follower, one, other, (1, *matrix.shape, 1))
    return [tag and Tag(tuple(axis[0, :, 0] for axis in tag.axes), tag.weight, tag.readable)]


def _convolution(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    data, weight = bound["input"], bound["weight"]
    given, kernel = follower.tag(data), follower.tag(weight)
    shape = results[0].shape
    if kernel is None or not kernel.weight:
        for tag in (given, kernel):
            follower.bar(tag, "meets a kernel that is computed from the input")
        return [follower.whole(shape)]
    # 1, or 0 without a batch
    channel = data.dim() - weight.dim() + 1
    if given is not None and given.weight:
        given = Tag((follower.activation(given, frozenset({channel})),))
    # a convolution's weight is (out, in, ...), a transposed one's (in, out, ...)
    ins, outs = (0, 1) if bound["transposed"] else (1, 0)
    reads = [axis for axis in kernel.axes if structure(axis) == {ins}]
    makes = [axis for axis in kernel.axes if structure(axis) == {outs}]
    if bound["groups"] == 1:
        read(follower, given, reads, kernel.readable, channel, ins)
        label = _made(follower, makes, tuple(shape), channel)
    else:
        label = _grouped(follower, given, kernel, bound["groups"], channel, tuple(shape))
    bias = follower.tag(bound.get("bias"))
    for axis in bias.axes if bias is not None else ():
        label = follower.merge(label, spread(core(axis).reshape(-1), channel, shape), None, weight=True)
    return [Tag((label,))]


def _grouped(
    follower: Follower, given: Tag | None, kernel: Tag, groups: int, channel: int, shape: tuple[int, ...]
) -> Tensor:
    """A group binds its inputs to its outputs; the kernel's first dimension belongs to the group either way."""
    firsts = [axis for axis in kernel.axes if structure(axis) == {0}]
    if not firsts or given is None:
        if given is not None:
            follower.sets.bar(given.label, "is read by a weight that is computed")
        return follower.whole(shape).label
    flat = core(firsts[0]).reshape(-1)
    follower.channels.make(flat)
    label = follower.sets.canonical(given.label)
    others = [dim for dim in range(label.dim()) if dim != channel]
    # (groups, input channels of a group)
    by_group = follower.sets.mix(label, others, "grouped convolution").reshape(groups, -1)
    if by_group.shape[1] > 1 and len(by_group.unique()) == 1 and shape[channel] == len(flat):
        # the inputs are one neuron already: leave that one whole, and the outputs stay apart
        follower.sets.bar(by_group, "is read by a grouped convolution")
        return spread(flat, channel, shape)
    by_group = follower.sets.mix(by_group, [1], "grouped convolution")  # (groups, 1)
    follower.sets.join(by_group, flat.view(groups, -1))
    closed = (by_group < FIRST).expand(groups, len(flat) // groups).reshape(-1)
    if bool(closed.any()):
        follower.sets.bar(flat[closed], "is bound to the model's input or to a layer left whole")
    width = shape[channel]
    # the first dimension of a transposed one counts inputs: outputs get their group's label
    made = flat if width == len(flat) else by_group.expand(groups, width // groups).reshape(-1)
    return spread(made, channel, shape)


def _embedding(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    tag = follower.tag(bound["weight"])
    if tag is None or not tag.weight:
        follower.bar(tag, "is looked up")
        return [follower.whole(value.shape) for value in results]
    for name in ("indices", "offsets", "per_sample_weights"):
        follower.bar(follower.tag(bound.get(name)), "decides by its values what is computed")
    # (words, width): neurons lie along the width; a word is no neuron
    makes = [axis for axis in tag.axes if structure(axis) == {1}]
    label = _made(follower, makes, tuple(results[0].shape), results[0].dim() - 1)
    return [Tag((label,)), *[follower.whole(value.shape) for value in results[1:]]]


def _weight_norm(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    """g·v/‖v‖: rows stay apart, but every column changes the norm of all others."""
    dim = bound.get("dim", 0)
    kept = []
    for name in ("v", "g"):
        tag = follower.tag(bound[name])
        for axis in tag.axes if tag is not None else ():
            if structure(axis) == {dim}:
                kept.append(core(axis).expand([s if d == dim else 1 for d, s in enumerate(bound["v"].shape)]))
            else:
                follower.sets.bar(axis, "is part of a weight that is normalised")
    for axis in kept[1:]:
        follower.sets.join(kept[0], axis)
        follower.channels.own(axis)
    made = tuple(axis.expand(results[0].shape) for axis in kept[:1])
    return [Tag(made, weight=True, readable=False), None]


PRODUCTS: Mapping[str, Any] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "mv": _mv,
    "convolution": _convolution,
    "embedding": _embedding,
    "_embedding_bag": _embedding,
    "_embedding_bag_forward_only": _embedding,
    "_weight_norm_interface": _weight_norm,
}
