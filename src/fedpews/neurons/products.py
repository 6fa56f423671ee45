"""Where channels are read and made: products of matrices, convolutions and embeddings."""

from __future__ import annotations

from torch import Tensor

from fedpews.neurons.follow import BOUND, Follower, Kernel, Rule, Tags, all_whole
from fedpews.neurons.labels import FIRST, WHOLE, Tag, core, dims_of, spread

ROLES = "is used in more than one role at once"


def _transposed(tag: Tag | None) -> Tag | None:
    return tag and tag.map(lambda axis: axis.transpose(1, 2))


def _product(
    follower: Follower, one: Tag | None, other: Tag | None, shape: tuple[int, int, int, int]
) -> Tag | None:
    """The tag of matrix products, (batch, m, k) by (batch, k, n); ``shape`` is (batch, m, k, n)."""
    batch, m, k, n = shape
    if one is not None and one.weight and other is not None and other.weight:
        # learnt queries, for example: the left operand counts as an activation
        one = Tag((follower.activation(one, frozenset({2})),))
    if one is not None and one.weight:
        # W·x = (xᵀ·Wᵀ)ᵀ, so the weight is always on the right below
        return _transposed(_product(follower, _transposed(other), _transposed(one), (batch, n, k, m)))
    if other is not None and other.weight:
        # a weight is (batch, k, n): it reads along k and makes neurons along n
        reads, makes = other.along(1), other.along(2)
        for axis in other.axes:
            if dims_of(axis) not in ({1}, {2}):
                follower.sets.bar(axis, ROLES)
        _read(follower, one, reads, other.readable, channel=2)
        return Tag((_made(follower, makes, (batch, m, n), channel=2),))
    # two activations: what is summed over (k) becomes one on each side
    sides = [
        follower.sets.mix(tag.label, [dim], "product").expand(batch, m, n)
        for tag, dim in ((one, 2), (other, 1))
        if tag is not None
    ]
    if len(sides) < 2:
        return Tag((sides[0],)) if sides else None
    return Tag((_by_activation(follower, *sides),))


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
    reason = "is weighed by what cannot be closed"
    return follower.unite(core(left), core(right), reason).expand(right.shape)


def _read(follower: Follower, given: Tag | None, reads: list[Tensor], readable: bool, channel: int) -> None:
    """A weight reads the channels of its input: join each to the position that reads it."""
    if given is None:
        return
    label = follower.sets.find(core(given.label))
    # A channel is closed where it is read, by a zero in the weight. A weight that is computed (normalised,
    # or a sum) need not be zero where its parameter is.
    if not reads or not readable:
        follower.sets.bar(label, "is read by a weight that is computed, or by a single input")
        for axis in reads:
            follower.sets.bar(axis, "is part of a weight that is computed")
        return
    first, *more = reads
    flat = core(first).reshape(-1)
    follower.read[flat] = True
    follower.sets.join(label, core(spread(flat, channel, given.label.shape)))
    # (channels or 1,): whether any element that this input channel reads is whole
    whole = (label == WHOLE).movedim(channel, 0).reshape(label.shape[channel], -1).any(1)
    follower.sets.bar(flat[whole.expand(len(flat))], "reads what cannot be closed")
    for axis in more:
        follower.sets.bar(axis, ROLES)


def _made(follower: Follower, makes: list[Tensor], shape: tuple[int, ...], channel: int) -> Tensor:
    if not makes:
        return follower.whole(shape).label
    flat = core(makes[0]).reshape(-1)
    follower.make(flat)
    for axis in makes[1:]:
        follower.sets.bar(axis, ROLES)
    return spread(flat, channel, shape)


def _matrices(follower: Follower, first: Tensor, second: Tensor) -> Tag | None:
    """The tag of a product of matrices or of batches of them."""
    one, other = (
        tag.map(lambda axis: axis.unsqueeze(0)) if tag is not None and value.dim() == 2 else tag
        for value, tag in ((value, follower.tag(value)) for value in (first, second))
    )
    batch = first.shape[0] if first.dim() == 3 else 1
    tag = _product(follower, one, other, (batch, first.shape[-2], first.shape[-1], second.shape[-1]))
    return tag.map(lambda axis: axis.squeeze(0)) if tag is not None and first.dim() == 2 else tag


def _mm(follower: Follower, kernel: Kernel) -> Tags:
    return _matrices(follower, kernel.arguments["self"], kernel.arguments["mat2"])


def _addmm(follower: Follower, kernel: Kernel) -> Tags:
    added, first, second, *_ = kernel.arguments.values()
    tag = _matrices(follower, first, second)
    return follower.combine([(tag, kernel.results[0]), (follower.tag(added), added)], kernel.shape)


def _mv(follower: Follower, kernel: Kernel) -> Tags:
    matrix, vector = kernel.arguments["self"], kernel.arguments["vec"]
    one, other = follower.tag(matrix), follower.tag(vector)
    # a power iteration (spectral norm), say
    if other is None and one is not None and one.weight:
        follower.bar(one, "goes into a product of its weights")
        return None
    one, other = (
        one and one.map(lambda axis: axis[None]),
        other and other.map(lambda axis: axis[None, :, None]),
    )
    tag = _product(follower, one, other, (1, *matrix.shape, 1))
    return tag and tag.map(lambda axis: axis[0, :, 0])


def _convolution(follower: Follower, kernel: Kernel) -> Tags:
    arguments, shape = kernel.arguments, tuple(kernel.shape)
    data, weight, groups = arguments["input"], arguments["weight"], arguments["groups"]
    given, tag = follower.tag(data), follower.tag(weight)
    if tag is None or not tag.weight:
        for one in (given, tag):
            follower.bar(one, "meets a kernel that is computed from the input")
        return all_whole(follower, kernel)
    # 1, or 0 without a batch
    channel = data.dim() - weight.dim() + 1
    if given is not None and given.weight:
        given = Tag((follower.activation(given, frozenset({channel})),))
    if groups == 1:
        # a convolution's weight is (out, in, ...), a transposed one's (in, out, ...)
        ins, outs = (0, 1) if arguments["transposed"] else (1, 0)
        _read(follower, given, tag.along(ins), tag.readable, channel)
        label = _made(follower, tag.along(outs), shape, channel)
    else:
        label = _grouped(follower, given, tag.along(0), groups, channel, shape)
    bias = follower.tag(arguments.get("bias"))
    for axis in bias.axes if bias is not None else ():
        label = follower.merge(label, spread(core(axis).reshape(-1), channel, shape))
    return Tag((label,))


def _grouped(
    follower: Follower,
    given: Tag | None,
    firsts: list[Tensor],
    groups: int,
    channel: int,
    shape: tuple[int, ...],
) -> Tensor:
    """A group binds its inputs to its outputs; the kernel's first dimension belongs to the group either way."""
    if not firsts or given is None:
        follower.bar(given, "is read by a weight that is computed")
        return follower.whole(shape).label
    flat = core(firsts[0]).reshape(-1)
    follower.make(flat)
    others = [dim for dim in range(len(shape)) if dim != channel]
    # (groups, input channels of a group)
    by_group = follower.sets.mix(given.label, others, "grouped convolution").reshape(groups, -1)
    width = shape[channel]
    if by_group.shape[1] > 1 and len(by_group.unique()) == 1 and width == len(flat):
        # the inputs are one neuron already: it is left whole, and the outputs stay separate
        follower.sets.bar(by_group, "is read by a grouped convolution")
        return spread(flat, channel, shape)
    by_group = follower.sets.mix(by_group, [1], "grouped convolution")  # (groups, 1)
    follower.sets.join(by_group, flat.view(groups, -1))
    follower.sets.bar(flat.view(groups, -1)[by_group[:, 0] < FIRST], BOUND)
    # the first dimension of a transposed one counts inputs: outputs get their group's label
    made = flat if width == len(flat) else by_group.expand(groups, width // groups).reshape(-1)
    return spread(made, channel, shape)


def _embedding(follower: Follower, kernel: Kernel) -> Tags:
    tag = follower.tag(kernel.arguments["weight"])
    if tag is None or not tag.weight:
        follower.bar(tag, "is looked up")
        return all_whole(follower, kernel)
    for name in ("indices", "offsets", "per_sample_weights"):
        follower.bar(follower.tag(kernel.arguments.get(name)), "decides by its values what is computed")
    # (words, width): neurons lie along the width; a word is no neuron
    label = _made(follower, tag.along(1), tuple(kernel.shape), len(kernel.shape) - 1)
    return [Tag((label,)), *[follower.whole(value.shape) for value in kernel.results[1:]]]


def _weight_norm(follower: Follower, kernel: Kernel) -> Tags:
    """g·v/‖v‖: rows stay separate, but every column changes the norm of all others."""
    dim, shape = kernel.arguments.get("dim", 0), kernel.shape
    tags = [follower.tag(kernel.arguments[name]) for name in ("v", "g")]
    kept = []
    for axis in (axis for tag in tags if tag is not None for axis in tag.axes):
        if core(axis).shape[dim] > 1:
            kept.append(core(axis))
        else:
            follower.sets.bar(axis, "is part of a weight that is normalised")
    for axis in kept[1:]:
        follower.sets.join(kept[0], axis)
        follower.own(axis)
    made = tuple(axis.expand(shape) for axis in kept[:1])
    return [Tag(made, weight=True, readable=False), None]


PRODUCTS: dict[str, Rule] = {
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
