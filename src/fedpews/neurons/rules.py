"""What each kernel does to the channels that go into it: the one table that knows operations.

A rule gets the follower, the operation, its arguments by name and the tensors it returned, and gives their tags.
What has no rule closes the way for all channels that reach it: they are left whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedpews.neurons.follow import CONSTANT, WHOLE, Follower, Tag, compact, core, spread, structure
from fedpews.neurons.products import PRODUCTS
from fedpews.torch_private import tree_leaves

Arguments = dict[str, Any]
Tags = list[Tag | None]
Rule = Callable[[Follower, Any, Arguments, list[Tensor]], Tags]


def _pointwise(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    operands = [value for value in bound.values() if isinstance(value, Tensor)]
    tag = follower.combine([(follower.tag(value), value) for value in operands], results[0].shape)
    name = func._schema.name.partition("::")[2].rstrip("_")
    # a closed channel stays closed in c·w, w/c and −w; in w + c, or in a function of w, it need not be zero
    if tag is not None and tag.weight and name not in {"mul", "div", "neg"}:
        tag = Tag(tag.axes, weight=True, readable=False)
    return [tag] * len(results)


def _same(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    return [follower.tag(next(iter(bound.values())))] * len(results)


def _source(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    tag = follower.tag(bound["src"])
    if tag is None:
        return [None]
    axes = tuple(axis.expand(results[0].shape) for axis in tag.axes)
    return [Tag(axes, tag.weight, tag.readable)]


def _constant(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    return [None] * len(results)


def _chooses(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    """The values decide what happens next."""
    for value in bound.values():
        follower.bar(follower.tag(value), "decides by its values what is computed")
    return [follower.whole(value.shape) for value in results]


def _move(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    """Elements only change places: the labels go where they go."""
    (first, data), *rest = bound.items()
    for _, value in rest:
        for index in value if isinstance(value, list | tuple) else [value]:
            follower.bar(follower.tag(index), "decides by its values what is computed")
    many = isinstance(data, list | tuple)
    values: list[Tensor] = list(data) if many else [data]
    # the kernel itself moves the labels; it pads them with CONSTANT (0), whatever the model pads with
    options = {name: 0 if name == "value" else value for name, value in rest}
    name = func._schema.name.partition("::")[2]

    def moved(labels: list[Tensor]) -> list[Tensor]:
        # labels are expanded tensors, of which a view may not exist where one of the values does
        if name in {"view", "_unsafe_view"}:
            return [labels[0].reshape(results[0].shape)]
        try:
            out = func(**{first: labels if many else labels[0]}, **options)
        except (RuntimeError, NotImplementedError):  # some kernels take no integers
            doubles = [label.double() for label in labels]
            out = func(**{first: doubles if many else doubles[0]}, **options)
        return [part.long() for part in (out if isinstance(out, list | tuple) else [out])]

    tags = [follower.tag(value) for value in values]
    weights = [tag for tag in tags if tag is not None and tag.weight]
    acts = [tag for tag in tags if tag is not None and not tag.weight]
    if acts:
        # a parameter among activations (a class token that is concatenated) is labelled where they are
        dims = frozenset().union(*(follower.sets.varies(tag.label) for tag in acts))
        labels = [
            torch.full((1,) * value.dim(), CONSTANT).expand(value.shape)
            if tag is None
            else follower.activation(tag, dims)
            for tag, value in zip(tags, values, strict=True)
        ]
        return [Tag((part,)) for part in moved(labels)]
    # weights only: each axis is moved by itself
    runs = list(dict.fromkeys(structure(axis) for tag in weights for axis in tag.axes))
    # only constants are moved; an index computed from the input may have chosen among them
    if not runs:
        chosen = any(follower.tag(leaf) is not None for leaf in tree_leaves([value for _, value in rest]))
        return [follower.whole(value.shape) if chosen else None for value in results]
    axes = []
    for run in runs:
        along = [
            next((axis for axis in tag.axes if structure(axis) == run), None) if tag is not None else None
            for tag in tags
        ]
        # a weight that does not run along this axis is whole there
        blank = [
            torch.full((1,) * value.dim(), CONSTANT if tag is None else WHOLE).expand(value.shape)
            for tag, value in zip(tags, values, strict=True)
        ]
        axes.append(moved([b if axis is None else axis for axis, b in zip(along, blank, strict=True)]))
    readable = all(tag.readable for tag in weights)
    # an axis of which a slice left one position is no axis any more
    return [
        Tag(
            tuple(compact(axis) for axis in parts if structure(compact(axis))), weight=True, readable=readable
        )
        for parts in zip(*axes, strict=True)
    ]


def _dims(bound: Arguments, rank: int) -> list[int]:
    dim = bound.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim or [])
    # no dimension given is all of them, as in x.sum()
    return [d % rank for d in dims] or list(range(rank))


def _mixed(follower: Follower, tag: Tag, dims: Sequence[int], name: str) -> Tag:
    """The tag, with size 1 along dimensions over which a kernel mixes."""
    if not tag.weight:
        return Tag((follower.sets.mix(tag.label, dims, name),))
    axes = []
    for axis in tag.axes:
        if structure(axis) & set(dims):
            # closing one channel would change the sum that all others are computed from
            follower.sets.bar(axis, f"goes into a {name} of its weights")
        else:
            kept = [1 if d in dims else size for d, size in enumerate(axis.shape)]
            axes.append(core(axis).expand(kept))
    return Tag(tuple(axes), weight=True, readable=False)


def _resized(tag: Tag | None, shape: Sequence[int]) -> Tag | None:
    if tag is None or not tag.axes:
        return None
    return Tag(tuple(axis.expand(list(shape)) for axis in tag.axes), tag.weight, tag.readable)


def _reduce(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    data = bound.get("self", bound.get("input"))
    tag, name = follower.tag(data), func._schema.name.partition("::")[2]
    if tag is None or data is None:
        return [None] * len(results)
    dims = _dims(bound, data.dim())
    mixed = _mixed(follower, tag, dims, name)
    # without keepdim: the mixed dimensions, of size 1 by now, are dropped
    if results[0].dim() < data.dim():
        kept = [size for d, size in enumerate(data.shape) if d not in dims]
        mixed = Tag(
            tuple(axis.reshape(_drop(axis, dims)) for axis in mixed.axes), mixed.weight, mixed.readable
        )
        return [_resized(mixed, kept)] * len(results)
    return [_resized(mixed, results[0].shape)] * len(results)


def _drop(axis: Tensor, dims: Sequence[int]) -> list[int]:
    return [size for d, size in enumerate(axis.shape) if d not in dims]


def _along(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    """Mixes along dimensions that it keeps, as a softmax does."""
    data = bound["self"]
    tag, name = follower.tag(data), func._schema.name.partition("::")[2]
    if tag is None:
        return [None] * len(results)
    # the kernels that leave the dimension out mean the last one
    dims = _dims(bound | {"dim": bound.get("dim", -1)}, data.dim())
    mixed = _mixed(follower, tag, dims, name.strip("_"))
    return [_resized(mixed, value.shape) for value in results]


def _spatial(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    """Pools or samples over the last dimensions, as many as the kernel's name says."""
    (_, data), *rest = bound.items()
    for _, value in rest:
        # a sampling grid, say, that the model computed
        follower.bar(follower.tag(value), "says where to sample")
    tag, name = follower.tag(data), func._schema.name.partition("::")[2]
    if tag is None:
        return [follower.whole(value.shape) for value in results]
    match = re.search(r"([123])d", name)
    count = int(match[1]) if match else 2
    mixed = _mixed(follower, tag, range(data.dim() - count, data.dim()), name)
    return [_resized(mixed, value.shape) for value in results]


def _glu(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    data, dim = bound["self"], bound.get("dim", -1)
    tag = follower.tag(data)
    if tag is None:
        return [None]
    # unit i of the first half is multiplied by a gate of unit i of the second: one neuron
    half = data.shape[dim] // 2
    halves = [
        (
            Tag(tuple(axis.narrow(dim, start, half) for axis in tag.axes), tag.weight, False),
            data.narrow(dim, start, half),
        )
        for start in (0, half)
    ]
    return [follower.combine(halves, results[0].shape)]


def _scatter(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    """Rows are added or written to other rows, as messages to the nodes of a graph."""
    follower.bar(follower.tag(bound["index"]), "decides by its values what is computed")
    operands: list[tuple[Tag | None, Tensor]] = []
    dim = bound["dim"] % results[0].dim()
    for value in (bound["self"], bound.get("src", bound.get("source"))):
        tag = follower.tag(value)
        if tag is not None and isinstance(value, Tensor):
            # which rows meet depends on the index: any of them may
            mixed = _mixed(follower, tag, [dim], "scatter")
            operands.append((mixed, value))
    shape = [1 if d == dim else size for d, size in enumerate(results[0].shape)]
    return [_resized(follower.combine(operands, shape), results[0].shape)]


def _channelwise(
    follower: Follower, label: Tensor, bound: Arguments, dim: int, names: Sequence[str]
) -> Tensor:
    """The label after a norm's own tensors have worked on its channels."""
    for name in names:
        tag = follower.tag(bound.get(name))
        for axis in tag.axes if tag is not None else ():
            wide = spread(axis, dim, label.shape) if axis.dim() == 1 else axis.expand(label.shape)
            label = follower.merge(label, wide, None, weight=True)
    return label


def _batch_norm(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    data, tag = bound["input"], follower.tag(bound["input"])
    if tag is None:
        return [None] * len(results)
    # (batch, channels, ...): statistics are taken over everything but the channels
    others = [d for d in range(data.dim()) if d != 1]
    mixed = _mixed(follower, tag, others, "batch norm")
    if tag.weight:
        return [_resized(mixed, data.shape), *[None] * (len(results) - 1)]
    label = _channelwise(
        follower, mixed.label.expand(data.shape), bound, 1, ("weight", "bias", "running_mean", "running_var")
    )
    # the other results are statistics saved for the backward pass
    return [Tag((label,)), *[follower.whole(value.shape) for value in results[1:]]]


def _layer_norm(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    data, tag = bound["input"], follower.tag(bound["input"])
    if tag is None:
        return [None] * len(results)
    count = len(bound["normalized_shape"])
    mixed = _mixed(follower, tag, range(data.dim() - count, data.dim()), "layer norm")
    if tag.weight:
        return [_resized(mixed, data.shape), *[None] * (len(results) - 1)]
    label = _channelwise(follower, mixed.label.expand(data.shape), bound, -1, ("weight", "bias"))
    return [Tag((label,)), *[follower.whole(value.shape) for value in results[1:]]]


def _group_norm(follower: Follower, func: Any, bound: Arguments, results: list[Tensor]) -> Tags:
    data, tag = bound["input"], follower.tag(bound["input"])
    if tag is None:
        return [None] * len(results)
    count, shape = bound["group"], data.shape
    label = follower.activation(tag, frozenset({1}))
    # (batch, channels, 1), then (batch, groups, channels of a group)
    grouped = core(label.flatten(2)[:, :, :1] if data.dim() > 2 else label[:, :, None])
    grouped = grouped.expand(shape[0], shape[1], 1).reshape(shape[0], count, shape[1] // count)
    mixed = follower.sets.mix(grouped, [2], "group norm").expand_as(grouped).reshape(shape[0], shape[1])
    label = mixed.view(*mixed.shape, *[1] * (data.dim() - 2)).expand(shape)
    label = _channelwise(follower, compact(label), bound, 1, ("weight", "bias"))
    return [Tag((label,)), *[follower.whole(value.shape) for value in results[1:]]]


_ELEMENTWISE = (
    "_prelu_kernel native_dropout where masked_fill lerp hardswish hardsigmoid softplus mish celu selu elu leaky_relu "
    "hardtanh hardshrink softshrink log_sigmoid_forward rrelu_with_noise threshold nan_to_num"
)
_MIXING = "_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort topk"
_MOVING = (
    "view _unsafe_view reshape permute t transpose expand slice select squeeze unsqueeze cat stack split diagonal "
    "split_with_sizes unsafe_split unsafe_split_with_sizes unbind flip roll repeat repeat_interleave index "
    "index_select gather constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle "
    "im2col tril triu unfold"
)
_REDUCING = (
    "sum mean amax amin max min var var_mean std std_mean norm linalg_vector_norm logsumexp prod all any argmax argmin "
    "median nansum nanmean"
)
_POOLING = (
    "max_pool2d_with_indices max_pool3d_with_indices max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "grid_sampler_2d grid_sampler_3d"
)
# take a shape or a device from what they are given, but no values
_FRESH = (
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty "
    "new_empty_strided uniform normal zero fill random exponential sym_size sym_numel"
)


def _all(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    "pointwise": _pointwise,
    **_all(_ELEMENTWISE, _pointwise),
    "clone": _same,
    "_to_copy": _same,
    "detach": _same,
    "alias": _same,
    "contiguous": _same,
    "lift_fresh": _same,
    "copy": _source,
    # dropout's mask
    "bernoulli": _constant,
    # Python gets to see values: .item(), an if, boolean indexing
    "_local_scalar_dense": _chooses,
    "is_nonzero": _chooses,
    "equal": _chooses,
    "nonzero": _chooses,
    "masked_select": _chooses,
    "multinomial": _chooses,
    "glu": _glu,
    "scatter_add": _scatter,
    "scatter": _scatter,
    "scatter_reduce": _scatter,
    "index_add": _scatter,
    "index_reduce": _scatter,
    "native_batch_norm": _batch_norm,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    **PRODUCTS,
    **_all(_MOVING, _move),
    **_all(_REDUCING, _reduce),
    **_all(_MIXING, _along),
    **_all(_POOLING, _spatial),
    **_all(_FRESH, _constant),
}
