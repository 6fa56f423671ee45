"""Find the neuron graph of any model, and prove it on an example."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedpews.errors import ConfigError, first_line
from fedpews.neurons.channels import Layer, Side, groups, is_depthwise, places, width
from fedpews.neurons.graph import NeuronGraph, assemble
from fedpews.neurons.verify import BY_HAND, verify, ways_out
from fedpews.torch_private import tree_leaves

Item = TypeVar("Item", bound=Hashable)
_MIXERS = (nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention, nn.RNNBase)


def trace(model: nn.Module, example: Tensor, skip: Sequence[str] = ()) -> NeuronGraph:
    """The hidden neurons of ``model``, found by running ``example`` (a batch of inputs) through a copy of it.

    A neuron is a unit of a linear layer or a channel of a convolution that later layers read. What the model
    computes inseparably is one neuron: channels that residual connections add to each other, the channels of
    one group of a GroupNorm or of a grouped convolution. Left out are the model's inputs and outputs,
    whatever a LayerNorm (or another norm over all channels), an attention or a recurrent layer mixes, layers
    of a single neuron, and the layers in ``skip`` with all that is bound to them (a module's name stands for
    all it contains).

    The graph is proved on the example: closing neurons must equal removing them.

    >>> graph = trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(4, 2))
    >>> graph.layers
    (Layer(name='0', start=0, size=3),)

    Reference: Fang et al., DepGraph: Towards Any Structural Pruning, CVPR 2023 (the package torch-pruning).
    """
    names = [name for name, _ in model.named_modules() if name]
    for name in skip:
        if name not in names:
            raise ConfigError(f"skip: the model has no layer {name!r}; it has {', '.join(map(repr, names))}.")
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        flow = _Flow(copy.deepcopy(model).eval().requires_grad_(True), example)
    graph = _Coupling(flow, skip).graph(model)
    verify(model, graph, example)
    return graph


class _Index(NamedTuple):
    """A channel of some layer, and the channel of the layer we started from that it goes with."""

    idx: int
    root_idx: int


class _Slot(NamedTuple):
    """A channel of a layer, by module name, or of a parameter outside the layers we know, by its own name."""

    name: str
    side: Side
    channel: int


class _Flow:
    """One forward pass as Torch-Pruning sees it: which layer hands which channel to which."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        from torch_pruning import DependencyGraph

        self.modules = {name: module for name, module in model.named_modules() if name}
        self.order: list[str] = []  # by first call
        self.lost: dict[str, str] = {}  # layer -> a step where its channels could not be followed any further
        self._names = {module: name for name, module in self.modules.items()}
        self._parameters = {id(value): name for name, value in model.named_parameters()}
        self._widest = max((size for value in model.parameters() for size in value.shape), default=0)
        self._entered = ""
        self._input: Any = None
        self._outputs: set[Any] = set()
        # As a parameter the input has a channel count the tracer can use, for instance in a concatenation.
        # But a 3-d parameter it would take for a class token.
        source = nn.Parameter(example.detach().clone()) if example.is_floating_point() else None
        self._graph = DependencyGraph()
        hooks = [module.register_forward_pre_hook(self._enter) for module in self.modules.values()]
        problem = "does not run on the example"
        try:
            model(example)
            problem = "cannot be traced"
            self._graph.build_dependency(
                model,
                example if source is None else source,
                forward_fn=self._forward,
                unwrapped_parameters=None if source is None or example.dim() == 3 else [(source, 1)],
                verbose=False,
            )
        except Exception as error:
            where = f" (last layer entered: {self._entered!r})" if self._entered else ""
            advice = "" if problem.startswith("does") else " Give the graph by hand, " + BY_HAND
            raise ConfigError(
                f"{type(model).__name__} {problem}{where}: {first_line(error)}.{advice}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: object) -> None:
        self._entered = self._names[module]
        if self._entered not in self.order:
            self.order.append(self._entered)

    def _forward(self, model: nn.Module, example: Tensor) -> Any:
        if example.requires_grad:
            example = example * 1  # a step of its own, by which we know the input
            self._input = example.grad_fn
        outputs = model(example)
        self._outputs = {leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)}
        return outputs

    def roots(self) -> list[str]:
        """The layers that make neurons, in forward order."""
        return [
            name
            for name in self.order
            if isinstance(module := self.modules[name], nn.Linear | _ConvNd)
            and module in self._graph.module2node
            and width(module, "out") != 1
        ]

    def follow(self, root: str) -> Iterator[tuple[Any, Side, list[_Index]]]:
        """Every step that the output channels of a layer go through or are bound to: (step, side, channels).

        A group of Torch-Pruning's own forgets a second binding of a channel (as in ``a * b`` of two halves),
        so we walk its dependencies ourselves.
        """
        graph, module = self._graph, self.modules[root]
        channels = [_Index(channel, channel) for channel in range(width(module, "out") or 0)]
        stack = [(graph.module2node[module], graph.get_pruner_of_module(module).prune_out_channels, channels)]
        seen: set[tuple[Any, Any, _Index]] = set()
        while stack:
            node, handler, indices = stack.pop()
            pruner = graph.get_pruner_of_module(node.module)
            side: Side = "out" if handler == pruner.prune_out_channels else "in"
            # A single channel that is broadcast over all others is bound to none of them.
            broadcast = isinstance(node.module, nn.Module) and width(node.module, side) == 1
            indices = [index for index in indices if (node, handler, index) not in seen]
            if broadcast or not indices:
                continue
            seen.update((node, handler, index) for index in indices)
            yield node, side, indices
            if self.barrier(node, side):
                continue
            for dependency in node.dependencies:
                if dependency.is_triggered_by(handler):
                    passed = indices
                    try:
                        for mapping in dependency.index_mapping:
                            passed = passed if mapping is None else mapping(passed)
                    except (IndexError, TypeError):
                        passed = [_Index(self._widest, index.root_idx) for index in indices]
                    # Inside a recurrent layer, say, the tracer may lose count of the channels and never end.
                    if any(index.idx >= self._widest for index in passed):
                        self.lost[root] = str(dependency.target.name)
                    else:
                        stack.append((dependency.target, dependency.handler, passed))

    def barrier(self, node: Any, side: Side) -> str:
        """Why nothing that reaches this step can be masked; "" if it can."""
        if self._input is not None and node.grad_fn is self._input:
            return "is bound to the model's input"
        if side == "out" and node.grad_fn in self._outputs:
            return "reaches the model's output"
        owner = node.module
        if isinstance(owner, nn.Parameter) and id(owner) in self._parameters:
            owner = self.modules.get(self._parameters[id(owner)].rpartition(".")[0])
            if not type(owner).__module__.startswith("torch.nn."):
                return ""
        elif not isinstance(owner, _MIXERS):
            return ""
        return f"is mixed by a {type(owner).__name__}"

    def place(self, node: Any, side: Side) -> tuple[str, int, int | None] | None:
        """(name, channels, None) of a layer; with its channel dimension for a parameter outside the layers."""
        module = node.module
        if isinstance(module, nn.Parameter):
            name = self._parameters.get(id(module))
            return None if name is None else (name, module.shape[node.pruning_dim], node.pruning_dim)
        if isinstance(module, nn.Module) and module in self._names and (count := width(module, side)):
            return self._names[module], count, None
        return None


class _Sets(Generic[Item]):
    """Things joined into sets (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[Item, Item] = {}

    def find(self, item: Item) -> Item:
        """The one member that stands for the item's set."""
        path = []
        while (parent := self._parent.setdefault(item, item)) != item:
            path.append(item)
            item = parent
        self._parent.update(dict.fromkeys(path, item))
        return item

    def join(self, one: Item, other: Item) -> None:
        """Make the two sets one."""
        self._parent[self.find(other)] = self.find(one)

    def members(self) -> dict[Item, list[Item]]:
        """Every set, by the member that stands for it."""
        found: dict[Item, list[Item]] = {}
        for item in list(self._parent):
            found.setdefault(self.find(item), []).append(item)
        return found


class _Coupling:
    """Which channels live and die together, and which can never be masked."""

    def __init__(self, flow: _Flow, skip: Sequence[str]) -> None:
        self._flow = flow
        self._roots = {name: position for position, name in enumerate(flow.roots())}
        self._sets: _Sets[_Slot] = _Sets()
        self._barred: dict[_Slot, str] = {}
        self._torn: dict[_Slot, str] = {}
        self._loose: dict[str, int] = {}  # parameter outside the layers we know -> its channel dimension
        for root in self._roots:
            skipped = any(root == name or root.startswith(f"{name}.") for name in skip)
            for channel in range(width(flow.modules[root], "out") or 0):
                slot = self._sets.find(_Slot(root, "out", channel))
                if skipped:
                    self._barred[slot] = "is skipped"
            for node, side, indices in flow.follow(root):
                self._bind(root, node, side, indices)
        self._torn.update({_Slot(root, "out", 0): step for root, step in flow.lost.items()})
        for name, module in flow.modules.items():
            self._tie(name, module)

    def _bind(self, root: str, node: Any, side: Side, indices: list[_Index]) -> None:
        """Join a layer's channels to those of a step they reach."""
        if reason := self._flow.barrier(node, side):
            self._barred.update({_Slot(root, "out", index.root_idx): reason for index in indices})
        elif place := self._flow.place(node, side):
            name, count, dim = place
            if dim is not None:
                self._loose[name] = dim
            for channel, origin in indices:
                if channel < count and origin is not None:
                    self._sets.join(_Slot(root, "out", origin), _Slot(name, side, channel))
                else:
                    self._torn[_Slot(root, "out", origin or 0)] = name

    def _tie(self, name: str, module: nn.Module) -> None:
        """Join the channels of each group of a GroupNorm, and the inputs and outputs of each group of a convolution."""
        count = groups(module)
        if count is None or is_depthwise(module):
            return
        sides: tuple[Side, ...] = ("in", "out") if isinstance(module, _ConvNd) else ("out",)
        first = (width(module, "out") or 0) // count
        for side in sides:
            channels = width(module, side) or 0
            for channel in range(channels):
                group = channel // (channels // count)
                self._sets.join(_Slot(name, "out", group * first), _Slot(name, side, channel))

    def graph(self, model: nn.Module) -> NeuronGraph:
        """The sets that nothing bars and some layer reads, numbered in forward order."""
        barred = {self._sets.find(slot) for slot in self._barred}
        for slot, name in self._torn.items():
            if self._sets.find(slot) not in barred:
                raise ConfigError(
                    f"the neurons of layer {slot.name!r} do not line up with the channels of {name!r}. "
                    + ways_out([slot.name])
                )
        free = [
            slots for key, slots in self._sets.members().items() if key not in barred and self._is_read(slots)
        ]
        layers: list[Layer] = []
        channels: dict[tuple[str, Side], Tensor] = {}
        loose: dict[str, tuple[int, Tensor]] = {}
        start = 0
        for made_by, neurons in self._layers(free):
            layers.append(Layer(" + ".join(made_by), start, len(neurons)))
            for number, slots in enumerate(neurons, start):
                for name, side, channel in slots:
                    if name in self._loose:
                        dim = self._loose[name]
                        blank = torch.full((model.get_parameter(name).shape[dim],), -1)
                        loose.setdefault(name, (dim, blank))[1][channel] = number
                    else:
                        blank = torch.full((width(self._flow.modules[name], side) or 0,), -1)
                        channels.setdefault((name, side), blank)[channel] = number
            start += len(neurons)
        if not layers:
            reasons = dict.fromkeys(f"{slot.name!r} {reason}" for slot, reason in self._barred.items())
            raise ConfigError(
                f"{type(model).__name__} has no hidden neuron that could be masked "
                f"({', '.join(reasons) or 'no linear layer or convolution with a later layer that reads it'}). "
                "Choose another model, a method without warmup, or give the graph by hand, " + BY_HAND
            )
        return assemble(model, layers, channels, loose)

    def _is_read(self, slots: list[_Slot]) -> bool:
        return any(
            place.reads and place.side == side
            for name, side, _ in slots
            if name in self._flow.modules
            for place in places(self._flow.modules[name])
        )

    def _makers(self, slots: list[_Slot]) -> list[tuple[int, int]]:
        """The channels that compute a neuron, as (position in forward order, channel)."""
        return sorted(
            (self._roots[name], channel)
            for name, side, channel in slots
            if side == "out" and name in self._roots
        )

    def _layers(self, neurons: list[list[_Slot]]) -> Iterator[tuple[list[str], list[list[_Slot]]]]:
        """Neurons gathered into layers of more than one, (names of its makers, its neurons), in forward order."""
        names = list(self._roots)
        neurons = sorted(neurons, key=self._makers)
        together: _Sets[int] = _Sets()
        for slots in neurons:
            first, *others = self._makers(slots)
            together.find(first[0])
            for other in others:
                together.join(first[0], other[0])
        gathered: dict[int, list[list[_Slot]]] = {}
        for slots in neurons:
            gathered.setdefault(together.find(self._makers(slots)[0][0]), []).append(slots)
        members = together.members()
        for key, layer in gathered.items():
            if len(layer) > 1:
                yield [names[position] for position in sorted(members[key])], layer
