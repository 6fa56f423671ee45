"""A module as a function of its tensors, the samples of a step, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import grad_and_value

from fedpews.neurons.layers import groups_attribute, groups_left
from fedpews.torch_private import is_transformed, tree_map_only

SampleLoss = Callable[[Tensor, Tensor], Tensor]
SampleWeight = Callable[[Tensor], Tensor | None]
"""labels -> how much each sample weighs; None where all weigh the same."""

Term = Callable[[Tensor, Tensor], Tensor]
"""(features, outputs) -> one number per sample, or one for the batch."""


class Batch(NamedTuple):
    """Samples of one step. ``weight`` is 0 for padding, else 1; None when there is no padding."""

    x: Any  # a tensor, or a tuple or dict of tensors: the model's arguments
    y: Tensor
    weight: Tensor | None = None

    def mean(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """The mean of one value per sample, padding left out; a batch that weighs nothing has mean 0."""
        if weights is None:
            if self.weight is None:
                return values.mean()
            return (values * self.weight).sum() / self.weight.sum().clamp_min(1)
        if self.weight is not None:
            weights = weights * self.weight
        total = weights.sum()
        return (values * weights).sum() / torch.where(total > 0, total, 1)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample."""
    return F.cross_entropy(outputs, labels, reduction="none")


# a checkpoint computes a part again in the backward pass, when the module has its own weights back
CHECKPOINTING = (
    "activation checkpointing is not supported; switch it off (gradient_checkpointing_disable(), say)"
)


def differentiate(function: Callable[[Any], tuple[Tensor, Any]], at: Any) -> tuple[Tensor, Any, Any]:
    """Value, by-product and gradient of ``function(at) -> (value, by-product)``, for a tensor or a tree.

    >>> differentiate(lambda t: (t["w"].pow(2).sum(), None), {"w": torch.tensor([3.0])})
    (tensor(9.), None, {'w': tensor([6.])})
    """
    if is_transformed():
        gradient, (value, aux) = grad_and_value(function, has_aux=True)(at)
        return value, aux, gradient
    # plain autograd gives the same numbers at half the overhead
    one = isinstance(at, Tensor)
    leaves = [leaf.detach().requires_grad_() for leaf in ([at] if one else at.values())]
    with disable_saved_tensors_hooks(CHECKPOINTING):
        value, aux = function(leaves[0] if one else dict(zip(at, leaves, strict=True)))
    gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    detached = tree_map_only(Tensor, torch.Tensor.detach, aux)
    return value.detach(), detached, gradients[0] if one else dict(zip(at, gradients, strict=True))


TensorSlot = tuple[dict[str, Any], str]
"""A layer's own parameters, or its own buffers, and a name among them."""


class PureModule:
    """Calls a module with other tensors instead of its own, which are restored after the call.

    ``torch.func.functional_call`` does so too, but it finds every tensor's layer again at each call, which for a small
    network takes as long as half of the forward pass, and where one layer has two names it leaves the tensors of the
    call behind. While a call runs, no other thread may use the module.

    The tensors may be those of a smaller network: layers that have their channels in groups then have fewer of them.

    >>> import torch
    >>> layer = PureModule(nn.Linear(1, 1, bias=False))
    >>> layer({"weight": torch.tensor([[3.0]])}, (torch.tensor([[2.0]]),), {})
    tensor([[6.]])
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        by_tensor: dict[int, list[TensorSlot]] = {}
        self._slots: dict[str, list[TensorSlot]] = {}
        for prefix, layer in module.named_modules():
            for table in (layer._parameters, layer._buffers):
                for name, value in table.items():
                    if value is not None:
                        # a tensor that several layers share is swapped in all of them, under any of its names
                        slots = by_tensor.setdefault(id(value), [])
                        slots.append((table, name))
                        self._slots[f"{prefix}.{name}".lstrip(".")] = slots
        # layers with several groups, the attribute that counts them, and the number of channels
        self._grouped = [
            (layer, name, len(weight))
            for layer in module.modules()
            if (name := groups_attribute(layer)) is not None
            and getattr(layer, name) > 1
            and (weight := layer._parameters.get("weight")) is not None
        ]

    def __call__(self, values: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        swaps = [(table, name, value) for key, value in values.items() for table, name in self._slots[key]]
        own = [table[name] for table, name, _ in swaps]
        own_groups = [getattr(layer, attribute) for layer, attribute, _ in self._grouped]
        try:
            for table, name, value in swaps:
                table[name] = value
            # in a smaller network layers have fewer groups
            for layer, attribute, channels in self._grouped:
                left = len(layer._parameters["weight"])  # type: ignore[arg-type]
                if left != channels:
                    setattr(layer, attribute, groups_left(layer, left))
            return self.module(*args, **kwargs)
        finally:
            for (table, name, _), value in zip(swaps, own, strict=True):
                table[name] = value
            for (layer, attribute, _), count in zip(self._grouped, own_groups, strict=True):
                setattr(layer, attribute, count)
