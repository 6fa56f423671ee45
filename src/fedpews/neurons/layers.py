"""The channels of torch's layers, and hidden layers described by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedpews.errors import ConfigError

Side = Literal["in", "out"]
Inputs = str | tuple[str, int, int]


@dataclass(frozen=True)
class Layer:
    """Neurons ``start`` … ``start + size − 1``; ``name`` is the module that makes them, or several that are bound."""

    name: str
    start: int
    size: int

    @property
    def neurons(self) -> slice:
        return slice(self.start, self.start + self.size)


def is_norm(module: nn.Module) -> bool:
    """Whether this is a norm whose channels (or groups of them) do not influence each other."""
    return isinstance(module, _NormBase | nn.GroupNorm)


def groups_attribute(module: nn.Module) -> str | None:
    """The attribute with the number of groups into which a layer ties its channels; None if it ties none together.

    A GroupNorm mixes the channels of a group, a grouped convolution binds a group of outputs to a group of
    inputs: either way the whole group is one neuron, and removing it leaves a layer with one group less.
    """
    if isinstance(module, nn.GroupNorm):
        return "num_groups"
    return "groups" if isinstance(module, _ConvNd) and module.groups > 1 else None


def groups_left(module: nn.Module, channels: int) -> int:
    """How many groups a GroupNorm, or a grouped convolution, has when so many of its channels are left."""
    if isinstance(module, nn.GroupNorm):
        return module.num_groups * channels // module.num_channels
    assert isinstance(module, _ConvNd), "no other layer has groups"
    return module.groups * channels // (module.in_channels if module.transposed else module.out_channels)


class Attention(nn.MultiheadAttention):
    """torch's attention, which also runs with the weights of fewer heads, or of none.

    The original takes the width of all heads from its inputs. It also never calls its last layer, so that nothing can
    be gated at that layer's inputs. Apart from these two cases the original runs.
    """

    @staticmethod
    def replace(module: nn.Module) -> None:
        """Make a module one of these, if it is torch's own attention with one weight for queries, keys and values."""
        if type(module) is nn.MultiheadAttention and module._qkv_same_embed_dim:
            # an extra key and value belong to no head
            has_extra = module.add_zero_attn or module.bias_k is not None
            if not has_extra:
                module.__class__ = Attention

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # by this name torch asks whether its kernels for whole transformer layers, which need all heads, may run
        return bool(self.out_proj.weight.shape[1] == self.embed_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self._qkv_same_embed_dim and (need_weights or not self.out_proj._forward_pre_hooks):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if query is key is value:
            parts = F.linear(query, weight, bias).chunk(3, -1)
        else:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            parts = tuple(map(F.linear, (query, key, value), weight.chunk(3), biases))
        is_batched = query.dim() == 3
        moves = is_batched and not self.batch_first
        sizes = (len(weight) // (3 * self.head_dim), self.head_dim)
        # (batch, heads, positions, features of a head); without a batch one dimension less
        q, k, v = (
            (part.transpose(0, 1) if moves else part).unflatten(-1, sizes).transpose(-2, -3) for part in parts
        )
        mask = None if key_padding_mask is None else _added(key_padding_mask, q)[..., None, None, :]
        if attn_mask is not None:
            if is_batched and attn_mask.dim() == 3:  # another one for each head
                attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
            mask = _added(attn_mask, q) if mask is None else mask + _added(attn_mask, q)
        heads = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        out: Tensor = self.out_proj(heads.transpose(-2, -3).flatten(-2))
        # no weights of the attention: their mean is over all heads, so a model that uses them is not cut
        return out.transpose(0, 1) if moves else out, None


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers that are added; a boolean one is true where attention is not allowed."""
    return mask if mask.is_floating_point() else like.new_zeros(mask.shape).masked_fill(mask, -torch.inf)


@dataclass(frozen=True)
class Hidden:
    """One hidden layer.

    ``made_by``: the linear layer or convolution that computes the neurons, or several whose outputs are added.
    ``read_by``: every linear layer or convolution that takes them as input. A flatten is understood from the
    sizes: four channels read by 36 inputs are nine inputs each. After a concatenation say which inputs:
    ``("head", 8, 12)`` reads the neurons at inputs 8 … 11.
    ``through``: what lies between and treats channels one by one or in groups: norms, PReLU, depthwise and
    grouped convolutions. A group counts as one neuron.
    """

    made_by: str | Sequence[str]
    read_by: Sequence[Inputs]
    through: Sequence[Inputs] = ()


_SIZES: dict[type[nn.Module], tuple[str, str]] = {
    nn.Linear: ("in_features", "out_features"),
    _ConvNd: ("in_channels", "out_channels"),
    _NormBase: ("num_features", "num_features"),
    nn.GroupNorm: ("num_channels", "num_channels"),
    nn.PReLU: ("num_parameters", "num_parameters"),
    nn.Embedding: ("embedding_dim", "embedding_dim"),
}
"""Where a layer says how many input and output channels it has."""


def _width(module: nn.Module, side: Side) -> int:
    """The number of channels on one side of a layer; 0 for a layer we do not know, or without channels."""
    names = next((names for kind, names in _SIZES.items() if isinstance(module, kind)), None)
    if names is None or (isinstance(module, nn.PReLU) and module.num_parameters == 1):
        return 0
    return int(getattr(module, names[side == "out"]))


def _channel_dims(module: nn.Module) -> list[tuple[str, int, Side, bool]]:
    """The dimensions of a layer's tensors that run over its channels: (tensor, dimension, side, whether it reads).

    A layer that works channel by channel (a norm, PReLU, an embedding) has one side, "out". A grouped convolution ties
    its inputs to its outputs, so none of its weights counts as reading; its first dimension belongs to the groups.
    """
    dims: list[tuple[str, int, Side, bool]]
    if isinstance(module, _ConvNd) and module.groups > 1:
        dims = [("weight", 0, "in" if module.transposed else "out", False), ("bias", 0, "out", False)]
    elif isinstance(module, nn.Linear | _ConvNd):
        transposed = int(getattr(module, "transposed", False))
        dims = [("weight", transposed, "out", False), ("bias", 0, "out", False)]
        dims += [("weight", 1 - transposed, "in", True)]
    elif isinstance(module, nn.Embedding):
        dims = [("weight", 1, "out", False)]
    elif _width(module, "out"):
        dims = [(name, 0, "out", False) for name in ("weight", "bias", "running_mean", "running_var")]
    else:
        dims = []
    return [entry for entry in dims if isinstance(getattr(module, entry[0], None), Tensor)]


def describe(
    model: nn.Module, hidden: Sequence[Hidden]
) -> tuple[list[Layer], dict[str, dict[int, tuple[Tensor, bool, int]]], dict[str, Tensor]]:
    """The layers, the axes of every tensor (by dimension: neurons, whether it reads, rank), and the norms' neurons."""
    layers, channels = _number(model, hidden)
    modules = dict(model.named_modules())
    names = {id(value): name for name, value in (*model.named_parameters(), *model.named_buffers())}
    axes: dict[str, dict[int, tuple[Tensor, bool, int]]] = {}
    for (layer, side), neurons in channels.items():
        for tensor, dim, its_side, reads in _channel_dims(modules[layer]):
            if its_side != side:
                continue
            value = getattr(modules[layer], tensor)
            if id(value) not in names:
                raise ConfigError(
                    f"layer {layer!r} computes its {tensor} from other parameters (weight_norm?), so it cannot be "
                    "divided among neurons. Remove the parametrization, or skip the layer."
                )
            dims = axes.setdefault(names[id(value)], {})
            known, known_reads, _ = dims.get(dim, (neurons, False, 0))
            if not torch.equal(known, neurons):
                raise ConfigError(
                    f"layer {layer!r} shares its {tensor} with another layer, for other neurons. Skip it."
                )
            dims[dim] = neurons, reads or known_reads, value.dim()
    norms = {name: neurons for (name, _), neurons in channels.items() if is_norm(modules[name])}
    return layers, axes, norms


def _number(model: nn.Module, hidden: Sequence[Hidden]) -> tuple[list[Layer], dict[tuple[str, Side], Tensor]]:
    """The layers, and the neuron of every channel, (layer's name, side) -> (channels,)."""
    modules = dict(model.named_modules())
    layers: list[Layer] = []
    channels: dict[tuple[str, Side], Tensor] = {}
    start = 0
    for layer in hidden:
        made_by = [layer.made_by] if isinstance(layer.made_by, str) else list(layer.made_by)
        if not made_by or not layer.read_by:
            raise ConfigError(f"{layer}: name the layers that make the neurons and those that read them.")
        through = [_name(inputs) for inputs in layer.through]
        for name in (*made_by, *map(_name, layer.read_by), *through):
            _check(modules, name, makes_or_reads=name not in through)
        widths = {name: _width(modules[name], "out") for name in made_by}
        if len(set(widths.values())) > 1:
            raise ConfigError(f"layers that are added must be equally wide; these are {widths}.")
        tied = [getattr(modules[name], own) for name in through if (own := groups_attribute(modules[name]))]
        size = math.gcd(*widths.values(), *tied)
        neurons = torch.arange(start, start + size)
        sides: list[tuple[Inputs, Side]] = [(name, "out") for name in made_by]
        sides += [(inputs, side) for inputs in layer.through for side in ("in", "out")]
        sides += [(inputs, "in") for inputs in layer.read_by]
        for inputs, side in sides:
            total = _width(modules[_name(inputs)], side)
            name, first, last = (inputs, 0, total) if isinstance(inputs, str) else inputs
            if not 0 <= first < last <= total or (last - first) % size:
                raise ConfigError(
                    f"{size} neurons do not fit evenly into {side}put channels {first} to {last - 1} of layer "
                    f"{name!r}, which has {total}."
                )
            carried = channels.setdefault((name, side), torch.full((total,), -1))
            if bool((carried[first:last] >= 0).any()):
                raise ConfigError(
                    f"{side}put channels {first} to {last - 1} of layer {name!r} are given twice."
                )
            carried[first:last] = neurons.repeat_interleave((last - first) // size)
        layers.append(Layer(" + ".join(made_by), start, size))
        start += size
    return layers, channels


def _name(inputs: Inputs) -> str:
    return inputs if isinstance(inputs, str) else inputs[0]


def _check(modules: dict[str, nn.Module], name: str, makes_or_reads: bool) -> None:
    """Raise a ConfigError unless there is such a layer and it is of the kind its role needs."""
    if name not in modules:
        known = ", ".join(repr(name) for name, module in modules.items() if _width(module, "out"))
        raise ConfigError(f"the model has no layer {name!r}; it has {known}.")
    reads = any(reads for *_, reads in _channel_dims(modules[name]))
    if reads != makes_or_reads or not _width(modules[name], "out"):
        role = "made_by and read_by take linear layers and ungrouped convolutions"
        other = "through takes norms (not LayerNorm), PReLU and grouped convolutions"
        raise ConfigError(
            f"layer {name!r} is a {type(modules[name]).__name__}; {role if makes_or_reads else other}."
        )
