"""Find the neuron graph of any model, and prove it on an example."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from fedpews.errors import ConfigError
from fedpews.neurons.channels import Side, groups, is_depthwise, places, slice_module, width
from fedpews.neurons.graph import Layer, NeuronGraph, assemble
from fedpews.trees import Tree

_MIXERS = (nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention, nn.RNNBase)
_OUTPUT, _INPUT = "it is (added to) the model's output", "it is added to the model's input"


def trace(model: nn.Module, example: Tensor, skip: Sequence[str] = ()) -> NeuronGraph:
    """The hidden neurons of ``model``, found by running ``example`` (a batch of inputs) through a copy of it.

    A neuron is a unit of a linear layer or a channel of a convolution that some later layer reads. What a model
    computes inseparably is one neuron: channels that residual connections add to each other, the channels of one
    group of a GroupNorm or of a grouped convolution. Left out are the model's inputs and outputs, whatever a
    LayerNorm (or another norm over all channels), an attention or a recurrent layer mixes, layers of one neuron, and
    the layers in ``skip`` (a module's name stands for all it contains).

    The graph is checked on the example: closing neurons must equal removing them.

    >>> graph = trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(4, 2))
    >>> graph.layers
    (Layer(name='0', start=0, size=3),)

    Reference: Fang et al., DepGraph: Towards Any Structural Pruning, CVPR 2023 (the package torch-pruning).
    """
    names = [name for name, _ in model.named_modules()]
    for name in skip:
        if name not in names:
            raise ConfigError(f"skip: the model has no layer {name!r}; it has {', '.join(map(repr, names[1:]))}.")
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        flow = _Flow(copy.deepcopy(model).eval().requires_grad_(True), example)
    graph = _read_off(flow, model, skip)
    verify(model, graph, example)
    return graph


class _Index(NamedTuple):
    """A channel of some layer and the channel of the layer we started from that it depends on."""

    idx: int
    root_idx: int


class _Slot(NamedTuple):
    """A channel of a layer (by module name) or of a loose parameter (by its own name)."""

    name: str
    side: Side
    channel: int


class _Flow:
    """One forward pass through a model, as Torch-Pruning sees it: who hands which channel to whom."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        import torch_pruning

        self.model = model
        self.order: list[str] = []  # modules in the order of their first call
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {id(value): name for name, value in model.named_parameters()}
        self._outputs: list[Tensor] = []
        real = example.is_floating_point() and example.dim() != 3
        self._input = nn.Parameter(example.detach().clone()) if example.is_floating_point() else None
        self._hooks = [module.register_forward_pre_hook(self._enter) for module in model.modules()]
        self._graph = torch_pruning.DependencyGraph()
        try:
            self._graph.build_dependency(
                model,
                example,
                forward_fn=self._forward,
                # Torch-Pruning looks for a third kind of 3-d parameter (a class token) and would stop at it.
                unwrapped_parameters=[(self._input, 1)] if real else None,
                verbose=False,
            )
        except Exception as error:  # noqa: BLE001  whatever breaks inside the model or the tracer ends here
            last = self.order[-1] if self.order else ""
            where = f" (last layer entered: {last!r})" if last else ""
            raise ConfigError(
                f"{type(model).__name__} cannot be traced{where}: {type(error).__name__}: {_short(error)}. "
                + _by_hand()
            ) from error
        finally:
            for hook in self._hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        name = self._names[module]
        if name in self.order:
            self.order.remove(name)
        self.order.append(name)
