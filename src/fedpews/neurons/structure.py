"""The structure of a model without its weights, and the first difference between two structures."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fedpews.neurons.network import Batch, Network
from fedpews.seeds import global_generator
from fedpews.torch_private import TorchDispatchMode, tree_leaves, tree_map_only

Structure = dict[str, Any]


class _Kernels(TorchDispatchMode):
    """Writes down every kernel that runs, with its settings and the shapes it is given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_map_only(Tensor, lambda tensor: (str(tensor.dtype), tuple(tensor.shape)), (args, kwargs))
        settings = [value for value in tree_leaves(given) if not callable(value)]
        mark = hashlib.blake2b(repr(settings).encode(), digest_size=4).hexdigest()
        # the mark differs where kernels of the same name have other settings or shapes
        self.seen.append(f"{func.overloadpacket.__name__}:{mark}")
        return func(*args, **kwargs)


def structure(net: Network) -> Structure:
    """The shapes of a network's tensors, the kernels of a training pass with its loss, and its frozen parameters.

    >>> net = Network(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()), torch.zeros(1, 2))
    >>> made = structure(net)
    >>> made["shapes"], [step.partition(":")[0] for step in made["steps"]][:3]
    ({'0.weight': [3, 2], '0.bias': [3]}, ['t', 'addmm', 'tanh'])
    """
    x = net.two_samples()
    batch, params, kernels = Batch(x, net.blank_labels(2).to(net.device)), net.initial(), _Kernels()
    with torch.no_grad(), global_generator():
        try:
            # once before: the first pass of a network also copies its module
            for watching in (nullcontext(), kernels):
                with watching:
                    net.loss(params, batch)
                    net.predict(params, x)
        except (RuntimeError, ValueError, TypeError, LookupError):
            # a loss that takes no made-up labels; the shapes still tell most models apart
            kernels.seen.clear()
    return {
        "shapes": {name: list(shape) for name, shape in net.shapes.items()},
        "steps": kernels.seen,
        "frozen": net.frozen_digest(),
    }


def fingerprint(structure: Structure) -> str:
    """The hash of a structure, in sixteen digits."""
    return hashlib.sha256(json.dumps(structure, sort_keys=True).encode()).hexdigest()[:16]


def difference(was: Structure, now: Structure) -> str | None:
    """In what two structures differ first, with both values; None if they are the same.

    >>> difference({"shapes": {"w": [3]}, "steps": []}, {"shapes": {"w": [4]}, "steps": []})
    'w has shape 3 there and 4 here'
    """
    if was == now:
        return None
    before, after = was.get("shapes", {}), now["shapes"]
    for name in before | after:
        if before.get(name) != after.get(name):
            return f"{name} has shape {_shape(before.get(name))} there and {_shape(after.get(name))} here"
    steps, others = was.get("steps", []), now["steps"]
    for number, (one, other) in enumerate(zip(steps, others, strict=False), 1):
        if one != other:
            name, name_now = one.partition(":")[0], other.partition(":")[0]
            if name == name_now:
                return (
                    f"step {number} of its pass, {name}, has other settings there than here ({one}, {other})"
                )
            return f"step {number} of its pass is {name} there and {name_now} here"
    if len(steps) != len(others):
        return f"its pass has {len(steps)} steps there and {len(others)} here"
    return f"its frozen parameters are others ({was.get('frozen')} there, {now['frozen']} here)"


def _shape(shape: Any) -> str:
    return "none" if shape is None else "×".join(map(str, shape)) or "one number"
