"""What a module needs before it can be seen as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from fedpews.errors import ConfigError
from fedpews.neurons.example import outputs_of, run
from fedpews.seeds import global_generator

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


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself; refused if a part of it is copied to other devices behind our back."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.DataParallel | DistributedDataParallel):
            raise ConfigError(
                f"{name or 'the model'} is wrapped in {type(layer).__name__}; give the module inside it (.module). "
                "runtime.device and torchrun say where clients train"
            )
    return module


def materialised(module: nn.Module, example: Any) -> nn.Module:
    """The module with its lazy layers (LazyLinear and the like) initialised, by a pass over the example.

    They are drawn by the values of the layers that are there, which come from the run's seed.
    """
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


def total(outputs: Any) -> Tensor:
    """One number that depends on all a model returned."""
    return torch.stack([value.sum() for value in outputs_of(outputs) if value.is_floating_point()]).sum()
