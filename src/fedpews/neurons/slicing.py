"""The physically smaller network: a module without some of its neurons."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedpews.errors import ConfigError
from fedpews.neurons.channels import groups_left
from fedpews.neurons.graph import NeuronGraph


def slice_module(model: nn.Module, graph: NeuronGraph, neurons: Tensor) -> nn.Module:
    """A deep copy of the model with the closed neurons physically removed.

    ``neurons`` is (h,) boolean; every layer of the graph must keep at least one.

    >>> import torch
    >>> from fedpews.neurons import Hidden
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> graph = NeuronGraph.by_hand(model, [Hidden("0", read_by=["2"])])
    >>> slice_module(model, graph, torch.tensor([True, False, True]))
    Sequential(
      (0): Linear(in_features=2, out_features=2, bias=True)
      (1): ReLU()
      (2): Linear(in_features=2, out_features=1, bias=True)
    )
    """
    for layer in graph.layers:
        if layer.name in graph.uncut and not bool(neurons[layer.start : layer.start + layer.size].all()):
            raise ConfigError(
                f"the neurons of layer {layer.name!r} can be masked but not removed: the model's code has their "
                "number written into it."
            )
    memo = _computed(model)  # what the deep copy takes instead of copying
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name in graph.axes:
            sliced = graph.slice({name: value.detach()}, neurons)[name]
            is_parameter = isinstance(value, nn.Parameter)
            memo[id(value)] = nn.Parameter(sliced, value.requires_grad) if is_parameter else sliced
    model = copy.deepcopy(model, memo)
    for name, module in model.named_modules():
        if name in graph.norms:
            channels = graph.norms[name]
            kept = int((neurons[channels.clamp(min=0)] | (channels < 0)).sum())
            if isinstance(module, nn.GroupNorm):
                module.num_groups, module.num_channels = groups_left(module, kept), kept
            elif isinstance(module, _NormBase):
                module.num_features = kept
        else:
            _resize(module)
    return model


def copy_module(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that keeps computed tensors (old-style weight_norm, pruning)."""
    return copy.deepcopy(model, _computed(model))


def _computed(model: nn.Module) -> dict[int, Any]:
    """A deep copy's memo with the tensors it would refuse: those that hang on the computation they come from."""
    return {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }


def _resize(module: nn.Module) -> None:
    """Make a layer's stated sizes agree with its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _ConvNd):
        first, second = module.weight.shape[:2]
        if module.groups > 1:
            module.groups = groups_left(module, first)
        if module.transposed:
            module.in_channels, module.out_channels = first, second * module.groups
        else:
            module.out_channels, module.in_channels = first, second * module.groups
    elif isinstance(module, nn.PReLU):
        module.num_parameters = module.weight.shape[0]
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(getattr(module, "nf", None), int) and isinstance(
        weight := getattr(module, "weight", None), Tensor
    ):
        vars(module)["nf"] = weight.shape[1]  # Hugging Face's Conv1D, a linear layer the other way round
