"""Any module: run on an example, copied, prepared; as a function of its tensors, with gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import grad_and_value
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from fedpews.errors import ConfigError
from fedpews.neurons.layers import Attention, groups_attribute, groups_left
from fedpews.seeds import global_generator
from fedpews.torch_private import is_transformed, tree_leaves, tree_map_only
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


def copy_module(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that keeps computed tensors (old-style weight_norm, pruning)."""
    return copy.deepcopy(model, computed_tensors(model))


def sharing_parameters(model: nn.Module) -> nn.Module:
    """A copy that has the model's own parameters, not copies of them: for calls that swap them for others."""
    return copy.deepcopy(model, computed_tensors(model) | {id(value): value for value in model.parameters()})


def computed_tensors(model: nn.Module) -> dict[int, Any]:
    """A deep copy's memo with the tensors it would refuse: those that hang on the computation they come from."""
    return {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }


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


def pick_channels(x: Tensor, channels: Tensor) -> Tensor:
    """These channels of images, in the images' own layout, which ``index_select`` would change."""
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return x.index_select(1, channels)
    pixels = x.permute(0, 2, 3, 1)  # (samples, height, width, channels)
    picked = pixels.reshape(-1, x.shape[1]).index_select(1, channels)
    return picked.view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)


def round_up(channels: Tensor, size: int) -> Tensor:
    """These of ``size`` channels, in order, with a few others, so that their number is a multiple of 8.

    oneDNN compiles a kernel for each shape and keeps 1,024 of them. Masks that are drawn in every step would need more.

    >>> round_up(torch.tensor([1, 4]), 16)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    more = -len(channels) % 8
    if not more:
        return channels
    others = torch.ones(size, dtype=torch.bool).index_fill(0, channels, False).nonzero()[:, 0]
    return torch.cat([channels, others[:more]]).sort().values


class GatedConvolution(torch.autograd.Function):
    """A convolution of ``gates ⊙ x`` by constant weights, in half the products if half of the neurons are closed.

    Closed inputs add nothing to the outputs, and closed outputs have no gradient, so both are left out. The gates still
    get all of their gradient, that of the closed ones too.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, layer: nn.Conv2d, inputs: Tensor, outputs: Tensor
    ) -> Tensor:
        """``gates`` has one factor for each input channel; ``inputs`` and ``outputs`` hold all open channels."""
        ctx.save_for_backward(x, gates, layer.weight, outputs)
        ctx.geometry = layer.stride, layer.padding, layer.dilation
        factors = gates.index_select(0, inputs).view(-1, 1, 1)
        weight = pick_channels(layer.weight, inputs) * factors
        return F.conv2d(pick_channels(x, inputs), weight, layer.bias, *ctx.geometry)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, weight, outputs = ctx.saved_tensors
        slope, rows = pick_channels(slopes[0], outputs), weight.index_select(0, outputs)
        by_input, _, _ = torch.ops.aten.convolution_backward(
            slope, x, rows, None, *ctx.geometry, False, [0, 0], 1, [True, False, False]
        )
        by_gates = (by_input * x).sum((0, 2, 3))
        return by_input * gates.view(-1, 1, 1), by_gates, None, None, None


class Calls(TorchFunctionMode):
    """Notes which of torch's functions are called while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.add(func)
        return func(*args, **(kwargs or {}))


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
        for layer in module.modules():
            Attention.replace(layer)
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
