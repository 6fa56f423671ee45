"""Follow every channel of every parameter through one pass of a model, kernel by kernel.

A label is one number for each element of a tensor: ``CONSTANT`` for what no input changes (or padding), ``WHOLE`` for
what depends on the input but belongs to no channel that could be masked, and from ``FIRST`` on the number of a channel
of some parameter. Labels are expanded tensors: a dimension along which they do not change has stride 0, so that the
labels of a large activation cost as much as a list of its channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedpews.neurons.channels import is_norm
from fedpews.torch_private import TorchDispatchMode, WeakTensorKeyDictionary, plain_kernels, tree_leaves

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

    def canonical(self, labels: Tensor) -> Tensor:
        """The labels with each number replaced by the one that stands for its set."""
        return self.find(core(labels)).expand(labels.shape)

    def varies(self, labels: Tensor) -> frozenset[int]:
        """The dimensions along which the sets change."""
        small = self.find(core(labels))
        return frozenset(
            dim
            for dim, size in enumerate(small.shape)
            if size > 1 and not torch.equal(small, small.narrow(dim, 0, 1).expand_as(small))
        )

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


def compact(labels: Tensor) -> Tensor:
    """The same labels, expanded along every dimension where they do not change."""
    small = core(labels)
    for dim, size in enumerate(small.shape):
        if size > 1:
            first = small.narrow(dim, 0, 1)
            if torch.equal(small, first.expand_as(small)):
                small = first
    if any(one < other for one, other in zip(small.shape, labels.shape, strict=True)):
        # a view would keep the full-size labels alive
        small = small.contiguous()
    return small.expand(labels.shape)


def spread(labels: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """One label per position of a dimension, expanded to a shape."""
    return labels.view([-1 if d == dim % len(shape) else 1 for d in range(len(shape))]).expand(list(shape))


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


@dataclass(frozen=True)
class Dimension:
    """Dimension ``dim`` of a parameter or buffer; its positions are numbered from ``first`` on."""

    name: str
    dim: int
    first: int
    size: int


class Channels:
    """The numbered channels of a model, and what one or several passes tell about them."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.modules = dict(model.named_modules())
        self._parameters = {name for name, _ in model.named_parameters()}
        self.dimensions: list[Dimension] = []
        self.tags: list[tuple[Tensor, Tag]] = []
        number = FIRST
        for name, value in tensors:
            axes = []
            # integer tensors (counters, index tables) hold no weights, so they have no channels
            for dim, size in enumerate(value.shape if value.is_floating_point() else ()):
                # a single position is the whole dimension, so it needs no number
                if size > 1:
                    axes.append(spread(torch.arange(number, number + size), dim, value.shape))
                    self.dimensions.append(Dimension(name, dim, number, size))
                    number += size
            if axes:
                self.tags.append((value, Tag(tuple(axes), weight=True)))
        self.sets = Sets(number)
        self.owned = torch.zeros(number, dtype=torch.bool)
        self.read = torch.zeros(number, dtype=torch.bool)
        # positions in ``dimensions``, in forward order (a dict is an ordered set)
        self.makers: dict[int, None] = {}
        # norm layer -> the label of each channel it was given, (channels,)
        self.norms: dict[str, Tensor] = {}
        # the modules that a pass entered, in their order; the last one is named when a pass fails
        self.entered: dict[str, None] = {}
        # parameters that no kernel has been given yet: a branch that the example does not take, say
        self.unreached = {id(value): name for name, value in model.named_parameters()}
        # modules in whose code one of those may be used, with the reason: all that they handle is left whole
        self.suspects: dict[str, str] = {}
        self._starts = torch.tensor([dimension.first for dimension in self.dimensions])

    def make(self, labels: Tensor) -> None:
        """These channels of a weight are where neurons are computed."""
        self.own(labels)
        for number in core(labels).unique().tolist():
            if number >= FIRST:
                # dimensions are numbered in turn: the last that starts at or below a number has it
                position = int(torch.searchsorted(self._starts, number, right=True)) - 1
                # a buffer is not trained, so no layer is named after it
                if self.dimensions[position].name in self._parameters:
                    self.makers.setdefault(position)

    def own(self, labels: Tensor) -> None:
        """These channels belong to a neuron, but do not read one."""
        self.owned[core(labels)] = True

    @contextmanager
    def following(self, rules: Mapping[str, Any]) -> Iterator[Follower]:
        """While this lasts, whatever the model computes is followed by the rules of each operation."""
        follower = Follower(self, rules)
        names = {module: name for name, module in self.modules.items()}

        def enter(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
            name = names[module]
            self.entered.pop(name, None)
            self.entered[name] = None
            follower.running.append(name)
            follower.handle((given, options))
            tag = (
                follower.tag(given[0]) if is_norm(module) and given and isinstance(given[0], Tensor) else None
            )
            if tag is not None and not tag.weight and given[0].dim() > 1:
                # (batch, channels, ...): one label for each channel is left
                others = [dim for dim in range(given[0].dim()) if dim != 1]
                self.norms[name] = self.sets.mix(tag.label, others, "norm").reshape(-1)

        def leave(module: nn.Module, given: Any, outputs: Any) -> None:
            # a module that raised what its caller caught never left
            while follower.running.pop() != names[module]:
                pass
            follower.handle(outputs)

        hooks = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in self.modules.values()]
        hooks += [m.register_forward_hook(leave) for m in self.modules.values()]
        # a fused kernel (attention, LSTM) would hide which channels meet inside it
        with plain_kernels(), torch.no_grad(), follower:
            try:
                yield follower
            finally:
                for hook in hooks:
                    hook.remove()


class Follower(TorchDispatchMode):
    """Gives a tag to all that is computed from tagged tensors, and joins the channels that meet on the way."""

    def __init__(self, channels: Channels, rules: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.channels, self.sets, self._rules = channels, channels.sets, rules
        # the modules whose code is running, the innermost last
        self.running: list[str] = []
        # weak keys: a label goes when its tensor does, so a pass needs no more memory than the model itself
        self._tags = WeakTensorKeyDictionary()
        for value, tag in channels.tags:
            self._tags[value] = tag

    def tag(self, value: Any) -> Tag | None:
        """What is known of a tensor; None for a constant, and for what is no tensor."""
        tag: Tag | None = self._tags.get(value) if isinstance(value, Tensor) else None
        return tag

    def feed(self, tensor: Tensor) -> None:
        """This is an input of the model."""
        self._tags[tensor] = self.whole(tensor.shape)

    def whole(self, shape: Sequence[int]) -> Tag:
        return Tag((torch.full((1,) * len(shape), WHOLE).expand(list(shape)),))

    def bar(self, tag: Tag | None, reason: str) -> None:
        """Nothing that is labelled here can be closed."""
        for axis in tag.axes if tag is not None else ():
            self.sets.bar(axis, reason)

    def handle(self, values: Any) -> None:
        """The running module gets to see these tensors."""
        reason = self.channels.suspects.get(self.running[-1]) if self.running else None
        if reason is not None:
            for value in tree_leaves(values):
                self.bar(self.tag(value), reason)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for value in given:
            self.channels.unreached.pop(id(value), None)
        if not any(self.tag(value) is not None for value in given):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        in_place = name.endswith("_") and func._schema.is_mutable
        before = self.tag(args[0]) if in_place else None
        outputs = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        # relu_ follows the rule of relu
        rule = self._rules.get(name[:-1] if in_place else name)
        # torch marks its elementwise kernels itself, so the table needs to list only those it does not mark
        if rule is None and torch.Tag.pointwise in func.tags:
            rule = self._rules["pointwise"]
        bound = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        # an empty tensor has no element that could carry a label
        if rule is None or any(value.numel() == 0 for value in (*given, *results[:1])):
            tags = self._unknown(name, given, results)
        else:
            tags = rule(self, func, bound, results)
        if in_place:
            self._rewrite(args[0], before, tags[0], name)
        else:
            for value, tag in zip(results, tags, strict=True):
                if tag is not None:
                    self._tags[value] = replace(tag, axes=tuple(compact(axis) for axis in tag.axes))
        self.handle((given, results))
        return outputs

    def _rewrite(self, value: Tensor, before: Tag | None, after: Tag | None, name: str) -> None:
        """A tensor was changed in place. What it is a view of would change too: only if the labels stay can it."""
        if value._is_view() and not self._same(before, after):
            self.bar(before, f"is overwritten in part ({name})")
            self.bar(after, f"is overwritten in part ({name})")
            after = self.whole(value.shape)
            base = value._base
            if base is not None:
                # the base changed with its view, so its labels hold no longer
                self._tags[base] = self.whole(base.shape)
        if after is not None:
            self._tags[value] = after
        elif before is not None:
            del self._tags[value]

    def _same(self, one: Tag | None, other: Tag | None) -> bool:
        if one is None or other is None:
            return one is other
        return len(one.axes) == len(other.axes) and all(
            torch.equal(self.sets.canonical(a), self.sets.canonical(b))
            for a, b in zip(one.axes, other.axes, strict=True)
        )

    def _unknown(self, name: str, given: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tag | None]:
        for value in given:
            self.bar(self.tag(value), f"passes through {name}")
        return [self.whole(value.shape) for value in results]

    # what the rules are made of

    def activation(self, tag: Tag, dims: frozenset[int]) -> Tensor:
        """A weight used as an activation: labelled along the dimensions where activations are, else not at all."""
        if not tag.weight:
            return tag.label
        chosen: Tensor | None = None
        for axis in tag.axes:
            if chosen is None and structure(axis) & dims:
                chosen = axis
                self.channels.own(axis)
            else:
                self.sets.bar(axis, "is no channel")
        return self.whole(tag.label.shape).label if chosen is None else chosen

    def merge(self, result: Tensor, other: Tensor, value: Tensor | None, weight: bool) -> Tensor:
        """The labels of an elementwise result of two operands that are labelled so.

        An operand that stays the same over different channels of the result ties none of them together: it cannot be
        closed itself, that is all. ``value`` is the other operand, ``weight`` whether it is one axis of a parameter.
        """
        # the dimensions along which the two operands have different channels
        dims, varies = self.sets.varies(result), structure(other) if weight else self.sets.varies(other)
        ours, theirs = self.sets.canonical(result), self.sets.canonical(other)
        # The other operand has no channels. If it is constant, or equal for all of ours, they stay as they are.
        if bool((core(theirs) < FIRST).all()):
            if bool((core(theirs) == CONSTANT).all()) or _same_along(value, dims, result.dim()):
                return result
        # We have no channels that the other's could become part of.
        elif bool((core(ours) < FIRST).all()) and (weight or bool((core(ours) == WHOLE).all())):
            self.sets.bar(other, "is bound to the model's input or to a layer left whole")
            return result
        elif (
            # equal for several of our channels: a position embedding's positions, attention over pixels
            (bool(dims) and not dims <= varies) if weight else _same_along(value, dims - varies, result.dim())
        ):
            self.sets.bar(other, "acts on whole layers at once")
            return result
        one, two = torch.broadcast_tensors(core(ours), core(theirs))
        if weight:
            self.channels.own(other)
        self.sets.join(one, two)
        # where one side cannot be closed, closing the other would leave a trace: both are left whole
        odd = ((one == WHOLE) & (two >= FIRST)) | ((two == WHOLE) & (one >= FIRST))
        if bool(odd.any()):
            self.sets.bar(
                torch.maximum(one, two)[odd], "is bound to the model's input or to a layer left whole"
            )
        merged = torch.where(odd, torch.full_like(one, WHOLE), torch.maximum(one, two))
        return merged.expand(result.shape)

    def combine(self, operands: Sequence[tuple[Tag | None, Tensor]], shape: Sequence[int]) -> Tag | None:
        """The tag of an elementwise result."""
        given = [(tag, value) for tag, value in operands if tag is not None]
        acts = [(tag.label.expand(list(shape)), value) for tag, value in given if not tag.weight]
        weights = [tag for tag, _ in given if tag.weight]
        if not acts:
            return self._combine_weights(weights, shape) if weights else None
        # the operand divided along most dimensions decides; of equals, one that has channels
        acts.sort(key=lambda act: (-len(self.sets.varies(act[0])), -int(core(act[0]).max() >= FIRST)))
        label = acts[0][0]
        for other, value in acts[1:]:
            label = self.merge(label, other, value, weight=False)
        for tag in weights:
            for axis in tag.axes:
                label = self.merge(label, axis.expand(list(shape)), None, weight=True)
        return Tag((label,))

    def _combine_weights(self, tags: Sequence[Tag], shape: Sequence[int]) -> Tag:
        axes: dict[frozenset[int], Tensor] = {}
        # parameters come before buffers, which have the higher numbers: what stands for the weight is trained
        for tag in sorted(tags, key=lambda tag: int(core(tag.label).min()) if tag.axes else 0):
            for axis in (axis.expand(list(shape)) for axis in tag.axes):
                # two parameters along one dimension (a weight and its scale) meet row by row: one channel
                if (dims := structure(axis)) in axes:
                    self.sets.join(core(axes[dims]), core(axis))
                    self.channels.own(axis)
                else:
                    axes[dims] = axis
        return Tag(tuple(axes.values()), weight=True, readable=all(tag.readable for tag in tags))


def structure(axis: Tensor) -> frozenset[int]:
    """The dimensions along which an axis of a weight runs."""
    return frozenset(dim for dim, size in enumerate(core(axis).shape) if size > 1)


def _same_along(value: Tensor | None, dims: frozenset[int], rank: int) -> bool:
    """Whether a value stays the same along dimensions of a result of this rank."""
    if value is None or not dims:
        return False
    # dimensions count from the right, as in broadcasting; one that the value lacks is the same everywhere
    for dim in (dim - (rank - value.dim()) for dim in dims):
        if dim >= 0 and value.shape[dim] > 1:
            first = value.narrow(dim, 0, 1).expand_as(value)
            # nan differs from itself, and says nothing here
            if not bool(((value == first) | (value != value)).all()):
                return False
    return True
