"""Find the neuron graph of any model, and prove it on an example."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from fedpews.errors import ConfigError
from fedpews.neurons.channels import Side, groups, is_depthwise, places, slice_module, width
from fedpews.neurons.graph import Layer, NeuronGraph, assemble

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
    graph = _Sets(flow, skip).graph(model)
    verify(model, graph, example)
    return graph


def verify(model: nn.Module, graph: NeuronGraph, example: Tensor) -> None:
    """Raise a ConfigError unless closing neurons equals removing them, layer by layer, on the example.

    Compared in double precision, in evaluation mode, with all parameters jittered: a layer that starts at
    zero would prove nothing.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model, example, tolerance = _jittered(model, example, generator)
        failed: dict[str, str] = {}
        for layer in graph.layers:
            for _ in range(2):
                closed = torch.randperm(layer.size, generator=generator)[: max(1, layer.size // 2)]
                neurons = torch.ones(graph.size, dtype=torch.bool)
                neurons[layer.start + closed] = False
                found = _difference(model, graph, example, neurons, tolerance)
                if found:
                    failed.setdefault(layer.name, found)
    if failed:
        name, found = next(iter(failed.items()))
        raise ConfigError(
            f"closing neurons of layer {name!r} is not the same as removing them: {found}. "
            + _ways_out([part for name in failed for part in name.split(" + ")])
        )


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
        self._names = {module: name for name, module in self.modules.items()}
        self._parameters = {id(value): name for name, value in model.named_parameters()}
        self._entered = ""
        self._input: Any = None
        self._outputs: set[Any] = set()
        # As a parameter the input has a channel count the tracer can use, for instance in a concatenation.
        # But a 3-d parameter it would take for a class token.
        source = nn.Parameter(example.detach().clone()) if example.is_floating_point() else None
        self._graph = DependencyGraph()
        hooks = [module.register_forward_pre_hook(self._enter) for module in self.modules.values()]
        try:
            self._graph.build_dependency(
                model,
                example if source is None else source,
                forward_fn=self._forward,
                unwrapped_parameters=None if source is None or example.dim() == 3 else [(source, 1)],
                verbose=False,
            )
        except Exception as error:
            where = f", in or after layer {self._entered!r}" if self._entered else ""
            raise ConfigError(
                f"{type(model).__name__} cannot be traced{where}: {_line(error)}. "
                + _ways_out([self._entered] if self._entered else [])
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
        seen = set()
        while stack:
            node, handler, indices = stack.pop()
            key = (node, handler, frozenset(indices))
            side: Side = (
                "out" if handler == graph.get_pruner_of_module(node.module).prune_out_channels else "in"
            )
            # A single channel that is broadcast over all others is bound to none of them.
            if key in seen or (isinstance(node.module, nn.Module) and width(node.module, side) == 1):
                continue
            seen.add(key)
            yield node, side, indices
            for dependency in node.dependencies:
                if dependency.is_triggered_by(handler):
                    passed = indices
                    for mapping in dependency.index_mapping:
                        passed = passed if mapping is None else mapping(passed)
                    if passed:
                        stack.append((dependency.target, dependency.handler, passed))

    def barrier(self, node: Any, side: Side) -> str:
        """Why nothing that reaches this step can be masked; "" if it can."""
        if self._input is not None and node.grad_fn is self._input:
            return "is bound to the model's input"
        if side == "out" and node.grad_fn in self._outputs:
            return "reaches the model's output"
        owner = node.module
        if isinstance(owner, nn.Parameter) and id(owner) in self._parameters:
            path = self._parameters[id(owner)].rpartition(".")[0]
            owner = self.modules.get(path, owner)
            if type(owner).__module__.startswith("torch.nn."):
                return f"is mixed by a {type(owner).__name__}" if isinstance(owner, nn.Module) else ""
        return f"is mixed by a {type(owner).__name__}" if isinstance(owner, _MIXERS) else ""

    def place(self, node: Any, side: Side) -> tuple[str, int, int] | None:
        """(name, number of channels, channel dimension) of a layer or loose parameter; None for an operation."""
        module = node.module
        if isinstance(module, nn.Parameter):
            name = self._parameters.get(id(module))
            return None if name is None else (name, module.shape[node.pruning_dim], node.pruning_dim)
        if isinstance(module, nn.Module) and module in self._names and (count := width(module, side)):
            return self._names[module], count, 0
        return None


class _Sets:
    """Channels sorted into sets that live and die together (union-find), and the reasons that bar some of them."""

    def __init__(self, flow: _Flow, skip: Sequence[str]) -> None:
        self._flow = flow
        self._parent: dict[_Slot, _Slot] = {}
        self._barred: dict[_Slot, str] = {}
        self._broken: dict[_Slot, str] = {}
        self._loose: dict[str, int] = {}
        for root in flow.roots():
            if any(root == name or root.startswith(f"{name}.") for name in skip):
                self._barred[_Slot(root, "out", 0)] = "is skipped"
                self._bar(root, range(width(flow.modules[root], "out") or 0), "is skipped")
            for node, side, indices in flow.follow(root):
                self._bind(root, node, side, indices)
        for name, module in flow.modules.items():
            self._tie_groups(name, module)

    def _bar(self, root: str, channels: Sequence[int], reason: str) -> None:
        for channel in channels:
            self._barred[_Slot(root, "out", channel)] = reason

    def _bind(self, root: str, node: Any, side: Side, indices: list[_Index]) -> None:
        if reason := self._flow.barrier(node, side):
            self._bar(root, [index.root_idx for index in indices], reason)
            return
        place = self._flow.place(node, side)
        if place is None:
            return
        name, count, dim = place
        if isinstance(node.module, nn.Parameter):
            self._loose[name] = dim
        for channel, origin in indices:
            if origin is None or channel >= count:
                self._broken[_Slot(root, "out", origin or 0)] = name
            else:
                self._union(_Slot(root, "out", origin), _Slot(name, side, channel))

    def _tie_groups(self, name: str, module: nn.Module) -> None:
        count = groups(module)
        if count is None or is_depthwise(module):
            return
        sides: tuple[Side, ...] = ("in", "out") if isinstance(module, _ConvNd) else ("out",)
        for side in sides:
            channels = width(module, side) or 0
            for channel in range(channels):
                group = channel // (channels // count)
                self._union(
                    _Slot(name, side, channel),
                    _Slot(name, "out", group * (width(module, "out") or 0) // count),
                )

    def _find(self, slot: _Slot) -> _Slot:
        path = []
        while (parent := self._parent.get(slot, slot)) != slot:
            path.append(slot)
            slot = parent
        for passed in path:
            self._parent[passed] = slot
        return slot

    def _union(self, one: _Slot, other: _Slot) -> None:
        one, other = self._find(one), self._find(other)
        self._parent.setdefault(one, one)
        self._parent[other] = one

    def graph(self, model: nn.Module) -> NeuronGraph:
        """The sets that no reason bars and some layer reads, numbered in forward order."""
        members: dict[_Slot, list[_Slot]] = {}
        for slot in self._parent:
            members.setdefault(self._find(slot), []).append(slot)
        barred = {self._find(slot): reason for slot, reason in self._barred.items()}
        for slot, name in self._broken.items():
            if self._find(slot) not in barred:
                raise ConfigError(
                    f"the neurons of layer {slot.name!r} do not line up with the channels of {name!r}. "
                    + _ways_out([slot.name])
                )
        free = {key: slots for key, slots in members.items() if key not in barred and self._is_read(slots)}
        numbers: dict[_Slot, int] = {}
        layers: list[Layer] = []
        for roots, keys in self._layers(free):
            layers.append(Layer(" + ".join(roots), len(numbers), len(keys)))
            numbers.update({key: len(numbers) + position for position, key in enumerate(keys)})
        if not layers:
            reasons = sorted({f"{slot.name!r} {reason}" for slot, reason in self._barred.items()})
            raise ConfigError(
                f"{type(model).__name__} has no hidden neuron that can be masked ({'; '.join(reasons) or 'no layers'}). "
                + _ways_out([])
            )
        channels: dict[tuple[str, Side], Tensor] = {}
        loose: dict[str, tuple[int, Tensor]] = {}
        for key, number in numbers.items():
            for slot in members[key]:
                if slot.name in self._loose:
                    dim = self._loose[slot.name]
                    size = model.get_parameter(slot.name).shape[dim]
                    neurons = loose.setdefault(slot.name, (dim, torch.full((size,), -1)))[1]
                else:
                    size = width(self._flow.modules[slot.name], slot.side) or 0
                    neurons = channels.setdefault((slot.name, slot.side), torch.full((size,), -1))
                neurons[slot.channel] = number
        return assemble(model, layers, channels, loose)

    def _is_read(self, slots: list[_Slot]) -> bool:
        return any(
            place.reads and place.side == slot.side
            for slot in slots
            if slot.name in self._flow.modules
            for place in places(self._flow.modules[slot.name])
        )

    def _layers(self, free: dict[_Slot, list[_Slot]]) -> Iterator[tuple[list[str], list[_Slot]]]:
        """Sets gathered into layers: (the layers that make them, the sets in channel order)."""
        order = {name: position for position, name in enumerate(self._flow.roots())}
        makers: dict[str, set[str]] = {}  # root -> all roots it shares a neuron with; one object per layer
        first: dict[_Slot, tuple[int, int]] = {}
        for key, slots in free.items():
            made = [
                (order[slot.name], slot.channel)
                for slot in slots
                if slot.side == "out" and slot.name in order
            ]
            first[key] = min(made)
            names = {slot.name for slot in slots if slot.side == "out" and slot.name in order}
            joined = set().union(names, *(makers.get(name, set()) for name in names))
            makers.update(dict.fromkeys(joined, joined))
        by_layer: dict[int, list[_Slot]] = {}
        for key in sorted(free, key=first.__getitem__):
            root = self._flow.roots()[first[key][0]]
            by_layer.setdefault(id(makers[root]), []).append(key)
        for layer, keys in by_layer.items():
            if len(keys) > 1:
                yield (
                    sorted(
                        next(made for made in makers.values() if id(made) == layer), key=order.__getitem__
                    ),
                    keys,
                )


def _jittered(
    model: nn.Module, example: Tensor, generator: torch.Generator
) -> tuple[nn.Module, Tensor, float]:
    """A double-precision copy with random weights near the model's own, its input, and the precision to expect."""
    model = copy.deepcopy(model).eval()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point():
            noise = torch.rand(value.shape, generator=generator).to(value)
            value.data = value.data + 0.1 * (noise if name.endswith("running_var") else noise - 0.5)
    try:
        double = copy.deepcopy(model).double()
        value = example.double() if example.is_floating_point() else example
        double(value)
    except RuntimeError:  # the model insists on its own precision somewhere
        return model, example, 1e-3
    return double, value, 1e-7


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
        return f"the smaller network does not run ({_line(error)})"
    for one, other in zip(gated, sliced, strict=True):
        if isinstance(one, Tensor) and one.is_floating_point():
            if one.shape != other.shape:
                return f"the output has shape {tuple(one.shape)} and {tuple(other.shape)}"
            scale = max(1.0, float(one.detach().abs().max())) if one.numel() else 1.0
            if not torch.allclose(one, other, rtol=0.0, atol=tolerance * scale):
                return f"the outputs differ by {float((one - other).detach().abs().max()):.2g}"
    return ""


def _line(error: Exception) -> str:
    """The first line of an error's message, with its kind."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].rstrip('.')}" if text else type(error).__name__


def _ways_out(names: Sequence[str]) -> str:
    """What to do about layers that cannot be masked."""
    listed = ", ".join(f'"{name}"' for name in dict.fromkeys(names)) or '"layer.name"'
    return (
        f"Either never mask it, trace(model, example, skip=[{listed}]), or give the graph by hand, "
        'NeuronGraph.by_hand(model, [Hidden("layer", read_by=["next.layer"])]).'
    )
