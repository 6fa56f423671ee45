"""Training a subnetwork: one step under a mask of neurons, for any method."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpews import trees
from fedpews.methods.contract import (
    STEPS_TAKEN,
    ClientHalf,
    ClientWrapper,
    Download,
    Rate,
    Upload,
    Work,
)
from fedpews.neurons.network import CUT_FROM, Batch, Network
from fedpews.torch_private import is_transformed
from fedpews.trees import Nest


def start_subnetwork(client: ClientHalf, net: Network, download: Download, memory: Nest | None) -> Nest:
    """A client half's local state, ready for ``step_subnetwork``.

    A number that belongs to a parameter (such as a bias correction) becomes one for each of its elements, since
    elements take different steps.
    """
    local = dict(client.start(net, download, memory))
    for key, tree in local.items():
        single = [
            name
            for name, value in tree.items()
            if name in net.graph.axes and isinstance(value, Tensor) and value.dim() == 0
        ]
        local[key] = tree | {name: tree[name].expand(net.shapes[name]).clone() for name in single}
    if client.counts_steps:
        like = next(iter(download.params.values()))
        # the steps of each element, counted by neuron: it does not move while its neuron is masked
        local = local | {STEPS_TAKEN: net.graph.expand(like.new_zeros(net.graph.size))}
    return local


def step_subnetwork(
    client: ClientHalf,
    net: Network,
    local: Nest,
    batch: Batch,
    noise: Tensor,
    lr: Rate,
    gates: Tensor,
) -> tuple[Nest, Tensor]:
    """One step of any client half on the neurons whose gate is not zero.

    Masked neurons are excluded: the pass reads nothing from them, and none of their weights change, whatever the
    method's own terms (proximal, control variate, momentum, weight decay) are.

    Args:
        gates: (neurons,) the factor of each neuron's output; 0 masks the neuron.
    """
    mine = gates != 0
    # 3: one forward pass and about two of it backward
    if 3 * len(batch.y) * net.flops >= CUT_FROM and _pays_to_cut(net, local, gates):
        kept, loss = _step_cut(client, net, local, batch, noise, lr, mine)
    else:
        # the gradient of a masked neuron is zero, but momentum or a proximal term would still move it: undo that
        moved, loss = client.step(net.gated(gates), local, batch, noise, lr)
        mask = net.graph.expand(mine)
        kept = {
            key: trees.where(mask, value, local[key])
            if isinstance(value, dict) and value is not local[key]
            else value
            for key, value in moved.items()
        }
    if STEPS_TAKEN in local:
        kept[STEPS_TAKEN] = trees.map_tree(torch.add, local[STEPS_TAKEN], net.graph.expand(mine))
    return kept, loss


def _pays_to_cut(net: Network, local: Nest, gates: Tensor) -> bool:
    """Whether a large step may train the smaller network, which takes the same step with smaller kernels.

    On the CPU only: the shapes depend on the gates, so every step would have to wait for the GPU. Not while it is
    traced, for the same reason.
    """
    if gates.device.type != "cpu" or not net.can_be_cut or is_transformed():
        return False
    # a tensor that belongs to a parameter must have its shape, to be cut like it
    fits = all(isinstance(value, dict) for value in local.values()) and all(
        value[name].shape == net.shapes.get(name)
        for key, value in local.items()
        if key != STEPS_TAKEN
        for name in value
        if name in net.graph.axes
    )
    # a smaller network has no gates that scale
    is_mask = bool(((gates == 0) | (gates == 1)).all())
    return (
        fits
        and is_mask
        and all(bool(gates[layer.neurons].any()) or net.runs_without(layer) for layer in net.graph.layers)
    )


def _step_cut(
    client: ClientHalf,
    net: Network,
    local: Nest,
    batch: Batch,
    noise: Tensor,
    lr: Rate,
    neurons: Tensor,
) -> tuple[Nest, Tensor]:
    """One step of the network that has only these neurons, scattered back to the whole network."""
    whole = {key: value for key, value in local.items() if key != STEPS_TAKEN}
    part = {key: net.graph.slice(tree, neurons) for key, tree in whole.items()}
    moved, loss = client.step(net, part, batch, noise, lr)
    return {
        # what the step did not change need not be scattered
        key: whole[key] if tree is part[key] else net.graph.scatter(whole[key], tree, neurons)
        for key, tree in moved.items()
    }, loss


@dataclass(frozen=True)
class AssignedClient(ClientWrapper):
    """Trains the neurons the server assigned, and sends them back.

    Their outputs are multiplied by the ``scale`` that the server may send.
    """

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        assert download.neurons is not None, "the server half assigns the neurons"
        gates = download.neurons.to(next(iter(download.params.values())).dtype)
        if "scale" in download.extra:
            gates = gates * download.extra["scale"]["scale"]
        inner = None if memory is None else memory["inner"]
        inner = start_subnetwork(self.inner, net, download, inner)
        return {"inner": inner, "gates": {"neurons": gates}}

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        gates: Tensor = local["gates"]["neurons"]
        inner, loss = step_subnetwork(self.inner, net, local["inner"], batch, noise, lr, gates)
        return local | {"inner": inner}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        return super().finish(net, download, local, replace(work, neurons=download.neurons))
