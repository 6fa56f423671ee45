"""Training only a part of the network: what every neuron mask has in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpews import trees
from fedpews.methods.contract import STEPS_TAKEN, ClientHalf, Download, Upload, Work
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.network import Batch, Network
from fedpews.torch_private import is_transformed
from fedpews.trees import Nest


def start_subnetwork(client: ClientHalf, net: Network, download: Download, memory: Nest | None) -> Nest:
    """A client half's local state, ready for ``step_subnetwork``.

    A number that goes with a parameter (such as a bias correction) becomes one for each of its elements: they will
    not all take the same steps.
    """
    local = {key: _each(net, value) for key, value in client.start(net, download, memory).items()}
    if client.counts_steps:
        like = next(iter(download.params.values()))
        # the steps each element takes, counted by neuron: it stands still while its neuron is closed
        local = local | {STEPS_TAKEN: net.graph.expand(like.new_zeros(net.graph.size))}
    return local


def _each(net: Network, tree: Nest) -> Nest:
    single = {n for n, v in tree.items() if n in net.graph.axes and isinstance(v, Tensor) and v.dim() == 0}
    return tree | {name: tree[name].expand(net.shapes[name]).clone() for name in single} if single else tree


def step_subnetwork(
    client: ClientHalf,
    net: Network,
    local: Nest,
    batch: Batch,
    noise: Tensor,
    lr: float | Tensor,
    gates: Tensor,
) -> tuple[Nest, Tensor]:
    """One step of any client half on the neurons whose gate is not zero.

    The pass reads nothing from a closed neuron, and nothing that belongs to one changes, whatever the
    client's own terms (proximal, control variate, momentum, weight decay) would have done to it.

    Args:
        gates: (neurons,) what each neuron's output is multiplied by; 0 closes it.
    """
    mine = gates != 0
    if _pays_to_cut(net, local, batch, gates):
        kept, loss = _step_cut(client, net, local, batch, noise, lr, mine)
    else:
        # The gradient of a closed neuron is zero, but momentum or a proximal term would still move it:
        # put it back.
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


CUT_FROM = 4e8
"""Floating-point operations of a step from which the smaller kernels repay the copies (about 10 ms)."""


def _pays_to_cut(net: Network, local: Nest, batch: Batch, gates: Tensor) -> bool:
    """Whether to train the physically smaller network, which is the same step with smaller kernels.

    On the CPU only: its shapes depend on the gates, so that every step would have to wait for the GPU.
    """
    if gates.device.type != "cpu":
        return False
    # 3: one forward pass and about two of it backward
    if 3 * len(batch.y) * net.flops < CUT_FROM or not net.can_be_cut:
        return False
    # traced: no shape may depend on the gates
    if is_transformed():
        return False
    # whatever goes with a parameter must have its shape, to be cut like it
    fits = all(isinstance(value, dict) for value in local.values()) and all(
        value[name].shape == net.shapes.get(name)
        for key, value in local.items()
        if key != STEPS_TAKEN
        for name in value
        if name in net.graph.axes
    )
    # a gate that scales has no counterpart in a smaller network
    is_mask = bool(((gates == 0) | (gates == 1)).all())
    # kernels do not run on a layer without a neuron
    has_all_layers = all(bool(gates[a.start : a.start + a.size].any()) for a in net.graph.layers)
    return fits and is_mask and has_all_layers


def _step_cut(
    client: ClientHalf,
    net: Network,
    local: Nest,
    batch: Batch,
    noise: Tensor,
    lr: float | Tensor,
    neurons: Tensor,
) -> tuple[Nest, Tensor]:
    """One step of the network that has only these neurons, its results put back where they belong."""
    whole = {key: value for key, value in local.items() if key != STEPS_TAKEN}
    part = {key: net.graph.slice(tree, neurons) for key, tree in whole.items()}
    moved, loss = client.step(net, part, batch, noise, lr)
    return {
        # what the step did not touch need not be put back
        key: whole[key] if tree is part[key] else net.graph.scatter(whole[key], tree, neurons)
        for key, tree in moved.items()
    }, loss


@dataclass(frozen=True)
class AssignedClient(ClientHalf):
    """Trains the neurons the server assigned, and sends them back.

    What is read from them is multiplied by the ``scale`` the server may send along.
    """

    inner: ClientHalf

    def noise_size(self, net: Network) -> int:
        return self.inner.noise_size(net)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        assert download.neurons is not None, "the server half assigns the neurons"
        gates = download.neurons.to(next(iter(download.params.values())).dtype)
        if "scale" in download.extra:
            gates = gates * download.extra["scale"]["scale"]
        kept = None if memory is None else memory["inner"]
        return {"inner": start_subnetwork(self.inner, net, download, kept), "gates": {"neurons": gates}}

    def step(
        self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: float | Tensor
    ) -> tuple[Nest, Tensor]:
        gates: Tensor = local["gates"]["neurons"]
        inner, loss = step_subnetwork(self.inner, net, local["inner"], batch, noise, lr, gates)
        return local | {"inner": inner}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = self.inner.finish(
            net, download, local["inner"], replace(work, neurons=download.neurons)
        )
        return {"inner": memory}, upload


def window(graph: NeuronGraph, width: float, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """The units (offset + 0 … ⌈width·K⌉ − 1) mod K of every layer of K neurons: (neurons,) bool.

    >>> from fedpews.neurons.graph import Layer
    >>> window(NeuronGraph((Layer("hidden", 0, 4),), {}), width=0.5, offset=3)
    tensor([ True, False, False,  True])
    """
    neurons = torch.zeros(graph.size, dtype=torch.bool)
    for layer in graph.layers:
        # 1e-9: 0.2·15 is 3, not 3.0000000000000004
        count = max(1, math.ceil(width * layer.size - 1e-9))
        neurons[layer.start + (offset + torch.arange(count)) % layer.size] = True
    return neurons.to(device)
