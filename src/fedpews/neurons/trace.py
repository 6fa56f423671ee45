"""Find the neuron graph of any model, and prove it on an example."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedpews.errors import ConfigError, first_line
from fedpews.neurons.follow import Follower
from fedpews.neurons.graph import Axis, NeuronGraph
from fedpews.neurons.labels import FIRST, Dimension, Sets
from fedpews.neurons.layers import Layer
from fedpews.neurons.modules import batches, copy_module, outputs_of, prepared, run
from fedpews.neurons.rules import RULES
from fedpews.neurons.verify import BY_HAND, prove
from fedpews.seeds import global_generator
from fedpews.torch_private import tree_leaves

AT_OUTPUT, SKIPPED, FROZEN = "reaches the model's output", "is skipped", "has neurons with frozen weights"
UNREACHED = "which the example does not reach"


def trace(
    model: nn.Module, example: Any, skip: Sequence[str] = (), *, strict: bool = False, frozen: bool = False
) -> NeuronGraph:
    """The hidden neurons of ``model``, traced by running ``example`` (a batch of inputs) through a copy of it.

    A neuron is a unit of a linear layer, a channel of a convolution or a unit of a recurrent layer that later
    layers read. Parts that cannot be separated are one neuron: channels that residual connections add to each
    other, the two halves of a gated linear unit, the channels of one group of a GroupNorm or of a grouped
    convolution, the queries, keys and values of an attention head.

    Some units are left whole, so every client trains them: the model's inputs and outputs, channels that a LayerNorm
    (or another norm over all channels) mixes, layers of a single neuron, neurons of frozen layers (a pretrained base
    under LoRA), units that may be read by a layer that the example does not reach (a branch not taken, an expert not
    chosen), and the layers in ``skip`` (or in the model's ``unmasked``) with all units bound to them. The name of a
    module covers all modules in it.

    The graph is verified on the example, in evaluation and in training: a masked neuron must not influence the
    outputs. A layer that fails is left whole too. ``graph.left_whole`` has these layers and the reasons,
    ``graph.masked_share`` the share of the weights that can be masked.

    Args:
        example: a tensor, or a tuple or dict of the model's arguments.
        strict: raise a ConfigError if the verification of a layer fails, instead of leaving the layer whole.
        frozen: also mask the neurons of frozen weights.

    >>> graph = trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(4, 2))
    >>> graph.layers
    (Layer(name='0', start=0, size=3),)

    Grouping dependent channels follows Fang et al., DepGraph: Towards Any Structural Pruning, CVPR 2023. Here they are
    traced through torch's operations, so any Python code works.
    """
    model = prepared(model, example)
    names = [name for name, _ in model.named_modules() if name]
    for name in skip:
        if name not in names:
            raise ConfigError(f"skip: the model has no layer {name!r}; it has {', '.join(map(repr, names))}.")
    # dropout and the proof draw numbers, which must not move the caller's generator
    with global_generator():
        follower = _follow(model, example)
        graph = _graph(model, follower, (*skip, *getattr(model, "unmasked", ())), frozen)
        graph = prove(model, graph, example, strict=strict)
    if not graph.layers:
        reasons = ", ".join(f"{name!r} {reason}" for name, reason in graph.left_whole.items())
        raise ConfigError(
            f"{type(model).__name__} has no hidden neuron that could be masked "
            f"({reasons or 'no linear layer or convolution with a later layer that reads it'}). "
            "Choose another model, a method without warmup, or give the graph by hand, " + BY_HAND
        )
    _report(model, graph)
    return graph


def _report(model: nn.Module, graph: NeuronGraph) -> None:
    """One line: how much of the model is masked, and what is not."""
    left: dict[str, list[str]] = {}
    for name, reason in graph.left_whole.items():
        if reason != AT_OUTPUT:
            left.setdefault(reason, []).append(name)
    text = ", ".join(f"{_few(names)} ({reason})" for reason, names in left.items())
    logging.getLogger("fedpews").log(
        # shown without setting up logging where a part of the model is not what a user expects to be masked
        logging.WARNING if left else logging.INFO,
        "%s: %.0f %% of the weights belong to %d neurons%s",
        type(model).__name__,
        100 * graph.masked_share,
        graph.size,
        f"; whole for every client: {text}" if left else "",
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _follow(model: nn.Module, example: Any) -> Follower:
    """What the passes in evaluation and in training tell about the model's channels."""
    copied = copy_module(model).eval()
    follower = Follower(copied, RULES)
    doing = "does not run on the example"
    try:
        evaluation, training = batches(copied, example)
        doing = "cannot be traced"
        follower.entered.clear()
        # The first pass only joins: what may be closed shows when all that goes together is known.
        # The last two are for parameters that no other pass used, if there are any.
        for number, is_training in enumerate((False, True, False, True, False)):
            if number == 3:
                if not follower.unreached:
                    break
                follower.suspects = _suspects(follower)
            copied.train(is_training)
            with follower.following():
                for batch in training if is_training else evaluation:
                    for tensor in tree_leaves(batch):
                        if isinstance(tensor, Tensor):
                            follower.feed(tensor)
                    for output in outputs_of(run(copied, batch)):
                        # outputs belong to the task: no client may close a class
                        follower.bar(follower.tag(output), AT_OUTPUT)
            if number == 0:
                follower.sets.barred.clear()
    except Exception as error:
        entered = next(reversed(follower.entered), "")
        where = f" (last layer entered: {entered!r})" if entered else ""
        way_out = f" Give the graph by hand, {BY_HAND}" if doing == "cannot be traced" else ""
        raise ConfigError(f"{type(model).__name__} {doing}{where}: {first_line(error)}.{way_out}") from error
    return follower


def _suspects(follower: Follower) -> dict[str, str]:
    """The modules whose code may use what no pass reached, with the reason to leave whole all that they handle.

    A module that is never entered is called by the module around it, which can read only its own inputs and what it
    and its other parts compute, not what stays inside these parts.
    """
    suspects: dict[str, str] = {}
    for name in follower.unreached.values():
        layer = module = name.rpartition(".")[0]
        while module and module not in follower.entered:
            module = module.rpartition(".")[0]
        suspects.setdefault(module, f"may be read by {layer or name!r}, {UNREACHED}")
    return suspects


def _graph(model: nn.Module, follower: Follower, skip: Sequence[str], frozen: bool) -> NeuronGraph:
    """The sets of channels that nothing bars, that some layer makes and another reads, in forward order."""
    sets, numbers = follower.sets, torch.arange(len(follower.owned))
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for dimension in follower.dimensions:
        # a tied weight (W and Wᵀ): a gate where it reads would also change what it makes
        if all(bool(role[dimension.positions].any()) for role in (follower.owned, follower.read)):
            sets.bar(numbers[dimension.positions], "makes neurons and reads them with the same weights")
    for dimension in follower.makers:
        if not frozen and not tensors[dimension.name].requires_grad:
            sets.bar(numbers[dimension.positions], FROZEN)
        if any(dimension.name.startswith(f"{name}.") for name in skip):
            sets.bar(numbers[dimension.positions], SKIPPED)
    root = sets.find(numbers)
    free = torch.zeros(len(root), dtype=torch.bool)
    # gates are applied where a neuron is read, so only what is read can be closed
    free[root[follower.read]] = True
    # reversed, so that the first reason given stays when sets were joined later
    barred = {int(root[number]): reason for number, reason in reversed(sets.barred.items())}
    free[list(barred)] = False
    free[:FIRST] = False
    layers, neuron_of = _number(follower, root, free)
    axes: dict[str, list[Axis]] = {}
    for dimension in follower.dimensions:
        part, reads = dimension.positions, follower.read[dimension.positions]
        # (positions of the dimension,): the neuron each belongs to, −1 for none
        neurons = torch.where(follower.owned[part] | reads, neuron_of[root[part]], -1)
        if bool((neurons >= 0).any()):
            axis = Axis(dimension.dim, neurons, bool(reads.any()), tensors[dimension.name].dim())
            axes.setdefault(dimension.name, []).append(axis)
    norms = {name: neuron_of[sets.find(given)] for name, given in follower.norms.items()}
    return NeuronGraph(
        tuple(layers),
        {name: tuple(dims) for name, dims in axes.items()},
        {name: neurons for name, neurons in norms.items() if bool((neurons >= 0).any())},
        {name: value.numel() for name, value in model.named_parameters()},
        _left_whole(follower, root, neuron_of, barred),
    )


def _number(follower: Follower, root: Tensor, free: Tensor) -> tuple[list[Layer], Tensor]:
    """The layers of more than one neuron, in forward order, and the neuron of each set of channels or −1."""
    makers = [*follower.makers]
    # layers that share a neuron (those of a residual stream) become one layer, named after all of them
    owner: dict[int, int] = {}  # set of channels -> its first maker
    shared: list[tuple[int, int]] = []
    for position, dimension in enumerate(makers, FIRST):
        for number in root[dimension.positions].tolist():
            if bool(free[number]):
                shared.append((owner.setdefault(number, position), position))
    together = Sets(FIRST + len(makers))
    together.join(*torch.tensor(shared, dtype=torch.int64).view(-1, 2).T)
    layer_of = together.find(torch.arange(FIRST + len(makers))).tolist()
    members_of: dict[int, list[int]] = {}
    for number, position in owner.items():
        members_of.setdefault(layer_of[position], []).append(number)
    layers: list[Layer] = []
    neuron_of = torch.full_like(root, -1)
    start = 0
    for key, members in members_of.items():
        # a single neuron could only be closed together with its whole layer
        if len(members) > 1:
            names = [_layer(d) for position, d in enumerate(makers, FIRST) if layer_of[position] == key]
            layers.append(Layer(" + ".join(dict.fromkeys(names)), start, len(members)))
            neuron_of[members] = torch.arange(start, start + len(members))
            start += len(members)
    return layers, neuron_of


def _layer(dimension: Dimension) -> str:
    """The name of the layer that a weight belongs to; of a layer with several weights, the weight's name."""
    return dimension.name.removesuffix(".weight")


def _left_whole(
    follower: Follower, root: Tensor, neuron_of: Tensor, barred: dict[int, str]
) -> dict[str, str]:
    """The layers none of whose units can be closed, and why."""
    mixed = {int(root[number]): how for number, how in reversed(follower.sets.mixed.items())}
    left = {}
    for dimension in follower.makers:
        sets = root[dimension.positions]
        if bool((neuron_of[sets] < 0).all()):
            members = list(dict.fromkeys(sets.tolist()))
            # the plainest reason first: what a user expects, then what mixes the layer, then the rest
            plain = (AT_OUTPUT, SKIPPED, FROZEN)
            reasons = [barred[member] for member in members if barred.get(member) in plain]
            reasons += [f"is mixed into one by a {mixed[m]}" for m in members if m in mixed]
            reasons += [barred[member] for member in members if member in barred]
            left[_layer(dimension)] = (reasons or ["is read by no later layer"])[0]
    for name in follower.unreached.values():
        left[name.rpartition(".")[0] or name] = "is not reached by the example"
    return left
