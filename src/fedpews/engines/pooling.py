"""Max pooling over 2×2 windows on the CPU, in C.

torch's kernel takes one float at a time where images are not channels last, keeps the position of every maximum as a
64-bit number, and in the backward pass clears the whole image before it writes a quarter of it. For the paper's image
network that is a ninth of a step. These functions write every number once and give the same numbers to the bit.
"""

from __future__ import annotations

import ctypes
import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedpews.engines.compiled.cache import c_library
from fedpews.engines.compiled.program import CannotCompile
from fedpews.neurons.network import Network
from fedpews.torch_private import is_transformed

WORTH = 2**14
"""Elements from which a kernel of our own saves more than its call costs."""


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled functions, or None where they cannot be compiled."""
    # not the compiler of the compiled engine: asking torch for it takes most of a second
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source = files(__package__).joinpath("pooling.c").read_text(encoding="utf-8")
    try:
        return ctypes.CDLL(str(c_library("pooling", source, compiler, "-O3", "-march=native")))
    except (CannotCompile, OSError):
        return None


def _run(name: str, tensors: tuple[Tensor, Tensor, Tensor], shape: torch.Size, *, last: bool) -> None:
    count, channels, height, width = shape
    sizes = (count, height, width, channels) if last else (count * channels, height, width, 1)
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    getattr(_library(), name)(*pointers, *map(ctypes.c_long, sizes))


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        last = not x.is_contiguous()
        layout = torch.channels_last if last else torch.contiguous_format
        out = torch.empty((count, channels, height // 2, width // 2), memory_format=layout)
        which = torch.empty(out.shape, dtype=torch.uint8, memory_format=layout)
        _run("forward", (x, out, which), x.shape, last=last)
        ctx.save_for_backward(which)
        ctx.shape, ctx.layout = x.shape, layout
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (which,), (slope,) = ctx.saved_tensors, slopes
        x = torch.empty(ctx.shape, memory_format=ctx.layout)
        slope = slope.contiguous(memory_format=ctx.layout)
        _run("backward", (slope, which, x), ctx.shape, last=ctx.layout is torch.channels_last)
        return x


def fits(x: Any, size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, **rest: Any) -> bool:
    """Whether a call of ``max_pool2d`` is one that the functions above compute."""
    windows = (size, size if stride is None else stride)
    return (
        isinstance(x, Tensor)
        and all(window in (2, (2, 2), [2, 2]) for window in windows)
        and padding in (0, (0, 0), [0, 0])
        and dilation in (1, (1, 1), [1, 1])
        and not any(rest.values())
        and x.dim() == 4
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and min(x.shape[2:]) > 1
        and x.numel() >= WORTH
        and (x.is_contiguous() or (x.shape[1] > 3 and x.is_contiguous(memory_format=torch.channels_last)))
        and not is_transformed()
    )


class _FastPooling(TorchFunctionMode):
    """While it is active in a thread, ``max_pool2d`` calls the functions above where they fit."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.max_pool2d and fits(*args, **kwargs):
            pool: Any = _MaxPool.apply
            return pool(args[0])
        return func(*args, **kwargs)


def fast_pooling(net: Network) -> AbstractContextManager[Any]:
    """A context in which the network's pooling is fast, if it has any."""
    is_used = net.device.type == "cpu" and net.pools and _library() is not None
    return _FastPooling() if is_used else nullcontext()
