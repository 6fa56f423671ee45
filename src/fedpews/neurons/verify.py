"""Prove on an example that a neuron graph is right: masked neurons must have no influence on the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpews.errors import ConfigError, first_line
from fedpews.neurons.graph import NeuronGraph, slice_module
from fedpews.neurons.layers import Layer
from fedpews.neurons.modules import (
    arguments,
    batches,
    copy_module,
    doubled,
    outputs_of,
    run,
    tensors_of,
)
from fedpews.seeds import global_generator
from fedpews.torch_private import tree_map_only
from fedpews.trees import Tree

BY_HAND = 'NeuronGraph.by_hand(model, [Hidden("layer", read_by=["next.layer"]), ...]).'


def verify(model: nn.Module, graph: NeuronGraph, example: Any) -> None:
    """Raise a ConfigError unless masking neurons equals removing them on the example.

    Neurons are masked by gates, and by hand: the weights that read a masked neuron are set to zero, its own weights to
    other numbers. The outputs must agree, in evaluation and in training, because then a masked neuron has no influence.
    They are compared on a few samples, in double precision, with noise on all parameters, because a layer that starts
    at zero would prove nothing.
    """
    with global_generator():
        prove(model, graph, example, strict=True)


def prove(model: nn.Module, graph: NeuronGraph, example: Any, *, strict: bool) -> NeuronGraph:
    """The layers of the graph that are right; and which of them can be masked, but not physically cut."""
    trial = _trial(model, example)
    # without a layer that failed the others may behave differently, so the rest is proved again
    while failed := _failing(graph.layers, masked := partial(trial.differ, graph)):
        # one of several layers that fail only together passes alone
        difference = masked(failed[:1]) or masked(graph.layers)
        if strict:
            names = dict.fromkeys(name for layer in failed for name in layer.name.split(" + "))
            listed = ", ".join(f'"{name}"' for name in names)
            raise ConfigError(
                f"closing neurons of layer {failed[0].name!r} is not the same as removing them: {difference}. "
                f"Either never mask it, trace(model, example, skip=[{listed}]), or give the graph by hand, {BY_HAND}"
            )
        graph = graph.without(
            {layer.name: f"is not independent of the rest ({difference})" for layer in failed}
        )
    uncut: list[Layer] = []
    # one short pass finds most of them; only what passes it gets the full trial
    for quick in (True, False):
        rest = [layer for layer in graph.layers if layer not in uncut]
        if trial.differ(graph, rest, cut=True):
            uncut += _failing(rest, partial(trial.differ, graph, cut=True, quick=quick))
    return replace(graph, uncut=frozenset(layer.name for layer in uncut))


def _failing(layers: Sequence[Layer], differ: Callable[[Sequence[Layer]], str]) -> list[Layer]:
    """The layers that make a difference, by halving; of layers that do so only together, the last."""
    if not layers or not differ(layers):
        return []
    if len(layers) == 1:
        return list(layers)
    half = len(layers) // 2
    failing = _failing(layers[:half], differ) + _failing(layers[half:], differ)
    return failing or [layers[-1]]


@dataclass(frozen=True)
class _Trial:
    """A model with random weights near its own, batches for it, and the precision to expect."""

    model: nn.Module
    modes: Sequence[tuple[bool, Any]]  # (training, batch)
    tolerance: float

    def outputs(self, batch: Any, tensors: Tree, seed: int = 0) -> list[Tensor]:
        """The outputs of the model with these tensors for its own."""
        # a norm writes its statistics in place
        values = tensors | {name: tensors[name].clone() for name, _ in self.model.named_buffers()}
        # both passes of a comparison drop out the same units
        with torch.no_grad(), global_generator(seed):
            return outputs_of(functional_call(self.model, values, *arguments(batch)))

    @cached_property
    def is_random(self) -> bool:
        """Whether a pass in training draws random numbers."""
        training, batch = self.modes[-1]
        self.model.train(training)
        one, other = (self.outputs(batch, tensors_of(self.model), seed) for seed in (0, 1))
        return training and bool(_difference(one, other, 0.0))

    def differ(
        self, graph: NeuronGraph, layers: Sequence[Layer], *, cut: bool = False, quick: bool = False
    ) -> str:
        """How outputs differ between closing neurons of these layers by gates and another way; "" if they agree.

        The other way is to mask them by hand, or to ``cut`` them out.
        """
        generator = torch.Generator().manual_seed(len(graph.layers))
        neurons = torch.ones(graph.size, dtype=torch.bool)
        for layer in graph.layers:
            # drawn for every layer, chosen or not: halving must try a layer with the same neurons each time
            opened = torch.randperm(layer.size, generator=generator) < layer.size // 2
            if layer in layers:
                neurons[layer.neurons] = opened
        # the other halves as well, so that every neuron is closed once
        others, uneven = neurons.clone(), torch.ones_like(neurons)
        for layer in layers:
            others[layer.neurons].logical_not_()
            uneven[layer.neurons] = graph.trial_masks()[1][layer.neurons]
        masks = (neurons, others, uneven) if cut else (neurons, others)
        tensors = tensors_of(self.model)
        like = next(value for value in tensors.values() if value.is_floating_point())
        for mask in masks[:1] if quick else masks:
            gated = graph.gate(tensors, mask.to(like))
            try:
                # the layers that cannot be cut are not known yet, so all are tried
                small = slice_module(self.model, replace(graph, uncut=frozenset()), mask) if cut else None
                for training, batch in self.modes[:1] if quick else self.modes:
                    # dropout draws other numbers for smaller tensors, so the two passes cannot be compared
                    if cut and training and self.is_random:
                        continue
                    self.model.train(training)
                    one = self.outputs(batch, gated)
                    if small is None:
                        other = self.outputs(batch, _masked(graph, tensors, mask))
                    else:
                        with torch.no_grad(), global_generator(0):
                            other = outputs_of(run(small.train(training), batch))
                    if difference := _difference(one, other, self.tolerance):
                        return difference + (" in training" if training else "")
            except Exception as error:  # noqa: BLE001  any failure of the smaller network is the finding
                return f"the smaller network does not run ({first_line(error)})"
        return ""


def _masked(graph: NeuronGraph, tensors: Tree, neurons: Tensor) -> Tree:
    """Masked by hand: nothing is read from a masked neuron, and its own weights are other numbers."""
    tensors = dict(tensors)
    for name, axes in graph.axes.items():
        value = tensors[name]
        kept = torch.ones([1] * value.dim(), dtype=torch.bool)
        for axis in axes:
            if not axis.reads:
                kept = kept & axis.spread(neurons)
        # other numbers, so that any influence shows; near 1, because some of them are variances
        value = torch.where(kept, value, 1.5 - 0.5 * value)
        for axis in axes:
            if axis.reads:
                value = value.masked_fill(~axis.spread(neurons), 0)
        tensors[name] = value
    return tensors


def _difference(one: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> str:
    if len(one) != len(other):
        return f"there are {len(one)} outputs and {len(other)}"
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape:
            return f"the output has shape {tuple(a.shape)} and {tuple(b.shape)}"
        if a.is_floating_point() and a.numel():
            scale = max(1.0, float(a.abs().nan_to_num(0, 0, 0).max()))
            if not torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True):
                return f"the outputs differ by {float((a - b).abs().max()):.2g}"
    return ""


def _trial(model: nn.Module, example: Any) -> _Trial:
    """A copy of the model to prove the graph on, in double precision if it runs in that."""
    generator = torch.Generator().manual_seed(0)
    model = copy_module(model).eval()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point():
            # a scale that starts at zero would hide any influence; a variance may only grow
            noise = torch.rand(value.shape, generator=generator).to(value)
            value.data = value.data + 0.1 * (noise if name.endswith("running_var") else noise - 0.5)
    double = copy_module(model).double()
    precise = tree_map_only(Tensor, doubled, example)
    failure: Exception | None = None
    # in double precision 1e-6 tells rounding from influence; a model that insists on single gets 1e-3
    for candidate, inputs, tolerance in ((double, precise, 1e-6), (model, example, 1e-3)):
        try:
            evaluation, training = batches(candidate, inputs)
        except Exception as error:  # noqa: BLE001  the model insists on its own precision somewhere
            failure = error
            continue
        modes = [(False, batch) for batch in evaluation] + [(True, batch) for batch in training]
        return _Trial(candidate, modes, tolerance)
    assert failure is not None
    raise ConfigError(
        f"{type(model).__name__} does not run on the example: {first_line(failure)}."
    ) from failure
