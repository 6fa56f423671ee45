"""A device that is not there: tensors of the CPU that are treated as if they lay on a GPU.

Inside ``OtherDevice`` a tensor moved or made with ``device=OTHER`` is on that device, and so is whatever is computed
from it. An operation that mixes it with a tensor that stayed behind is refused, as CUDA would refuse it (and somewhat
more strictly: an index on the CPU would be copied over in silence). What makes the CPU wait for the GPU is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

OTHER = torch.device("cuda:0")
"""Only the name: it can be had without a GPU."""

WAITS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "equal", "allclose", "numpy",
    "masked_select", "bincount", "argwhere", "__array__",
}  # fmt: skip
"""What the CPU waits for, because it needs a value or a shape that depends on values."""

NO_SINGLE_NUMBERS = {
    "stack", "cat", "where", "index_select", "index_copy", "index_copy_", "index_fill", "masked_scatter_", "linear",
    "conv2d", "matmul", "__matmul__", "mm", "bmm", "expand_as", "broadcast_tensors", "__getitem__", "__setitem__",
}  # fmt: skip
"""Operations that, unlike arithmetic, take no single number from the CPU along."""


NEUTRAL = {"__get__", "__set__", "size", "dim", "numel", "stride", "_has_compatible_shallow_copy_type"}
"""Questions about a tensor, and what ``Module.to`` asks of two."""


class DeviceMixed(AssertionError):
    """Tensors of two devices in one operation."""


class OtherDevice(TorchFunctionMode):
    """While this lasts, ``OTHER`` exists in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, Tensor] = {}  # by their memory; kept, so that none is given out twice
        self.waits: list[str] = []

    def is_there(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._there

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        full = resolve_name(func) or name
        given = list(tensors((args, kwargs)))
        there = [tensor for tensor in given if self.is_there(tensor)]
        if full.endswith("device.__get__"):
            return OTHER if there else torch.device("cpu")
        if name in NEUTRAL:
            return self._mark(func(*args, **kwargs), bool(there))
        target, args, kwargs = self._target(name, args, kwargs)
        if name in ("to", "cpu", "copy_", "cuda"):
            return self._move(func, name, args, kwargs, target, there)
        if there and name in WAITS:
            self.waits.append(name)
            if name in ("numpy", "__array__"):
                raise DeviceMixed(f"{full} of a tensor that is not on the CPU")
        if target == OTHER and kwargs.get("generator") is not None:
            raise DeviceMixed(f"{full}: a generator of the CPU draws on the CPU only")
        left = [tensor for tensor in given if not self.is_there(tensor) and tensor.numel() > 0]
        if there and left and (name in NO_SINGLE_NUMBERS or any(tensor.dim() for tensor in left)):
            shapes = [tuple(tensor.shape) for tensor in left]
            raise DeviceMixed(f"{full} mixes tensors of the other device with {shapes} on the CPU")
        return self._mark(func(*args, **kwargs), bool(there) or target == OTHER)

    def _target(self, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """The device that was asked for, and the call with the CPU in its place."""
        target = None
        if kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            kwargs["device"] = "cpu"
        if name == "to":
            for place, value in enumerate(args[1:], 1):
                if isinstance(value, torch.device | str):
                    target = torch.device(value)
                    args = (*args[:place], torch.device("cpu"), *args[place + 1 :])
                elif isinstance(value, Tensor):
                    target = OTHER if self.is_there(value) else torch.device("cpu")
        return target, args, kwargs

    def _move(self, func: Any, name: str, args: Any, kwargs: Any, target: Any, there: list[Tensor]) -> Any:
        was_there = self.is_there(args[0])
        if name == "copy_":
            return func(*args, **kwargs)
        if name == "cpu":
            target = torch.device("cpu")
        goes = was_there if target is None else target.type != "cpu"
        if was_there and not goes:
            self.waits.append(name)
        with torch._C.DisableTorchFunction():
            moved = func(*args, **kwargs)
            if goes != was_there:
                moved = moved.clone()
        return self._mark(moved, goes)

    def _mark(self, result: Any, there: bool) -> Any:
        if there:
            with torch._C.DisableTorchFunction():
                for tensor in tensors(result):
                    if tensor.numel():
                        self._there[tensor.untyped_storage().data_ptr()] = tensor
        return result


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
