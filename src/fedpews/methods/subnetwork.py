"""Training only a part of the network: what every neuron mask has in common."""

from __future__ import annotations

from torch import Tensor

from fedpews import trees
from fedpews.methods.contract import Client, Nest
from fedpews.neurons.network import Batch, Network


def step_subnetwork(
    client: Client, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: float | Tensor, gates: Tensor
) -> tuple[Nest, Tensor]:
    """One step of any client half on the neurons whose gate is not zero.

    The pass reads nothing from a closed neuron, and nothing that belongs to one changes, whatever the
    client's own terms (proximal, control variate, momentum, weight decay) would have done to it.

    Args:
        gates: (neurons,) what each neuron's output is multiplied by; 0 closes it.
    """
    moved, loss = client.step(net.gated(gates), local, batch, noise, lr)
    mask = net.graph.expand(gates != 0)
    return {
        key: trees.where(mask, value, local[key])
        if isinstance(value, dict) and value is not local[key]
        else value
        for key, value in moved.items()
    }, loss
