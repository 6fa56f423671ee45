"""Any module: run on an example, copied, prepared, and cut down to some of its neurons."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from fedpews.errors import ConfigError
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.layers import groups_left
from fedpews.seeds import global_generator
from fedpews.torch_private import tree_leaves, tree_map_only
from fedpews.trees import Tree


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as (args, kwargs) of a call; a tuple or dict holds the model's arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def run(model: nn.Module, example: Any) -> Any:
    """The model's outputs."""
    args, kwargs = arguments(example)
    return model(*args, **kwargs)


def tensors_of(module: nn.Module) -> Tree:
    """The module's parameters and buffers."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: value.detach() for name, value in tensors.items()}


def outputs_of(value: Any) -> list[Tensor]:
    """Every tensor in what a model returned."""
    tensors = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf) or hasattr(leaf, "logits"):
            tensors += [part for part in vars(leaf).values() if isinstance(part, Tensor)]
    return tensors


def batches(model: nn.Module, example: Any) -> tuple[list[Any], list[Any]]:
    """Small batches like the example: one for evaluation, and one for training if the model can do that.

    In training a norm over the batch needs several samples that differ.
    """
    generator = torch.Generator().manual_seed(0)
    training = model.training

    def eight(value: Tensor) -> Tensor:
        """Eight samples near the example's own."""
        if value.dim() == 0:
            return value
        value = value.detach().repeat(-(-8 // max(1, len(value))), *[1] * (value.dim() - 1))[:8]
        if value.is_floating_point():
            return value + 0.5 * torch.randn(value.shape, generator=generator).to(value)
        return value

    def runs(batch: Any) -> bool:
        try:
            with torch.no_grad(), global_generator():
                run(model, batch)
        except Exception:  # noqa: BLE001  whatever keeps a foreign model from running on this batch
            return False
        return True

    model.eval()
    few = tree_map_only(Tensor, lambda value: value[:2] if value.dim() else value, example)
    # the first dimension is not the batch
    if not runs(few):
        few = example
        with torch.no_grad():
            run(model, few)
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]  # a norm writes its statistics in place
    model.train()
    many = [tree_map_only(Tensor, eight, example), example]
    able = [batch for batch in many if runs(batch)][:1]
    for buffer, value in before:
        buffer.copy_(value)
    model.train(training)
    return [few], able


def main_output(value: Any) -> Tensor:
    """The tensor of which the loss is computed: ``logits`` (or ``out``, as torchvision says), else the first tensor.

    >>> import torch
    >>> main_output({"aux": torch.ones(1), "logits": torch.zeros(1)}), main_output((torch.ones(2), None))
    (tensor([0.]), tensor([1., 1.]))
    """
    if isinstance(value, Tensor):
        return value
    candidates = [getattr(value, "logits", None)]
    if isinstance(value, Mapping):
        candidates += [*map(value.get, ("logits", "out", "output")), *value.values()]
    elif isinstance(value, tuple | list):
        candidates += value
    for candidate in candidates:
        if isinstance(candidate, Tensor):
            return candidate
    raise TypeError(
        f"the model returns a {type(value).__name__} in which there is no tensor; return a tensor, a tuple whose "
        "first entry is one, a dict with 'logits', or an object with .logits"
    )


def random_inputs(example: Any) -> Any:
    """Two inputs like the example: random numbers, and the example's tokens."""
    generator = torch.Generator().manual_seed(0)

    def make(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf[:1].expand(2, *leaf.shape[1:])
        return torch.rand(2, *leaf.shape[1:], generator=generator).to(leaf)

    return tree_map_only(Tensor, make, example)


def doubled(leaf: Tensor) -> Tensor:
    """Numbers in double precision; tokens stay what they are."""
    return leaf.double() if leaf.is_floating_point() else leaf


T = TypeVar("T")


class cached(cached_property[T]):  # noqa: N801  used as the function that it extends
    """A cached property without the lock that Python 3.11 computes it under.

    A thread that uses torch's generator and waits for this lock would never get it from a thread that computes the
    property and waits for the generator.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        super().__init__(compute)
        self.lock = nullcontext()


def batch_counters(module: nn.Module) -> set[str]:
    """The counts of batches that decide something: of norm layers without a momentum, which average over all."""
    return {
        f"{name}.num_batches_tracked".lstrip(".")
        for name, layer in module.named_modules()
        if getattr(layer, "momentum", 0) is None and getattr(layer, "num_batches_tracked", None) is not None
    }


def frozen_norms(module: nn.Module) -> frozenset[str]:
    """The norms whose parameters are all frozen: they run as in evaluation, and keep their statistics."""
    return frozenset(
        name
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        and any(True for _ in layer.parameters())
        and not any(value.requires_grad for value in layer.parameters())
    )


def prepared(module: nn.Module, example: Any) -> nn.Module:
    """A copy of the module whose lazy layers (LazyLinear and the like) are initialised, by a pass over the example.

    They are drawn by the values of the layers that are there, which come from the run's seed. A module that copies
    itself to other devices is refused.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.DataParallel | DistributedDataParallel):
            raise ConfigError(
                f"{name or 'the model'} is wrapped in {type(layer).__name__}; give the module inside it (.module). "
                "runtime.device and torchrun say where clients train"
            )
    module = copy_module(module)
    known = [value for value in module.parameters() if not isinstance(value, UninitializedParameter)]
    if len(known) < len(list(module.parameters())):
        training = module.training
        seed = int(1e6 * sum(float(value.detach().double().abs().sum()) for value in known))
        with torch.no_grad(), global_generator(seed):
            run(module.eval(), example)
        module.train(training)
    return module


def channels_last(value: Tensor) -> Tensor:
    """A tensor of images laid out channels last; any other as it is."""
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def trains_channels_last(module: nn.Module) -> bool:
    """Whether torch's convolutions train correctly in that order.

    The gradient of a strided 1×1 convolution on few channels (a masked network may have few) then writes past
    its workspace, with wrong numbers, a hang or a crash: uxlfoundation/oneDNN#6035.
    """
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    return not any(max(conv.kernel_size) == 1 < max(conv.stride) for conv in convolutions)


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
        if layer.name in graph.uncut and not bool(neurons[layer.neurons].all()):
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
