"""Which elements of which parameter belong to which hidden neuron, and what follows from that."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedpews.errors import ConfigError
from fedpews.neurons.layers import Attention, Hidden, Layer, describe, groups_left
from fedpews.neurons.modules import computed_tensors
from fedpews.trees import Tree


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension of one parameter or buffer, and the hidden neuron each position on it belongs to.

    ``neurons`` is int64, one entry per position; −1 is no neuron, so always kept. ``reads`` is whether the positions
    read the neuron's output (the input columns of a later layer) or compute it (its row, bias, norm scale, shift and
    running statistics, depthwise kernels). ``rank`` is the number of the tensor's dimensions.
    """

    dim: int
    neurons: Tensor
    reads: bool
    rank: int
    _run: int | None = field(init=False, repr=False)
    _indices: dict[torch.device, Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        first = int(self.neurons[0]) if len(self.neurons) else -1
        is_run = first >= 0 and torch.equal(self.neurons, torch.arange(first, first + len(self.neurons)))
        object.__setattr__(self, "_run", first if is_run else None)

    def pick(self, values: Tensor) -> Tensor:
        """The value, out of (..., h), of each position's neuron; one where there is none."""
        if self._run is not None:
            return values.narrow(-1, self._run, len(self.neurons))  # as good as an index, and much faster
        ones = values.new_ones(*values.shape[:-1], 1)
        return torch.cat([values, ones], -1)[..., self._index(values.device)]  # −1 is the one at the end

    def spread(self, values: Tensor) -> Tensor:
        """The same, shaped to broadcast along this axis of the tensor."""
        shape = [1] * self.rank
        shape[self.dim] = len(self.neurons)
        return self.pick(values).view(*values.shape[:-1], *shape)

    def _index(self, device: torch.device) -> Tensor:
        """``neurons`` where the values are: copied there once, since a copy in every step would hold a GPU up."""
        if device not in self._indices:
            self._indices[device] = self.neurons.to(device)
        return self._indices[device]

    def kept(self, neurons: Tensor) -> Tensor:
        """The positions whose neuron is open, or that have none."""
        return self.pick(neurons).nonzero().squeeze(1)


@dataclass(frozen=True, eq=False)
class NeuronGraph:
    """The hidden neurons of a model and every slice of a parameter or buffer that each of them owns.

    ``layers`` are in forward order. ``axes`` is keyed as in ``named_parameters`` and ``named_buffers``; a name
    it lacks belongs to no neuron. ``norms`` has the neuron of each channel of every norm on the way, by module
    name, because a norm without parameters has to be resized too when the network is cut. ``weights`` counts the
    elements of every parameter. ``left_whole`` are the layers that belong to no neuron, so to every client, and why;
    ``uncut`` those that can be masked but not cut out, because the model's code has their sizes written into it.

    >>> from fedpews.neurons import trace
    >>> graph = trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(4, 2))
    >>> graph.size
    3
    >>> graph.expand(torch.tensor([True, False, True]))["2.weight"]
    tensor([[ True, False,  True]])
    """

    layers: tuple[Layer, ...]
    axes: Mapping[str, tuple[Axis, ...]]
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    left_whole: Mapping[str, str] = field(default_factory=dict)
    uncut: frozenset[str] = frozenset()

    @property
    def masked_share(self) -> float:
        """The part of the model's weights that belong to some neuron, so that a client may not have them.

        >>> from fedpews.neurons import trace
        >>> graph = trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(4, 2))
        >>> graph.masked_share  # 9 + 3 of 9 + 4: all but the last bias
        0.9230769230769231
        """
        shared = 0.0
        for name, count in self.weights.items():
            kept = [float((axis.neurons < 0).float().mean()) for axis in self.axes.get(name, ())]
            shared += count * math.prod(kept)
        return 1 - shared / max(1, sum(self.weights.values()))

    @cached_property
    def readers(self) -> tuple[str, ...]:
        """The parameters that read a neuron's output."""
        return tuple(name for name, axes in self.axes.items() if any(axis.reads for axis in axes))

    @cached_property
    def size(self) -> int:
        """The number of hidden neurons, h."""
        return sum(layer.size for layer in self.layers)

    def gate(self, params: Mapping[str, Tensor], gates: Tensor) -> Tree:
        """Multiply what the next layers read from each neuron by its gate; ``gates`` is (h,).

        With gates of 0 and 1 the forward pass is that of the network with the closed neurons removed, and no
        element of a closed neuron has a gradient. Gates may be any real numbers and carry a gradient themselves.
        Pure: fit for ``vmap``, ``grad`` and ``make_fx``.
        """
        gated = dict(params)
        for name, axes in self.axes.items():
            if name in gated:
                for axis in axes:
                    if axis.reads:
                        gated[name] = gated[name] * axis.spread(gates).to(gated[name].dtype)
        return gated

    def gate_inputs(self, weight: str, inputs: Tensor, gates: Tensor) -> Tensor:
        """Multiply what a layer is fed by the gates of the neurons it reads; ``weight`` names the layer's weight."""
        for axis in self.axes.get(weight, ()):
            if axis.reads:
                shape = [1] * inputs.dim()
                shape[-1 if axis.rank == 2 else 1] = -1  # channels are last for linear layers, else second
                inputs = inputs * axis.pick(gates).view(shape).to(inputs.dtype)
        return inputs

    def expand(self, neurons: Tensor) -> Tree:
        """The parameter mask: an element is kept iff the neurons on all its sides are.

        ``neurons`` is (..., h), boolean or 0/1 numbers; the masks have its dtype and its leading dimensions (one for
        each of several clients, say). Each broadcasts against its parameter; only names that belong to some neuron
        appear.
        """
        masks: Tree = {}
        for name, (first, *others) in self.axes.items():
            masks[name] = first.spread(neurons)
            for axis in others:
                masks[name] = masks[name] * axis.spread(neurons)
        return masks

    def covered(self, neurons: Tensor) -> Tree:
        """The elements that at least one of several clients owns; ``neurons`` is (clients, h) boolean.

        >>> from fedpews.neurons import trace
        >>> graph = trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), torch.zeros(4, 2))
        >>> graph.covered(torch.tensor([[True, False], [True, False]]))["2.weight"]
        tensor([[ True, False]])
        """
        # a few clients at a time: memory does not grow with their number
        blocks = [self.expand(block) for block in neurons.split(32)]
        return {
            name: reduce(torch.logical_or, [block[name].any(0) for block in blocks]) for name in self.axes
        }

    def is_zero(self, params: Mapping[str, Tensor]) -> Tensor:
        """(h,) bool: the neurons all of whose elements are zero, so that no gradient reaches them."""
        largest = torch.zeros(self.size + 1)  # the last is that of no neuron
        for name, axes in self.axes.items():
            if name not in params:
                continue
            for axis in axes:
                rows = params[name].detach().abs().movedim(axis.dim, 0).reshape(len(axis.neurons), -1)
                largest.scatter_reduce_(
                    0, axis.neurons % (self.size + 1), rows.amax(1).cpu().to(largest), "amax"
                )
        return largest[: self.size] == 0

    def count(self, neurons: Tensor, shapes: Mapping[str, torch.Size]) -> list[dict[str, int]]:
        """For each of several masks, (clients, h), how many elements ``expand`` would keep of each tensor.

        Without making the masks of the tensors.

        >>> from fedpews.neurons import trace
        >>> graph = trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(4, 2))
        >>> graph.count(torch.tensor([[True, False, True], [True, True, True]]), {"0.weight": torch.Size([3, 2])})
        [{'0.weight': 4}, {'0.weight': 6}]
        """
        kept, counts = neurons.cpu().bool(), {}
        for name, axes in self.axes.items():
            if name in shapes:
                others = math.prod(shapes[name]) // math.prod(shapes[name][axis.dim] for axis in axes)
                positions = reduce(torch.mul, [axis.pick(kept).sum(-1) for axis in axes])
                counts[name] = (others * positions).tolist()
        return [dict(zip(counts, row, strict=True)) for row in zip(*counts.values(), strict=True)]

    def slice(self, params: Mapping[str, Tensor], neurons: Tensor) -> Tree:
        """The tensors of the physically smaller network that has only the open ``neurons``; (h,) boolean."""
        sliced = dict(params)
        for name, axes in self.axes.items():
            if name in sliced:
                for axis in axes:
                    index = axis.kept(neurons).to(sliced[name].device)
                    sliced[name] = sliced[name].index_select(axis.dim, index)
        return sliced

    def scatter(self, full: Mapping[str, Tensor], sliced: Mapping[str, Tensor], neurons: Tensor) -> Tree:
        """The inverse of :meth:`slice`: the sliced values back in their channel_dims, all else as in ``full``."""
        return {
            name: _put(value, sliced[name], self.axes.get(name, ()), neurons) for name, value in full.items()
        }

    def trial_masks(self) -> tuple[Tensor, Tensor]:
        """Every other neuron of each layer, and its first ones, of each layer another part: (h,) bool each.

        Code that splits a layer at a size of its own (``chunk``) runs on equal halves, but not on the second.
        """
        halves, uneven = torch.zeros(2, self.size, dtype=torch.bool)
        for number, layer in enumerate(self.layers, 1):
            halves[layer.start : layer.start + layer.size : 2] = True
            count = round(layer.size * number / (len(self.layers) + 1))
            uneven[layer.start : layer.start + max(1, min(layer.size - 1, count))] = True
        return halves, uneven

    def without(self, layers: Mapping[str, str]) -> NeuronGraph:
        """The graph in which these layers (by name, with the reason) are whole."""
        numbers = torch.full((self.size + 1,), -1)  # the last is that of no neuron
        kept: list[Layer] = []
        for layer in self.layers:
            if layer.name not in layers:
                start = sum(before.size for before in kept)
                numbers[layer.neurons] = torch.arange(start, start + layer.size)
                kept.append(Layer(layer.name, start, layer.size))
        axes = {
            name: tuple(
                Axis(axis.dim, numbers[axis.neurons], axis.reads, axis.rank)
                for axis in own
                if bool((numbers[axis.neurons] >= 0).any())
            )
            for name, own in self.axes.items()
        }
        norms = {name: numbers[neurons] for name, neurons in self.norms.items()}
        return replace(
            self,
            layers=tuple(kept),
            axes={name: own for name, own in axes.items() if own},
            norms={name: neurons for name, neurons in norms.items() if bool((neurons >= 0).any())},
            left_whole={**self.left_whole, **layers},
        )

    @classmethod
    def by_hand(cls, model: nn.Module, hidden: Sequence[Hidden]) -> NeuronGraph:
        """The graph of a model that cannot be traced: one :class:`Hidden` per hidden layer, in forward order.

        :func:`fedpews.neurons.verify` checks the result on an example.

        >>> from fedpews.neurons import Hidden
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2))
        >>> graph = NeuronGraph.by_hand(model, [Hidden("0", through=["1"], read_by=["3"])])
        >>> graph.axes["3.weight"][0].neurons[:12]
        tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
        """
        layers, axes, norms = describe(model, hidden)
        return cls(
            tuple(layers),
            {
                name: tuple(Axis(dim, *axis) for dim, axis in sorted(dims.items()))
                for name, dims in axes.items()
            },
            norms,
            {name: value.numel() for name, value in model.named_parameters()},
        )


def _put(full: Tensor, part: Tensor, axes: Sequence[Axis], neurons: Tensor) -> Tensor:
    """``full`` with ``part`` at the open positions of the axes."""
    if not axes:
        return part
    first, *others = axes
    index = first.kept(neurons).to(full.device)
    rows = _put(full.index_select(first.dim, index), part, others, neurons)
    return full.index_copy(first.dim, index, rows)


def slice_module(model: nn.Module, graph: NeuronGraph, neurons: Tensor) -> nn.Module:
    """A deep copy of the model with the closed neurons physically removed.

    ``neurons`` is (h,) boolean; every layer of the graph must keep at least one.

    >>> import torch
    >>> from fedpews.neurons import Hidden
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> graph = NeuronGraph.by_hand(model, [Hidden("0", read_by=["2"])])
    >>> slice_module(model, graph, torch.tensor([True, False, True]))
    Sequential(
      (0): Linear(in_features=2, out_features=2, bias=True)
      (1): ReLU()
      (2): Linear(in_features=2, out_features=1, bias=True)
    )
    """
    for layer in graph.layers:
        if layer.name in graph.uncut and not bool(neurons[layer.neurons].all()):
            raise ConfigError(
                f"the neurons of layer {layer.name!r} can be masked but not removed: the model's code has their "
                "number written into it."
            )
    memo = computed_tensors(model)  # what the deep copy takes instead of copying
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name in graph.axes:
            sliced = graph.slice({name: value.detach()}, neurons)[name]
            is_parameter = isinstance(value, nn.Parameter)
            memo[id(value)] = nn.Parameter(sliced, value.requires_grad) if is_parameter else sliced
    model = copy.deepcopy(model, memo)
    for name, module in model.named_modules():
        if name in graph.norms:
            channels = graph.norms[name]
            kept = int((neurons[channels.clamp(min=0)] | (channels < 0)).sum())
            if isinstance(module, nn.GroupNorm):
                module.num_groups, module.num_channels = groups_left(module, kept), kept
            elif isinstance(module, _NormBase):
                module.num_features = kept
        else:
            _resize(module)
    return model


def _resize(module: nn.Module) -> None:
    """Make a layer's stated sizes agree with its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _ConvNd):
        first, second = module.weight.shape[:2]
        if module.groups > 1:
            module.groups = groups_left(module, first)
        if module.transposed:
            module.in_channels, module.out_channels = first, second * module.groups
        else:
            module.out_channels, module.in_channels = first, second * module.groups
    elif type(module) is nn.MultiheadAttention and module.out_proj.weight.shape[1] < module.embed_dim:
        Attention.replace(module)
        module.num_heads = module.out_proj.weight.shape[1] // module.head_dim
    elif isinstance(module, nn.PReLU):
        module.num_parameters = module.weight.shape[0]
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(getattr(module, "nf", None), int) and isinstance(
        weight := getattr(module, "weight", None), Tensor
    ):
        vars(module)["nf"] = weight.shape[1]  # Hugging Face's Conv1D, a linear layer the other way round
