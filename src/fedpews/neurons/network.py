"""A PyTorch module seen as pure functions of named tensors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.utils.flop_counter import FlopCounterMode

from fedpews import trees
from fedpews.neurons.channels import is_norm
from fedpews.torch_private import is_transformed, tree_map_only
from fedpews.trees import Tree

if TYPE_CHECKING:
    from fedpews.neurons.graph import NeuronGraph

SampleLoss = Callable[[Tensor, Tensor], Tensor]
Term = Callable[[Tensor, Tensor], Tensor]
"""(features, outputs) -> one number per sample."""


class Batch(NamedTuple):
    """Samples of one step. ``weight`` is 0 for padding and 1 else; None when there is no padding."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one value per sample, padding left out."""
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum().clamp_min(1)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample."""
    return F.cross_entropy(outputs, labels, reduction="none")


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
    value, aux = function(leaves[0] if one else dict(zip(at, leaves, strict=True)))
    gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    detached = tree_map_only(Tensor, torch.Tensor.detach, aux)
    return value.detach(), detached, gradients[0] if one else dict(zip(at, gradients, strict=True))


class Network:
    """The structure of a model. Its weights are passed in, never held.

    ``params`` is always one tree with the trainable parameters and the floating-point buffers (BatchNorm's
    running statistics). Frozen parameters and integer buffers stay constants of the module.

    >>> net = Network(nn.Linear(2, 3), torch.zeros(1, 2))
    >>> loss, grads, _ = net.gradients(net.initial(), Batch(torch.ones(4, 2), torch.zeros(4, dtype=torch.long)))
    >>> sorted(grads)
    ['bias', 'weight']
    """

    def __init__(
        self,
        module: nn.Module,
        example: Tensor,
        *,
        sample_loss: SampleLoss = cross_entropy,
        graph: NeuronGraph | None = None,
    ) -> None:
        self._template = copy.deepcopy(module)
        self._own = threading.local()
        self.sample_loss = sample_loss
        self._given_graph = graph
        self._gates: Tensor | None = None
        self.example = example
        self.trainable = tuple(name for name, value in module.named_parameters() if value.requires_grad)
        self.buffers = tuple(name for name, value in module.named_buffers() if value.is_floating_point())
        self._counters = tuple(
            name for name, value in module.named_buffers() if not value.is_floating_point()
        )
        self.names = (*self.trainable, *self.buffers)
        self.shapes = {name: value.shape for name, value in self.initial().items()}

    @cached_property
    def graph(self) -> NeuronGraph:
        """The hidden neurons, found on first use: a method without masks never needs them."""
        if self._given_graph is not None:
            return self._given_graph
        from fedpews.neurons.trace import trace

        return trace(self._module(training=False), self.example)

    @cached_property
    def classifier(self) -> str:
        """The name of the layer that makes the outputs: the last one with parameters to run."""
        module, last = copy.deepcopy(self._template).eval(), [""]
        for name, layer in module.named_modules():
            if any(True for _ in layer.parameters(recurse=False)):
                layer.register_forward_hook(lambda *_, name=name: last.append(name))
        with torch.no_grad():
            module(self.example)
        return last[-1]

    @cached_property
    def norms(self) -> tuple[str, ...]:
        """The names of everything that belongs to a norm layer: scale, shift and running statistics."""
        modules = self._template.named_modules()
        layers = {name for name, layer in modules if is_norm(layer) or isinstance(layer, nn.LayerNorm)}
        return tuple(name for name in self.names if name.rpartition(".")[0] in layers)

    @cached_property
    def _ties_weights(self) -> bool:
        """Whether one tensor has two names in the module. To look for them at every call slows small steps."""
        parameters = self._template.named_parameters(remove_duplicate=False)
        buffers = self._template.named_buffers(remove_duplicate=False)
        names = [id(tensor) for _, tensor in chain(parameters, buffers)]
        return len(set(names)) < len(names)

    @cached_property
    def is_stochastic(self) -> bool:
        """Whether two training passes over the same input differ (dropout), which ties a run to torch's global seed."""
        params = self.initial()
        batch = self.example.expand(2, *self.example.shape[1:])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            first, second = (self._call(params, batch, training=True)[0] for _ in range(2))
        return not torch.equal(first, second)

    def initial(self) -> Tree:
        """A copy of the values the module came with."""
        values = dict(self._template.named_parameters()) | dict(self._template.named_buffers())
        return {name: values[name].detach().clone() for name in self.names}

    def module(self, params: Mapping[str, Tensor]) -> nn.Module:
        """An ordinary module in evaluation mode that holds these values."""
        module = copy.deepcopy(self._template).eval()
        module.load_state_dict(dict(params), strict=False)
        return module

    def gated(self, gates: Tensor) -> Network:
        """The same network with every hidden neuron's output multiplied by its gate, wherever it is read."""
        _ = self._fed  # found once, with the graph, then shared by all copies
        gated = copy.copy(self)
        gated._gates = gates
        return gated

    def loss(self, params: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tree]:
        """The mean training loss and the buffers after this pass."""
        outputs, buffers = self._call(params, batch.x, training=True)
        return batch.mean(self.sample_loss(outputs, batch.y)), buffers

    def gradients(
        self, params: Mapping[str, Tensor], batch: Batch, term: Term | None = None
    ) -> tuple[Tensor, Tree, Tree]:
        """Loss, its gradient by the trainable parameters, and the buffers after the pass.

        ``term(features, outputs)`` is one more number per sample to descend on; the loss returned does not
        contain it.
        """
        fixed = trees.pick(params, self.buffers)

        def objective(trainable: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            if term is None:
                loss, buffers = self.loss(trainable | fixed, batch)
                return loss, (loss, buffers)
            features, outputs, buffers = self.features(trainable | fixed, batch.x)
            loss = batch.mean(self.sample_loss(outputs, batch.y))
            return loss + batch.mean(term(features, outputs)), (loss, buffers)

        _, (loss, buffers), grads = differentiate(objective, trees.pick(params, self.trainable))
        return loss.detach(), grads, buffers

    def predict(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Outputs in evaluation mode."""
        return self._call(params, x, training=False)[0]

    def features(self, params: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tree]:
        """What the classifier reads of each sample, the outputs and the buffers, of one training pass.

        Of a closed neuron the classifier reads nothing, so its features are zero.
        """
        seen: list[Tensor] = []
        layer = self._module(training=True).get_submodule(self.classifier)
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            outputs, buffers = self._call(params, x, training=True)
        finally:
            hook.remove()
        features = seen[-1]
        if self._gates is not None:
            features = self.graph.gate_inputs(f"{self.classifier}.weight", features, self._gates)
        return features.flatten(1), outputs, buffers

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one sample's forward pass."""
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.predict(self.initial(), self.example[:1])
        return int(counter.get_total_flops())

    @cached_property
    def takes_channels_last(self) -> bool:
        """Whether images may have their channels last in memory; ``x.view(-1, 400)`` after convolutions forbids it."""
        if self.example.dim() != 4:
            return False

        def lay_out(value: Tensor) -> Tensor:
            return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value

        x = self.example[:1].expand(2, *self.example.shape[1:])
        try:
            with torch.no_grad():
                self.predict(trees.map_tree(lay_out, self.initial()), lay_out(x))
        except RuntimeError:
            return False
        return True

    @cached_property
    def can_be_cut(self) -> bool:
        """Whether the module runs with the tensors of a smaller network, and computes what gates would.

        A model that reshapes to fixed sizes, or has a LayerNorm, does not: so we try it out.
        """
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(2, *self.example.shape[1:], generator=generator).to(self.example)
        neurons = torch.zeros(self.graph.size, dtype=torch.bool)
        for layer in self.graph.layers:  # every other one, and never none
            neurons[layer.start : layer.start + layer.size : 2] = True
        params = self.initial()
        try:
            with torch.no_grad():
                cut = self.predict(self.graph.slice(params, neurons), x)
                gated = self.gated(neurons.to(x)).predict(params, x)
        except (RuntimeError, ValueError):
            return False
        return cut.shape == gated.shape and torch.allclose(cut, gated, rtol=1e-3, atol=1e-5)

    @cached_property
    def _fed(self) -> dict[str, str]:
        """The layers that are gated at their inputs, and the names of their weights.

        W·(gate ⊙ x) is (W ⊙ gate)·x, but its gradient by the gates needs no gradient by W: a third less work.
        It takes a layer that is called, not one whose weight is used directly, so we try it out.
        """
        plain = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        fed = {
            name: f"{name}.weight"
            for name, layer in self._template.named_modules()
            if type(layer) in plain
            and getattr(layer, "groups", 1) == 1
            and any(axis.reads for axis in self.graph.axes.get(f"{name}.weight", ()))
        }
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(2, *self.example.shape[1:], generator=generator).to(self.example)
        trial = copy.copy(self)
        trial._gates = torch.rand(self.graph.size, generator=generator).to(self.example.device) + 0.5
        outputs = []
        with torch.no_grad():
            for trial.__dict__["_fed"] in ({}, fed):
                outputs.append(trial.predict(self.initial(), x))
        at_weights, at_inputs = outputs
        return fed if torch.allclose(at_weights, at_inputs, rtol=1e-3, atol=1e-5) else {}

    @contextmanager
    def _gating(self, module: nn.Module) -> Iterator[None]:
        """While this lasts, the layers that can be are gated at their inputs."""

        def gate(weight: str) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
            gates = self._gates
            assert gates is not None
            return lambda _, given: (self.graph.gate_inputs(weight, given[0], gates), *given[1:])

        hooks = [
            module.get_submodule(name).register_forward_pre_hook(gate(weight))
            for name, weight in self._fed.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _call(self, params: Mapping[str, Tensor], x: Tensor, *, training: bool) -> tuple[Tensor, Tree]:
        values = dict(params)
        module = self._module(training=training)
        gating: AbstractContextManager[None] = nullcontext()
        if self._gates is not None:
            gating = self._gating(module)
            fed = self._fed.values()
            rest = {name: value for name, value in values.items() if name not in fed}
            values |= self.graph.gate(rest, self._gates)
        # BatchNorm writes its statistics and its counter in place: let it write into copies, so the call stays pure
        buffers = {name: values[name].clone() for name in self.buffers} if training else {}
        counters = {name: module.get_buffer(name).clone() for name in self._counters} if training else {}
        with gating:
            outputs = functional_call(
                module, values | buffers | counters, (x,), tie_weights=self._ties_weights
            )
        return outputs, buffers

    def _module(self, *, training: bool) -> nn.Module:
        """This thread's own copy: a functional call swaps the module's tensors while it runs."""
        name = "training" if training else "evaluating"
        module: nn.Module | None = getattr(self._own, name, None)
        if module is None:
            module = copy.deepcopy(self._template).train(training)
            setattr(self._own, name, module)
        return module
