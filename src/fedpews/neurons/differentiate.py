"""Values and gradients of functions of named tensors, inside a transform and outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import grad_and_value

from fedpews.torch_private import is_transformed, tree_map_only

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
