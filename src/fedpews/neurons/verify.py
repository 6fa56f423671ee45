"""Prove on an example that a neuron graph is right: closing neurons must equal removing them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpews.errors import ConfigError, first_line
from fedpews.neurons.channels import Layer
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.slicing import slice_module
from fedpews.torch_private import tree_leaves

FIXED_SHAPE = re.compile(r"shape '\[.*\]' is invalid for input of size")
"""What torch says of a view or a reshape whose size stands in the code."""

BY_HAND = 'NeuronGraph.by_hand(model, [Hidden("layer", read_by=["next.layer"]), ...]).'


def verify(model: nn.Module, graph: NeuronGraph, example: Tensor) -> None:
    """Raise a ConfigError unless closing neurons equals removing them on the example.

    A random half of every layer is closed, then the other half. If the networks differ, layer by layer to find
    out which one is wrong. Compared on two samples, in double precision and evaluation mode, with all
    parameters jittered, because a layer that starts at zero would prove nothing.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model, example, tolerance = _jittered(model, example, generator)
        half = torch.ones(graph.size, dtype=torch.bool)
        for layer in graph.layers:
            half[layer.start + torch.randperm(layer.size, generator=generator)[: layer.size // 2]] = False

        def differ(layers: Sequence[Layer], first: bool) -> str:
            neurons = torch.ones(graph.size, dtype=torch.bool)
            for layer in layers:
                part = slice(layer.start, layer.start + layer.size)
                if layer.size > 1:
                    neurons[part] = half[part] if first else ~half[part]
            return _difference(model, graph, example, neurons, tolerance)

        found = differ(graph.layers, True) or differ(graph.layers, False)
        if not found:
            return
        alone = {layer.name: differ([layer], True) or differ([layer], False) for layer in graph.layers}
    failed = {name: text for name, text in alone.items() if text}
    failed = failed or {layer.name: found for layer in graph.layers}
    name, found = next(iter(failed.items()))
    raise ConfigError(
        f"closing neurons of layer {name!r} is not the same as removing them: {found}. "
        + ways_out([part for name in failed for part in name.split(" + ")])
    )


def _jittered(
    model: nn.Module, example: Tensor, generator: torch.Generator
) -> tuple[nn.Module, Tensor, float]:
    """A copy with random weights near the model's own, a batch for it, and the precision to expect."""
    model = copy.deepcopy(model).eval()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point():
            noise = torch.rand(value.shape, generator=generator).to(value)
            value.data = value.data + 0.1 * (noise if name.endswith("running_var") else noise - 0.5)
    double = copy.deepcopy(model).double()
    for candidate, batch, tolerance in (
        (double, example[:2], 1e-7),
        (double, example, 1e-7),  # the first dimension is not the batch
        (model, example, 1e-3),  # the model insists on its own precision somewhere
    ):
        try:
            batch = batch.to(
                torch.float64 if candidate is double and batch.is_floating_point() else batch.dtype
            )
            candidate(batch)
        except Exception as error:  # noqa: BLE001  any failure means: try the next
            failure = error
        else:
            return candidate, batch, tolerance
    raise ConfigError(
        f"{type(model).__name__} does not run on the example: {first_line(failure)}."
    ) from failure


def _difference(
    model: nn.Module, graph: NeuronGraph, example: Tensor, neurons: Tensor, tolerance: float
) -> str:
    """What tells the gated from the physically smaller network; "" if nothing does."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    gates = neurons.to(next(model.parameters()))
    gated = tree_leaves(functional_call(model, graph.gate(tensors, gates), (example,)))
    try:
        sliced = tree_leaves(slice_module(model, graph, neurons)(example))
    except Exception as error:  # noqa: BLE001  any failure of the smaller network is the finding
        if not FIXED_SHAPE.search(str(error)):
            return f"the smaller network does not run ({first_line(error)})"
        # the code names a size itself, x.view(-1, 400), so it cannot be run any smaller; then nothing that belongs to
        # a closed neuron may have a say, whatever its value
        scrambled = _scrambled(tensors, graph, neurons)
        sliced = tree_leaves(functional_call(model, graph.gate(scrambled, gates), (example,)))
    for one, other in zip(gated, sliced, strict=True):
        if isinstance(one, Tensor) and one.is_floating_point():
            if one.shape != other.shape:
                return f"the output has shape {tuple(one.shape)} and {tuple(other.shape)}"
            scale = max(1.0, float(one.detach().abs().max())) if one.numel() else 1.0
            if not torch.allclose(one, other, rtol=0.0, atol=tolerance * scale):
                return f"the outputs differ by {float((one - other).detach().abs().max()):.2g}"
    return ""


def _scrambled(tensors: Mapping[str, Tensor], graph: NeuronGraph, neurons: Tensor) -> dict[str, Tensor]:
    """The same tensors, with other values in every element of a closed neuron."""
    generator = torch.Generator().manual_seed(1)
    open_ = graph.expand(neurons)
    return {
        name: torch.where(
            open_[name].to(value.device),
            value,
            value + torch.rand(value.shape, generator=generator).to(value),
        )
        if name in open_
        else value
        for name, value in tensors.items()
    }


def ways_out(names: Sequence[str]) -> str:
    """What to do about layers that cannot be masked."""
    listed = ", ".join(f'"{name}"' for name in dict.fromkeys(names)) or '"layer.name"'
    return (
        f"Either never mask it, trace(model, example, skip=[{listed}]), or give the graph by hand, " + BY_HAND
    )
