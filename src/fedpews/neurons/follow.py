"""Follow every channel of every parameter through one pass of a model, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedpews.neurons.labels import (
    CONSTANT,
    FIRST,
    WHOLE,
    Dimension,
    Sets,
    Tag,
    compact,
    constant,
    core,
    dims_of,
    spread,
)
from fedpews.neurons.layers import is_norm
from fedpews.torch_private import TorchDispatchMode, WeakTensorKeyDictionary, plain_kernels, tree_leaves

BOUND = "is bound to the model's input or to a layer left whole"


@dataclass(frozen=True)
class Kernel:
    """One call of a kernel: its arguments by name, and the tensors it returned."""

    name: str
    function: Any
    arguments: dict[str, Any]
    results: list[Tensor]

    @property
    def shape(self) -> torch.Size:
        return self.results[0].shape


Tags = Tag | list[Tag | None] | None
"""One for each result of a kernel, or one for all."""

Rule = Callable[["Follower", Kernel], Tags]


class Follower(TorchDispatchMode):
    """Gives a tag to all that a model computes, and joins the channels that meet on the way.

    It may follow several passes; what it knows of the channels adds up. The model gets hooks that stay, so it is a
    copy that nothing else uses.
    """

    def __init__(self, model: nn.Module, rules: Mapping[str, Rule]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules = rules
        # weak keys: a label goes when its tensor does, so a pass needs no more memory than the model itself
        self._tags = WeakTensorKeyDictionary()
        self._parameters = {name for name, _ in model.named_parameters()}
        self.dimensions: list[Dimension] = []
        self._weights: list[tuple[Tensor, Tag]] = []
        number = FIRST
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            axes = []
            # integer tensors (counters, index tables) hold no weights, so they have no channels
            for dim, size in enumerate(value.shape if value.is_floating_point() else ()):
                # a single position is the whole dimension, so it needs no number
                if size > 1:
                    axes.append(spread(torch.arange(number, number + size), dim, value.shape))
                    self.dimensions.append(Dimension(name, dim, number, size))
                    number += size
            if axes:
                self._weights.append((value, Tag(tuple(axes), weight=True)))
        self._starts = torch.tensor([dimension.first for dimension in self.dimensions])
        self.sets = Sets(number)
        # channels that belong to a neuron, and channels that read one
        self.owned = torch.zeros(number, dtype=torch.bool)
        self.read = torch.zeros(number, dtype=torch.bool)
        # the dimensions that compute neurons, in forward order (a dict is an ordered set)
        self.makers: dict[Dimension, None] = {}
        # norm layer -> the label of each of its input channels, (channels,)
        self.norms: dict[str, Tensor] = {}
        # the modules that a pass entered, in their order; the last one is named when a pass fails
        self.entered: dict[str, None] = {}
        # parameters that no kernel has used yet: those of a branch that the example does not take, say
        self.unreached = {id(value): name for name, value in model.named_parameters()}
        # modules in whose code one of those may be used, with the reason: all tensors that they see are left whole
        self.suspects: dict[str, str] = {}
        # the modules whose code is running, the innermost last
        self._running: list[str] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, name))

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.entered.pop(name, None)
        self.entered[name] = None
        self._running.append(name)
        self._see((args, kwargs))
        tag = self.tag(args[0]) if is_norm(module) and args else None
        if tag is not None and not tag.weight and tag.label.dim() > 1:
            # (batch, channels, ...): one label for each channel is left
            others = [dim for dim in range(tag.label.dim()) if dim != 1]
            self.norms[name] = self.sets.mix(tag.label, others, "norm").reshape(-1)

    def _leave(self, name: str, module: nn.Module, args: Any, outputs: Any) -> None:
        # a module that raised what its caller caught never left
        while self._running.pop() != name:
            pass
        self._see(outputs)

    def _see(self, values: Any) -> None:
        """The code of the running module has these tensors."""
        reason = self.suspects.get(self._running[-1]) if self._running else None
        if reason is not None:
            for value in tree_leaves(values):
                self.bar(self.tag(value), reason)

    @contextmanager
    def following(self) -> Iterator[None]:
        """While this lasts, whatever the model computes is followed by the rules of each operation."""
        self._tags.clear()
        self._running.clear()
        for value, tag in self._weights:
            self._tags[value] = tag
        # a fused kernel (attention, LSTM) would hide which channels meet inside it
        with plain_kernels(), torch.no_grad(), self:
            yield

    def make(self, labels: Tensor) -> None:
        """These channels of a weight compute neurons."""
        self.own(labels)
        for number in core(labels).unique().tolist():
            if number >= FIRST:
                # dimensions are numbered in turn: the last that starts at or below a number has it
                dimension = self.dimensions[int(torch.searchsorted(self._starts, number, right=True)) - 1]
                # a buffer is not trained, so no layer is named after it
                if dimension.name in self._parameters:
                    self.makers.setdefault(dimension)

    def own(self, labels: Tensor) -> None:
        """These channels belong to a neuron, but do not read one."""
        self.owned[core(labels)] = True

    def tag(self, value: Any) -> Tag | None:
        """What is known of a tensor; None for a constant, and for what is no tensor."""
        tag = self._tags.get(value) if isinstance(value, Tensor) else None
        if isinstance(tag, partial):
            tag = tag()
            self._set(value, tag)
        known: Tag | None = tag
        return known

    def feed(self, tensor: Tensor) -> None:
        """This is an input of the model."""
        self._tags[tensor] = self.whole(tensor.shape)

    def whole(self, shape: Sequence[int]) -> Tag:
        return Tag((constant(WHOLE, shape),))

    def bar(self, tag: Tag | None, reason: str) -> None:
        """Nothing that is labelled here can be closed."""
        for axis in tag.axes if tag is not None else ():
            self.sets.bar(axis, reason)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for value in given:
            self.unreached.pop(id(value), None)
        if not any(self.tag(value) is not None for value in given):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        in_place = name.endswith("_") and func._schema.is_mutable
        before = self.tag(args[0]) if in_place else None
        outputs = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        # relu_ follows the rule of relu
        kernel = Kernel(name[:-1] if in_place else name, func, arguments, results)
        rule = self._rules.get(kernel.name)
        # torch marks its elementwise kernels itself, so the table needs to list only those it does not mark
        if rule is None and torch.Tag.pointwise in func.tags:
            rule = self._rules["pointwise"]
        # an empty tensor has no element that could carry a label
        if rule is None or any(value.numel() == 0 for value in (*given, *results[:1])):
            for value in given:
                self.bar(self.tag(value), f"passes through {name}")
            rule = all_whole
        if name == "mean":
            # It binds what it averages only when something reads it: torch's attention averages its weights over all
            # heads, and most models drop the result.
            self._tags[outputs] = partial(_only, rule, self, kernel)
        else:
            tags = rule(self, kernel)
            tags = tags if isinstance(tags, list) else [tags] * len(results)
            if in_place:
                self._rewrite(args[0], before, tags[0], name)
            else:
                for value, tag in zip(results, tags, strict=True):
                    self._set(value, tag)
        self._see((given, results))
        return outputs

    def _set(self, value: Tensor, tag: Tag | None) -> None:
        # without an axis it is a single number of a parameter, which counts as a constant
        if tag is not None and tag.axes:
            self._tags[value] = tag.map(compact)
        else:
            self._tags.pop(value, None)

    def _rewrite(self, value: Tensor, before: Tag | None, after: Tag | None, name: str) -> None:
        """A tensor was changed in place. What it is a view of changes too, which works only if the labels stay."""
        if value._is_view() and not self._same(before, after):
            self.bar(before, f"is overwritten in part ({name})")
            self.bar(after, f"is overwritten in part ({name})")
            after = self.whole(value.shape)
            base = value._base
            if base is not None:
                self._tags[base] = self.whole(base.shape)
        if after is not None:
            self._tags[value] = after
        elif before is not None:
            del self._tags[value]

    def _same(self, one: Tag | None, other: Tag | None) -> bool:
        if one is None or other is None:
            return one is other
        return len(one.axes) == len(other.axes) and all(
            torch.equal(self.sets.find(a), self.sets.find(b))
            for a, b in zip(one.axes, other.axes, strict=True)
        )

    # what the rules are made of

    def activation(self, tag: Tag, dims: frozenset[int]) -> Tensor:
        """A weight used as an activation: labelled along the dimensions where activations are, else not at all."""
        if not tag.weight:
            return tag.label
        chosen: Tensor | None = None
        for axis in tag.axes:
            if chosen is None and dims_of(axis) & dims:
                chosen = axis
                self.own(axis)
            else:
                self.sets.bar(axis, "is no channel")
        return self.whole(tag.label.shape).label if chosen is None else chosen

    def merge(self, result: Tensor, other: Tensor, value: Tensor | None = None) -> Tensor:
        """The labels of an elementwise result of two operands that are labelled so.

        An operand that stays the same over different channels of the result ties none of them together: it cannot be
        closed itself, that is all. ``value`` is the other operand, None if it is one axis of a parameter.
        """
        weight = value is None
        # the dimensions along which the two operands have different channels
        dims, varies = self.sets.varies(result), dims_of(other) if weight else self.sets.varies(other)
        ours, theirs = self.sets.find(core(result)), self.sets.find(core(other))
        # The other operand has no channels. If it is constant, or equal for all of ours, they stay as they are.
        if bool((theirs < FIRST).all()):
            if bool((theirs == CONSTANT).all()) or _same_along(value, dims, result.dim()):
                return result
        # We have no channels that the other's could become part of.
        elif bool((ours < FIRST).all()) and (weight or bool((ours == WHOLE).all())):
            self.sets.bar(other, BOUND)
            return result
        elif (
            # equal for several of our channels: a position embedding's positions, attention over pixels
            (bool(dims) and not dims <= varies) if weight else _same_along(value, dims - varies, result.dim())
        ):
            self.sets.bar(other, "acts on whole layers at once")
            return result
        if weight:
            self.own(other)
        return self.unite(ours, theirs, BOUND).expand(result.shape)

    def unite(self, one: Tensor, other: Tensor, reason: str) -> Tensor:
        """Join two labels element by element; where only one of them can be closed, both are left whole."""
        one, other = torch.broadcast_tensors(one, other)
        self.sets.join(one, other)
        most = torch.maximum(one, other)
        odd = (most >= FIRST) & (torch.minimum(one, other) == WHOLE)
        self.sets.bar(most[odd], reason)
        return torch.where(odd, torch.full_like(one, WHOLE), most)

    def combine(self, operands: Sequence[tuple[Tag | None, Tensor]], shape: Sequence[int]) -> Tag | None:
        """The tag of an elementwise result."""
        tagged = [(tag.map(lambda axis: axis.expand(list(shape))), value) for tag, value in operands if tag]
        acts = [(tag.label, value) for tag, value in tagged if not tag.weight]
        weights = [tag for tag, _ in tagged if tag.weight]
        if not acts:
            return self._combine_weights(weights) if weights else None
        # the operand divided along most dimensions decides; of equals, one that has channels
        acts.sort(key=lambda act: (-len(self.sets.varies(act[0])), -int(core(act[0]).max() >= FIRST)))
        label = acts[0][0]
        for other, value in acts[1:]:
            label = self.merge(label, other, value)
        for tag in weights:
            for axis in tag.axes:
                label = self.merge(label, axis)
        return Tag((label,))

    def _combine_weights(self, tags: Sequence[Tag]) -> Tag:
        axes: dict[frozenset[int], Tensor] = {}
        # parameters come before buffers, which have the higher numbers: what stands for the weight is trained
        for tag in sorted(tags, key=lambda tag: int(core(tag.label).min()) if tag.axes else 0):
            for axis in tag.axes:
                # two parameters along one dimension (a weight and its scale) meet row by row: one channel
                if (dims := dims_of(axis)) in axes:
                    self.sets.join(core(axes[dims]), core(axis))
                    self.own(axis)
                else:
                    axes[dims] = axis
        return Tag(tuple(axes.values()), weight=True, readable=all(tag.readable for tag in tags))


def _only(rule: Rule, follower: Follower, kernel: Kernel) -> Tag | None:
    """The tag of a kernel's only result."""
    tags = rule(follower, kernel)
    return tags[0] if isinstance(tags, list) else tags


def all_whole(follower: Follower, kernel: Kernel) -> Tags:
    """The rule of a result that belongs to no channel."""
    return [follower.whole(value.shape) for value in kernel.results]


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
