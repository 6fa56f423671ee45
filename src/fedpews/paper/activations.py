"""Which neurons fire for whose data: recorded after every round, beside the run's other records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpews.build import build_network, load_data
from fedpews.experiment import Experiment
from fedpews.results import layout
from fedpews.running import Watcher
from fedpews.seeds import fold
from fedpews.warmup.masks import contiguous

BATCH = 256
"""Samples of each client whose activations are summed."""


def watch_activations(
    watcher: Watcher, experiment: Experiment, folder: Path, data_dir: Path | None
) -> Watcher:
    """The watcher, which also writes ``activations.jsonl``: a line per seed and round.

    The global model sees a batch of each client's data, the same one in every round; while fixed masks last, only
    the client's own part of it does. A line holds ``activations``, (clients, layers, neurons) sums over the batch,
    and ``activation_overlap``.
    """
    federation = load_data(experiment, data_dir=data_dir)
    net, starts = build_network(experiment, federation)
    model = net.module(next(iter(starts.values())))
    batches = []
    for client, rows in enumerate(federation.clients):
        generator = torch.Generator().manual_seed(fold(experiment.data.seed, client, "activations"))
        batches.append(federation.x[rows[torch.randperm(len(rows), generator=generator)[:BATCH]]])

    masked = experiment.warmup_rounds if experiment.warmup_kind == "fixed" else 0
    parts: list[list[Tensor] | None] = [None] * len(batches)
    if masked:
        sizes = [layer.size for layer in net.graph.layers]
        own = [contiguous(net.graph, client, len(batches)) for client in range(len(batches))]
        parts = [list(neurons.split(sizes)) for neurons in own]

    def write(round: int, params: Mapping[int, Mapping[str, Tensor]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / layout.ACTIVATIONS).open("a") as file:
            for seed, tree in params.items():
                sums = [
                    layer_sums(model, tree, batch, part if round <= masked else None)
                    for batch, part in zip(batches, parts, strict=True)
                ]
                line = {
                    "seed": seed,
                    "round": round,
                    "activation_overlap": activation_overlap(sums),
                    "activations": _short(sums),
                }
                file.write(json.dumps(line) + "\n")

    return replace(watcher, models=write)


def layer_sums(
    model: nn.Module, params: Mapping[str, Tensor], x: Tensor, own: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """What each fully connected layer after the first reads, summed over the batch: (neurons,) per hidden layer.

    Args:
        own: for each hidden layer the neurons that are open, (neurons,) bool; all of them when not given.
    """
    seen: list[Tensor] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values = inputs[0] if own is None else inputs[0] * own[len(seen)]
        seen.append(values)
        return (values,)

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)][1:]
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        with torch.no_grad():
            functional_call(model, dict(params), (x,))
    finally:
        for hook in hooks:
            hook.remove()
    return [values.sum(0) for values in seen]


def activation_overlap(sums: Sequence[Sequence[Tensor]]) -> float:
    """How far two clients' data fire the same neurons: 1 when alike, 0 when no neuron fires for both.

    A client's activations of a layer, divided by their sum, say where it is at home; what two clients have in common
    is Σ min over the neurons. The mean over all pairs of clients and all layers; nan for a client alone.

    >>> even, odd = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    >>> activation_overlap([[even], [odd]])
    0.0
    """
    common = []
    for layers in zip(*sums, strict=True):
        # (clients, neurons), each row adding up to 1; a client for which nothing fires shares nothing
        rows = torch.stack(list(layers)).clamp(min=0)
        rows = rows / rows.sum(1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        for first, second in torch.combinations(torch.arange(len(rows)), 2).tolist():
            common.append(float(torch.minimum(rows[first], rows[second]).sum()))
    return fmean(common) if common else math.nan


def _short(sums: list[list[Tensor]]) -> list[list[list[float]]]:
    def round_(value: Any) -> float:
        return float(f"{value:.4g}")

    return [[[round_(value) for value in layer.tolist()] for layer in layers] for layers in sums]
