"""A PyTorch module seen as pure functions of named tensors."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.flop_counter import FlopCounterMode

from fedpews import trees
from fedpews.neurons.layers import Layer, is_norm
from fedpews.neurons.modules import Batch as Batch
from fedpews.neurons.modules import (
    Calls,
    GatedConvolution,
    PureModule,
    SampleLoss,
    SampleWeight,
    Term,
    arguments,
    batch_counters,
    cached,
    channels_last,
    copy_module,
    cross_entropy,
    differentiate,
    doubled,
    frozen_norms,
    main_output,
    prepared,
    random_inputs,
    round_up,
    run,
    sharing_parameters,
    tensors_of,
    trains_channels_last,
)
from fedpews.seeds import global_generator
from fedpews.torch_private import is_transformed, tree_leaves, tree_map_only
from fedpews.trees import Tree

if TYPE_CHECKING:
    from fedpews.neurons.graph import NeuronGraph

CUT_FROM = 4e8
"""Floating-point operations of a step from which smaller kernels save more time than the copies take (about 10 ms)."""


class Network:
    """The structure of a model. Its weights are passed to every function, never stored.

    ``params`` is always one tree with the trainable parameters and the floating-point buffers (BatchNorm's
    running statistics, and its count of batches where it averages over all of them). Frozen parameters, the statistics
    of norms whose parameters are all frozen, and other integer buffers stay constants of the module; where runs of
    several seeds share the work, each seed has its own (``at``).

    >>> net = Network(nn.Linear(2, 3), torch.zeros(1, 2))
    >>> loss, grads, _ = net.gradients(net.initial(), Batch(torch.ones(4, 2), torch.zeros(4, dtype=torch.long)))
    >>> sorted(grads)
    ['bias', 'weight']
    """

    def __init__(
        self,
        module: nn.Module,
        example: Any,
        *,
        sample_loss: SampleLoss = cross_entropy,
        sample_weight: SampleWeight = lambda labels: None,
        label: Tensor | None = None,
        graph: NeuronGraph | None = None,
        precision: str = "float32",
    ) -> None:
        self._template = module = prepared(module, example)
        # a functional call swaps a module's tensors while it runs, so every thread has its own copy
        self._thread = threading.local()
        self.sample_loss, self.sample_weight = sample_loss, sample_weight
        self._given_graph = graph
        self.precision = precision
        self._gates: Tensor | None = None
        self.example = example
        # where the model and the data live: whatever is made on the way goes there too
        self.device = tree_leaves(example)[0].device
        # one structure, so of several seeds only the first is traced (``graph``)
        self._first: Network | None = None
        self._seeds: dict[int, Network] = {}
        self._without: dict[str, bool] = {}  # layer -> ``runs_without``
        counted = batch_counters(module)
        self.label = torch.zeros(1, dtype=torch.int64) if label is None else label
        self.trainable = tuple(name for name, value in module.named_parameters() if value.requires_grad)
        fixed = tuple(name for name, value in module.named_parameters() if not value.requires_grad)
        self._frozen_norms = frozen_norms(module)
        buffers = [n for n, value in module.named_buffers() if value.is_floating_point() or n in counted]
        self.buffers = tuple(n for n in buffers if n.rpartition(".")[0] not in self._frozen_norms)
        self.frozen = (*fixed, *(n for n in buffers if n not in self.buffers))
        self._counters = tuple(name for name, _ in module.named_buffers() if name not in self.buffers)
        self.names = (*self.trainable, *self.buffers)
        self.shapes = {name: value.shape for name, value in self.initial().items()}

    @classmethod
    def of_seeds(cls, modules: Mapping[int, nn.Module], example: Any, **settings: Any) -> Network:
        """The network of several runs at once: the first seed's, with every seed's own behind ``at``."""
        nets = {seed: cls(module, example, **settings) for seed, module in modules.items()}
        first = next(iter(nets.values()))
        for net in nets.values():
            net._first = None if net is first else first
        first._seeds = nets
        return first

    def at(self, seed: int) -> Network:
        """The same network as this seed's run began with it: its own start and its own frozen parameters."""
        return self._seeds.get(seed, self)

    @cached
    def graph(self) -> NeuronGraph:
        """The hidden neurons, traced on first use: a method without masks never needs them."""
        if self._given_graph is not None:
            return self._given_graph
        if self._first is not None:
            return self._first.graph
        from fedpews.neurons.trace import trace

        module = self._pure(training=False).module
        if self.device.type != "cpu":
            # neurons are the same everywhere, and the CPU has no limits of its own to trip over
            module = copy.deepcopy(module).to("cpu")
        return trace(module, tree_map_only(Tensor, Tensor.cpu, self.example))

    @cached
    def classifier(self) -> str:
        """The name of the layer that makes the outputs: the last one with parameters to run."""
        module, last = copy_module(self._template).eval(), [""]
        for name, layer in module.named_modules():
            if any(True for _ in layer.parameters(recurse=False)):
                # before: a module with a parameter of its own ends after the layers inside it
                layer.register_forward_pre_hook(lambda *_, name=name: last.append(name))
        with torch.no_grad():
            run(module, self.example)
        return last[-1]

    @cached
    def norms(self) -> tuple[str, ...]:
        """The names of everything that belongs to a norm layer: scale, shift and running statistics."""
        modules = self._template.named_modules()
        layers = {name for name, layer in modules if is_norm(layer) or isinstance(layer, nn.LayerNorm)}
        return tuple(name for name in self.names if name.rpartition(".")[0] in layers)

    @cached
    def is_stochastic(self) -> bool:
        """Whether two training passes over the same input differ (dropout), which ties a run to torch's global seed."""
        params, x = self.initial(), self.two_samples()
        with torch.no_grad(), global_generator():
            first, second = (self._call(params, x, training=True)[0] for _ in range(2))
        return not torch.equal(first, second)

    @cached
    def survives_channels_last(self) -> bool:
        """Whether the model runs on images laid out channels last, and backward too if it may be trained so.

        A bare ``x.view(len(x), -1)`` after a convolution does not, so we try it out. False without images.
        """
        if all(value.dim() != 4 for value in (*tree_leaves(self.example), *self.initial().values())):
            return False
        params = {name: channels_last(value) for name, value in self.initial().items()}
        batch = tree_map_only(Tensor, channels_last, self.two_samples())
        try:
            if trains_channels_last(self._template):  # a faulty one may write anywhere
                self.try_step(params, batch)
            with torch.no_grad(), global_generator():
                self.predict(params, batch)
        except RuntimeError:
            return False
        return True

    def initial(self) -> Tree:
        """The values the module came with; read-only, since parameters are not copied."""
        values = trees.pick(tensors_of(self._template), self.names)
        for name in self.buffers:
            # clients' counts of batches are averaged like their other buffers, so they are floats here
            values[name] = values[name].clone() if values[name].is_floating_point() else values[name].float()
        return values

    def constants(self) -> Tree:
        """A copy of what is frozen, which no method trains or sends."""
        return trees.map_leaves(Tensor.clone, trees.pick(tensors_of(self._template), self.frozen))

    def frozen_digest(self) -> str:
        """A hash of what is frozen, of all seeds: it differs if a single weight does."""
        digest = hashlib.blake2b(digest_size=16)
        for seed, net in sorted(self._seeds.items()) or [(0, self)]:
            for name, value in sorted(net.constants().items()):
                digest.update(f"{seed} {name} ".encode())
                digest.update(value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest() if self.frozen else ""

    def module(self, params: Mapping[str, Tensor]) -> nn.Module:
        """An ordinary module in evaluation mode that holds these values."""
        module = copy_module(self._template).eval()
        tensors = tensors_of(module)
        for name, value in params.items():
            tensors[name].copy_(value)
        return module

    def gated(self, gates: Tensor) -> Network:
        """The same network with every hidden neuron's output multiplied by its gate, wherever it is read."""
        _ = self._fed  # computed once, with the graph, then shared by all copies
        if not is_transformed():
            _ = self.flops
        gated = copy.copy(self)
        gated._gates = gates
        return gated

    def opened(self, tree: Mapping[str, Tensor]) -> Tree:
        """The tree with zeros for what belongs to closed neurons."""
        if self._gates is None:
            return dict(tree)
        mask = self.graph.expand(self._gates != 0)
        return {n: torch.where(mask[n], value, 0.0) if n in mask else value for n, value in tree.items()}

    def loss(self, params: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tree]:
        """The mean training loss and the buffers after this pass."""
        outputs, buffers = self._call(params, batch.x, training=True)
        return batch.mean(self.sample_loss(outputs, batch.y), self.sample_weight(batch.y)), buffers

    def gradients(
        self, params: Mapping[str, Tensor], batch: Batch, term: Term | None = None
    ) -> tuple[Tensor, Tree, Tree]:
        """Loss, its gradient by the trainable parameters, and the buffers after the pass.

        ``term(features, outputs)`` is one more number per sample, or for the batch, to descend on; the loss
        returned does not contain it.
        """
        fixed = {name: params[name] for name in self.buffers}
        trainable = {name: params[name] for name in self.trainable}
        if term is None:
            loss, buffers, grads = differentiate(lambda tree: self.loss(tree | fixed, batch), trainable)
            return loss, grads, buffers

        def objective(tree: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            features, outputs, buffers = self.features(tree | fixed, batch.x)
            loss = batch.mean(self.sample_loss(outputs, batch.y), self.sample_weight(batch.y))
            return loss + batch.mean(term(features, outputs)), (loss, buffers)

        _, (loss, buffers), grads = differentiate(objective, trainable)
        return loss.detach(), grads, buffers

    def two_samples(self) -> Any:
        """The example twice, because BatchNorm cannot train on one sample."""
        return tree_map_only(Tensor, lambda leaf: leaf[:1].expand(2, *leaf.shape[1:]), self.example)

    def try_step(self, params: Mapping[str, Tensor], x: Any) -> None:
        """Forward and backward once in training; raises whatever there is against it."""

        def objective(trainable: Tree) -> tuple[Tensor, None]:
            outputs, _ = self._call({**params, **trainable}, x, training=True)
            return outputs.sum(), None

        with global_generator():
            differentiate(objective, trees.pick(dict(params), self.trainable))

    def predict(self, params: Mapping[str, Tensor], x: Any) -> Tensor:
        """Outputs in evaluation mode."""
        return self._call(params, x, training=False)[0]

    def features(
        self, params: Mapping[str, Tensor], x: Any, *, training: bool = True
    ) -> tuple[Tensor, Tensor, Tree]:
        """What the classifier reads of each sample, the outputs and the buffers, of one pass.

        Of a closed neuron the classifier reads nothing, so its features are zero.
        """
        seen: list[Tensor] = []
        layer = self._pure(training=training).module.get_submodule(self.classifier)
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            outputs, buffers = self._call(params, x, training=training)
        finally:
            hook.remove()
        features = seen[-1]
        if self._gates is not None:
            features = self.graph.gate_inputs(f"{self.classifier}.weight", features, self._gates)
        return features.flatten(1).to(outputs.dtype), outputs, buffers

    @cached
    def flops(self) -> int:
        """Floating-point operations of one sample's forward pass."""
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.predict(self.initial(), tree_map_only(Tensor, lambda leaf: leaf[:1], self.example))
        return int(counter.get_total_flops())

    @cached
    def pools(self) -> bool:
        """Whether a pass calls ``max_pool2d``."""
        with torch.no_grad(), Calls() as calls:
            self.predict(self.initial(), tree_map_only(Tensor, lambda leaf: leaf[:1], self.example))
        return max_pool2d in calls.functions

    def blank_labels(self, samples: int) -> Tensor:
        """Labels of the form the loss takes, all zero."""
        return torch.zeros_like(self.label).expand(samples, *self.label.shape[1:])

    @cached
    def can_be_cut(self) -> bool:
        """Whether the module runs with the tensors of a smaller network, and computes what gates would.

        A model that reshapes to fixed sizes, or has a LayerNorm over its neurons, does not: so we try it out.
        """
        return not self.graph.uncut and all(map(self._runs_cut, self.graph.trial_masks()))

    def runs_without(self, layer: Layer) -> bool:
        """The same with no neuron of a layer: attention may have no open head, a convolution needs a channel.

        Tried out when a client first has none of them.
        """
        if layer.name not in self._without:
            neurons = torch.ones(self.graph.size, dtype=torch.bool)
            neurons[layer.neurons] = False
            self._without[layer.name] = self._runs_cut(neurons)
        return self._without[layer.name]

    def _runs_cut(self, neurons: Tensor) -> bool:
        """Whether the network of these neurons computes what gates would."""
        x, params, neurons = random_inputs(self.example), self.initial(), neurons.to(self.device)
        try:
            with torch.no_grad():
                cut = self.predict(self.graph.slice(params, neurons), x)
                gated = self.gated(neurons.to(cut)).predict(params, x)
        except (RuntimeError, ValueError, ArithmeticError):
            return False
        return cut.shape == gated.shape and torch.allclose(cut, gated, rtol=1e-3, atol=1e-5)

    @cached
    def _fed(self) -> dict[str, str]:
        """The layers that are gated at their inputs, and the names of their weights.

        W·(gate ⊙ x) is (W ⊙ gate)·x, but its gradient by the gates needs no gradient by W: a third less work.
        It takes a layer that is called, not one whose weight is used directly, so we try it out.
        """
        plain = (nn.Linear, NonDynamicallyQuantizableLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        fed = {
            name: f"{name}.weight"
            for name, layer in self._template.named_modules()
            if type(layer) in plain
            and getattr(layer, "groups", 1) == 1
            and any(axis.reads for axis in self.graph.axes.get(f"{name}.weight", ()))
        }
        x, generator = random_inputs(self.example), torch.Generator().manual_seed(0)
        module, called = self._pure(training=False).module, set[str]()
        hooks = [
            module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.add(name))
            for name in fed
        ]
        with torch.no_grad():
            self.predict(self.initial(), self.example)
        for hook in hooks:
            hook.remove()
        fed = {name: weight for name, weight in fed.items() if name in called}
        trial = copy.copy(self)
        trial._gates = torch.rand(self.graph.size, generator=generator).to(self.device) + 0.5

        def outputs(gated_at: dict[str, str], training: bool) -> Tensor:
            trial.__dict__["_fed"] = gated_at
            # in training a norm over two samples would blow up the rounding of single precision
            params = {name: value.double() if training else value for name, value in self.initial().items()}
            batch = tree_map_only(Tensor, doubled, x) if training else x
            with torch.no_grad(), global_generator(0):
                return trial._call(params, batch, training=training)[0]

        for training in (False, True):
            try:
                at_weights = outputs({}, training)
            except RuntimeError:  # insists on single precision, or on more than two samples
                continue
            try:
                at_inputs = outputs(fed, training)
            except (RuntimeError, IndexError):  # a layer that is called in a way of its own
                return {}
            if not torch.allclose(at_weights, at_inputs, rtol=1e-3, atol=1e-5):
                return {}
        return fed

    def _call(self, params: Mapping[str, Tensor], x: Any, *, training: bool) -> tuple[Tensor, Tree]:
        values = dict(params)
        pure = self._pure(training=training)
        module, gates, hooks, halved = pure.module, self._gates, [], []
        if gates is not None:
            graph, fed = self.graph, self._fed
            read = [name for name in graph.readers if name not in fed.values()]
            if read:
                # frozen weights are not trained, but they must read nothing from a masked neuron either
                frozen = {name: module.get_parameter(name).detach() for name in read if name in self.frozen}
                rest = frozen | {name: values[name] for name in read if name in values}
                values |= graph.gate(rest, gates)
            # the other layers are gated at their inputs
            for name, weight in fed.items():
                layer = module.get_submodule(name)
                if self._pays_to_halve(layer, values.get(weight), x):
                    layer.forward = partial(self._halved, layer, weight)
                    halved.append(layer)
                    continue
                hook = layer.register_forward_pre_hook(
                    lambda _, given, weight=weight: (graph.gate_inputs(weight, given[0], gates), *given[1:])
                )
                hooks.append(hook)
        # BatchNorm writes its statistics and its counter in place: let it write into copies, so the call stays pure
        buffers = {name: values[name].clone() for name in self.buffers} if training else {}
        counters = {name: module.get_buffer(name).clone() for name in self._counters} if training else {}
        args, kwargs = ((x,), {}) if isinstance(x, Tensor) else arguments(x)
        mixed = training and self.precision == "bfloat16"
        try:
            with torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext():
                outputs = pure(values | buffers | counters, args, kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            for layer in halved:
                del layer.forward
        outputs = outputs if isinstance(outputs, Tensor) else main_output(outputs)
        # losses are computed in single precision
        return outputs.float() if mixed else outputs, buffers

    def _pays_to_halve(self, layer: nn.Module, weight: Tensor | None, x: Any) -> bool:
        """Whether a gated layer is a convolution large enough to leave closed channels out.

        Only for gradients by the gates alone. On the CPU: the shapes depend on the gates.
        """
        return (
            type(layer) is nn.Conv2d
            and isinstance(layer.padding, tuple)
            and layer.padding_mode == "zeros"
            and self._gates is not None
            and self._gates.requires_grad
            and self._gates.device.type == "cpu"
            and weight is not None
            and not weight.requires_grad
            and self.precision == "float32"
            and not is_transformed()
            and 3 * len(tree_leaves(x)[0]) * self.flops >= CUT_FROM
        )

    def _halved(self, layer: Any, weight: str, x: Tensor) -> Tensor:
        """The convolution of the open channels of ``x``."""
        gates = self._gates
        assert gates is not None
        kept = {axis.dim: axis.kept(gates.detach() != 0) for axis in self.graph.axes[weight]}
        reads = next(axis for axis in self.graph.axes[weight] if axis.reads)
        rows = kept.get(0, torch.arange(len(layer.weight)))
        if not len(kept[1]) or not len(rows):
            whole: Tensor = nn.Conv2d.forward(layer, self.graph.gate_inputs(weight, x, gates))
            return whole
        convolve: Any = GatedConvolution.apply
        outputs, inputs = map(round_up, (rows, kept[1]), layer.weight.shape[:2])
        halved: Tensor = convolve(x, reads.pick(gates), layer, inputs, outputs)
        return halved

    @cached
    def least_batch(self) -> int:
        """How many samples a training pass needs: two where BatchNorm sees one value of each channel a sample."""
        one = tree_map_only(Tensor, lambda leaf: leaf[:1], self.example)
        try:
            with torch.no_grad(), global_generator():
                self._call(self.initial(), one, training=True)
        except ValueError:
            return 2
        return 1

    def _pure(self, *, training: bool) -> PureModule:
        """This thread's own copy: a call swaps the module's tensors while it runs."""
        name = "training" if training else "evaluating"
        pure: PureModule | None = getattr(self._thread, name, None)
        if pure is None:
            pure = PureModule(sharing_parameters(self._template).train(training))
            for norm in self._frozen_norms:
                pure.module.get_submodule(norm).eval()
            setattr(self._thread, name, pure)
        return pure
