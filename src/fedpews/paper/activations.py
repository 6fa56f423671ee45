"""Which neurons fire for which client's data, recorded after every round beside the run's other records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpews.build import build_network, load_data
from fedpews.callbacks import Callback
from fedpews.experiment import Experiment
from fedpews.results import layout
from fedpews.seeds import fold
from fedpews.warmup.masks import contiguous

BATCH = 256
"""Samples of each client whose activations are summed."""


def record_activations(experiment: Experiment, folder: Path, data_dir: Path | None) -> Callback:
    """A callback that writes ``activations.jsonl``: a line per seed and round.

    The global model sees a batch of each client's data, the same one in every round; in a warmup with fixed masks,
    only the client's neurons do. A line holds ``activations``, (clients, layers, neurons) sums over the batch, and
    ``activation_overlap``.
    """
    federation = load_data(experiment, data_dir=data_dir)
    net, starts = build_network(experiment, federation)
    model = net.module(next(iter(starts.values())))
    batches = []
    for client, rows in enumerate(federation.clients):
        generator = torch.Generator().manual_seed(fold(experiment.data.seed, client, "activations"))
        batches.append(federation.x[rows[torch.randperm(len(rows), generator=generator)[:BATCH]]])

    masked = experiment.warmup_rounds if experiment.warmup_kind == "fixed" else 0
    sizes = [layer.size for layer in net.graph.layers]
    masks = [
        contiguous(net.graph, client, len(batches)).split(sizes) if masked else None
        for client in range(len(batches))
    ]

    def write(round: int, params: Mapping[int, Mapping[str, Tensor]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / layout.ACTIVATIONS).open("a") as file:
            for seed, tree in params.items():
                sums = [
                    layer_sums(model, tree, batch, mask if round <= masked else None)
                    for batch, mask in zip(batches, masks, strict=True)
                ]
                short = [
                    [[float(f"{value:.4g}") for value in layer.tolist()] for layer in layers]
                    for layers in sums
                ]
                overlap = activation_overlap(sums)
                line = {"seed": seed, "round": round, "activation_overlap": overlap, "activations": short}
                file.write(json.dumps(line) + "\n")

    return Callback(models=write)


def layer_sums(
    model: nn.Module, params: Mapping[str, Tensor], x: Tensor, masks: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """What each fully connected layer after the first reads, summed over the batch: (neurons,) per hidden layer.

    Args:
        masks: for each hidden layer which neurons are open, (neurons,) bool; all of them by default.
    """
    seen: list[Tensor] = []

    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values = inputs[0] if masks is None else inputs[0] * masks[len(seen)]
        seen.append(values)
        return (values,)

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)][1:]
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        with torch.no_grad():
            functional_call(model, dict(params), (x,))
    finally:
        for hook in hooks:
            hook.remove()
    return [values.sum(0) for values in seen]


def activation_overlap(sums: Sequence[Sequence[Tensor]]) -> float:
    """How far two clients' data fire the same neurons: 1 for equal activations, 0 if no neuron fires for both.

    The activations of a layer are divided by their sum; the overlap of two clients is Σ min over the neurons. Returns
    the mean over all pairs of clients and all layers; NaN for a single client.

    >>> even, odd = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    >>> activation_overlap([[even], [odd]])
    0.0
    """
    common = []
    for layers in zip(*sums, strict=True):
        # (clients, neurons), each row with sum 1; a client for which no neuron fires has an overlap of 0
        rows = torch.stack(list(layers)).clamp(min=0)
        rows = rows / rows.sum(1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        for first, second in torch.combinations(torch.arange(len(rows)), 2).tolist():
            common.append(float(torch.minimum(rows[first], rows[second]).sum()))
    return fmean(common) if common else math.nan
