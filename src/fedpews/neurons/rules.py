"""What each kernel does to the channels that go into it: the one table that knows operations.

A rule gets the follower and the call of a kernel, and gives the tags of its results. What has no rule closes the way
for all channels that reach it: they are left whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import Tensor

from fedpews.neurons.follow import Follower, Kernel, Rule, Tags, all_whole
from fedpews.neurons.labels import CONSTANT, WHOLE, Tag, compact, constant, core, dims_of, spread
from fedpews.neurons.products import PRODUCTS
from fedpews.torch_private import tree_leaves

DECIDES = "decides by its values what is computed"


def _pointwise(follower: Follower, kernel: Kernel) -> Tags:
    operands = [value for value in kernel.arguments.values() if isinstance(value, Tensor)]
    tag = follower.combine([(follower.tag(value), value) for value in operands], kernel.shape)
    # a closed channel stays closed in c·w, w/c and −w; in w + c, or in a function of w, it need not be zero
    if tag is not None and tag.weight and kernel.name not in {"mul", "div", "neg"}:
        tag = Tag(tag.axes, weight=True, readable=False)
    return tag


def _same(follower: Follower, kernel: Kernel) -> Tags:
    return follower.tag(next(iter(kernel.arguments.values())))


def _source(follower: Follower, kernel: Kernel) -> Tags:
    return _resized(follower.tag(kernel.arguments["src"]), kernel.shape)


def _constant(follower: Follower, kernel: Kernel) -> Tags:
    return None


def _chooses(follower: Follower, kernel: Kernel) -> Tags:
    """The values decide what happens next."""
    for value in kernel.arguments.values():
        follower.bar(follower.tag(value), DECIDES)
    return all_whole(follower, kernel)


def _move(follower: Follower, kernel: Kernel) -> Tags:
    """Elements only move: the labels move with them."""
    (first, data), *rest = kernel.arguments.items()
    # the kernel itself moves the labels; it pads them with CONSTANT (0), whatever the model pads with
    options = {name: 0 if name == "value" else value for name, value in rest}
    indices = [tag for leaf in tree_leaves(options) if (tag := follower.tag(leaf)) is not None]
    for tag in indices:
        follower.bar(tag, DECIDES)
    many = isinstance(data, list | tuple)
    values: list[Tensor] = list(data) if many else [data]

    def moved(labels: list[Tensor]) -> list[Tensor]:
        # labels are expanded tensors, of which a view may not exist where one of the values does
        if kernel.name in {"view", "_unsafe_view"}:
            return [labels[0].reshape(kernel.shape)]
        try:
            out = kernel.function(**{first: labels if many else labels[0]}, **options)
        except (RuntimeError, NotImplementedError):  # some kernels take no integers
            doubles = [label.double() for label in labels]
            out = kernel.function(**{first: doubles if many else doubles[0]}, **options)
        return [part.long() for part in (out if isinstance(out, list | tuple) else [out])]

    tags = [follower.tag(value) for value in values]
    weights = [tag for tag in tags if tag is not None and tag.weight]
    acts = [tag for tag in tags if tag is not None and not tag.weight]
    if acts:
        # a parameter among activations (a class token that is concatenated) is labelled where they are
        dims = frozenset().union(*(follower.sets.varies(tag.label) for tag in acts))
        labels = [
            constant(CONSTANT, value.shape) if tag is None else follower.activation(tag, dims)
            for tag, value in zip(tags, values, strict=True)
        ]
        return [Tag((part,)) for part in moved(labels)]
    # only constants are moved; an index computed from the input may have chosen among them
    if not weights:
        return all_whole(follower, kernel) if indices else None
    # weights only: each axis is moved by itself; a weight that does not run along it is whole there
    axes = []
    for dims in dict.fromkeys(dims_of(axis) for tag in weights for axis in tag.axes):
        labels = []
        for tag, value in zip(tags, values, strict=True):
            blank = constant(CONSTANT if tag is None else WHOLE, value.shape)
            along = [axis for axis in tag.axes if dims_of(axis) == dims] if tag is not None else []
            labels.append(along[0] if along else blank)
        axes.append([compact(axis) for axis in moved(labels)])
    readable = all(tag.readable for tag in weights)
    # an axis of which a slice left one position is no axis any more
    return [
        Tag(tuple(axis for axis in parts if dims_of(axis)), weight=True, readable=readable)
        for parts in zip(*axes, strict=True)
    ]


def _mixed(follower: Follower, tag: Tag, over: Iterable[int], name: str) -> Tag:
    """The tag, with size 1 along dimensions over which a kernel mixes."""
    dims = set(over)
    if not tag.weight:
        return Tag((follower.sets.mix(tag.label, dims, name),))
    axes = []
    for axis in tag.axes:
        if dims_of(axis) & dims:
            # closing one channel would change the sum that all others are computed from
            follower.sets.bar(axis, f"goes into a {name} of its weights")
        else:
            axes.append(core(axis).expand([1 if d in dims else size for d, size in enumerate(axis.shape)]))
    return Tag(tuple(axes), weight=True, readable=False)


def _resized(tag: Tag | None, shape: Sequence[int]) -> Tag | None:
    if tag is None or not tag.axes:
        return None
    return tag.map(lambda axis: axis.expand(list(shape)))


def _mix(follower: Follower, kernel: Kernel) -> Tags:
    """Mixes elements along some dimensions: those of a sum, the row of a softmax, the pixels of a pool."""
    data, *rest = kernel.arguments.values()
    for value in rest:
        # a sampling grid, say, that the model computed
        follower.bar(follower.tag(value), "says where to sample")
    tag = follower.tag(data)
    if tag is None:
        return all_whole(follower, kernel)
    rank, dim = data.dim(), kernel.arguments.get("dim")
    if pooled := re.search(r"([123])d", kernel.name):
        dims: Sequence[int] = range(rank - int(pooled[1]), rank)
    elif dim is None or dim == []:
        # left out, it is the last dimension for these two, and all dimensions for others, as in x.sum()
        dims = range(rank - 1 if kernel.name in {"sort", "topk"} else 0, rank)
    else:
        dims = [d % rank for d in ([dim] if isinstance(dim, int) else dim)]
    mixed = _mixed(follower, tag, dims, kernel.name.strip("_"))
    # without keepdim: the mixed dimensions, of size 1 by now, are dropped
    if kernel.results[0].dim() < rank:
        mixed = mixed.map(lambda axis: axis.squeeze(list(dims)))
    return [_resized(mixed, value.shape) for value in kernel.results]


def _glu(follower: Follower, kernel: Kernel) -> Tags:
    data, dim = kernel.arguments["self"], kernel.arguments.get("dim", -1)
    tag = follower.tag(data)
    # unit i of the first half is multiplied by a gate of unit i of the second: one neuron
    halves = [
        (tag and tag.map(lambda axis, part=part: axis.chunk(2, dim)[part]), data.chunk(2, dim)[part])  # type: ignore[misc]
        for part in (0, 1)
    ]
    return follower.combine(halves, kernel.shape)


def _scatter(follower: Follower, kernel: Kernel) -> Tags:
    """Rows are added or written to other rows, as messages to the nodes of a graph."""
    arguments, (result, *_) = kernel.arguments, kernel.results
    follower.bar(follower.tag(arguments["index"]), DECIDES)
    operands: list[tuple[Tag | None, Tensor]] = []
    dim = arguments["dim"] % result.dim()
    for value in (arguments["self"], arguments.get("src", arguments.get("source"))):
        tag = follower.tag(value)
        if tag is not None and isinstance(value, Tensor):
            # which rows meet depends on the index: any of them may
            operands.append((_mixed(follower, tag, [dim], "scatter"), value))
    shape = [1 if d == dim else size for d, size in enumerate(result.shape)]
    return _resized(follower.combine(operands, shape), result.shape)


def _norm(follower: Follower, kernel: Kernel) -> Tags:
    """BatchNorm, LayerNorm and GroupNorm mix over some dimensions; then every channel is scaled and shifted."""
    name, arguments = kernel.name.removeprefix("native_").replace("_", " "), kernel.arguments
    data, tag = arguments["input"], follower.tag(arguments["input"])
    if tag is None:
        return None
    channel, rank = 1, data.dim()
    if name == "group norm":
        label, (samples, channels) = follower.activation(tag, frozenset({1})), data.shape[:2]
        # (samples, groups, channels of a group)
        grouped = label.reshape(samples, channels, -1)[:, :, 0].unflatten(1, (arguments["group"], -1))
        mixed = follower.sets.mix(grouped, [2], name).expand_as(grouped).reshape(samples, channels)
        label = compact(mixed.view(samples, channels, *[1] * (rank - 2)).expand(data.shape))
    else:
        over = [dim for dim in range(rank) if dim != 1]
        if name == "layer norm":
            channel, over = -1, [*range(rank - len(arguments["normalized_shape"]), rank)]
        tag = _mixed(follower, tag, over, name).map(lambda axis: axis.expand(data.shape))
        if tag.weight:
            return [_resized(tag, data.shape), *[None] * (len(kernel.results) - 1)]
        label = tag.label
    for parameter in ("weight", "bias", "running_mean", "running_var"):
        scale = follower.tag(arguments.get(parameter))
        for axis in scale.axes if scale is not None else ():
            wide = spread(axis, channel, data.shape) if axis.dim() == 1 else axis.expand(data.shape)
            label = follower.merge(label, wide)
    # the other results are statistics saved for the backward pass
    return [Tag((label,)), *[follower.whole(value.shape) for value in kernel.results[1:]]]


_ELEMENTWISE = (
    "_prelu_kernel native_dropout where masked_fill lerp hardswish hardsigmoid softplus mish celu selu elu leaky_relu "
    "hardtanh hardshrink softshrink log_sigmoid_forward rrelu_with_noise threshold nan_to_num"
)
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

_TABLE: dict[Rule, str] = {
    _pointwise: "pointwise " + _ELEMENTWISE,
    _same: "clone _to_copy detach alias contiguous lift_fresh",
    _source: "copy",
    # bernoulli is dropout's mask
    _constant: "bernoulli " + _FRESH,
    # Python gets to see values: .item(), an if, boolean indexing
    _chooses: "_local_scalar_dense is_nonzero equal nonzero masked_select multinomial",
    _glu: "glu",
    _scatter: "scatter_add scatter scatter_reduce index_add index_reduce",
    _norm: "native_batch_norm native_layer_norm native_group_norm",
    _move: _MOVING,
    _mix: f"{_REDUCING} {_POOLING} _softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort topk",
}
RULES: dict[str, Rule] = {name: rule for rule, names in _TABLE.items() for name in names.split()} | PRODUCTS
