"""A module as a function of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fedpews.neurons.channels import groups, groups_left

Place = tuple[dict[str, Any], str]
"""A layer's own parameters, or its own buffers, and a name among them."""


class PureModule:
    """Calls a module with other tensors in the place of its own, which are back when the call is over.

    ``torch.func.functional_call`` does so too, but it finds every tensor's layer again at each call, which for a small
    network takes as long as half of the forward pass, and where one layer has two names it leaves the tensors of the
    call behind. While a call runs, nobody else may use the module.

    The tensors may be those of a smaller network: layers that have their channels in groups then have fewer of them.

    >>> import torch
    >>> layer = PureModule(nn.Linear(1, 1, bias=False))
    >>> layer({"weight": torch.tensor([[3.0]])}, (torch.tensor([[2.0]]),), {})
    tensor([[6.]])
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        by_tensor: dict[int, list[Place]] = {}
        self._places: dict[str, list[Place]] = {}
        for prefix, layer in module.named_modules():
            for table in (layer._parameters, layer._buffers):
                for name, value in table.items():
                    if value is not None:
                        # a tensor that several layers share is swapped in all of them, under any of its names
                        places = by_tensor.setdefault(id(value), [])
                        places.append((table, name))
                        self._places[f"{prefix}.{name}".lstrip(".")] = places
        # of each layer with groups, where it says how many, and its channels
        self._grouped = [
            (layer, "num_groups" if isinstance(layer, nn.GroupNorm) else "groups", len(weight))
            for layer in module.modules()
            if (groups(layer) or 1) > 1 and (weight := layer._parameters.get("weight")) is not None
        ]

    def __call__(self, values: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        swaps = [(table, name, value) for key, value in values.items() for table, name in self._places[key]]
        own = [table[name] for table, name, _ in swaps]
        try:
            for table, name, value in swaps:
                table[name] = value
            with self._resized():
                return self.module(*args, **kwargs)
        finally:
            for (table, name, _), value in zip(swaps, own, strict=True):
                table[name] = value

    @contextmanager
    def _resized(self) -> Iterator[None]:
        """While this lasts, layers have as many groups as go with the tensors in them."""
        changed = []
        for layer, attribute, channels in self._grouped:
            left = len(layer._parameters["weight"])  # type: ignore[arg-type]
            if left != channels:
                changed.append((layer, attribute, getattr(layer, attribute)))
                setattr(layer, attribute, groups_left(layer, left))
        try:
            yield
        finally:
            for layer, attribute, count in changed:
                setattr(layer, attribute, count)
