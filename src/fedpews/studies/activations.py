"""Which neurons fire for whose data: recorded after every round, beside the run's other records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpews.build import build_network, load_data
from fedpews.experiment import Experiment
from fedpews.results import layout
from fedpews.running import Watcher
from fedpews.seeds import fold

BATCH = 256
"""Samples of each client whose activations are summed."""


def watch_activations(
    watcher: Watcher, experiment: Experiment, folder: Path, data_dir: Path | None
) -> Watcher:
    """The watcher, which also writes ``activations.jsonl``: a line per seed and round.

    The global model sees a batch of each client's data, the same one in every round; while fixed masks last, only
    the client's own part of it does. A line holds ``activations``, (clients, layers, neurons) sums over the batch,
    and ``own_share``.
    """
    federation = load_data(experiment, data_dir=data_dir)
    net, starts = build_network(experiment, federation)
    model = net.module(next(iter(starts.values())))
    batches = []
    for client, rows in enumerate(federation.clients):
        generator = torch.Generator().manual_seed(fold(experiment.data.seed, client, "activations"))
        batches.append(federation.x[rows[torch.randperm(len(rows), generator=generator)[:BATCH]]])

    masked = experiment.warmup_rounds if experiment.warmup_kind == "fixed" else 0

    def write(round: int, params: Mapping[int, Mapping[str, Tensor]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / layout.ACTIVATIONS).open("a") as file:
            for seed, tree in params.items():
                sums = [
                    layer_sums(model, tree, batch, (client, len(batches)) if round <= masked else None)
                    for client, batch in enumerate(batches)
                ]
                line = {
                    "seed": seed,
                    "round": round,
                    "own_share": own_share(sums),
                    "activations": _short(sums),
                }
                file.write(json.dumps(line) + "\n")

    return replace(watcher, models=write)


def layer_sums(
    model: nn.Module, params: Mapping[str, Tensor], x: Tensor, part: tuple[int, int] | None = None
) -> list[Tensor]:
    """What each fully connected layer after the first reads, summed over the batch: (neurons,) per hidden layer.

    With ``part`` (client, clients) only that client's contiguous part of every layer is open.
    """
    seen: list[Tensor] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values = inputs[0]
        if part is not None:
            open_ = torch.zeros(values.shape[1])
            open_[own_part(values.shape[1], *part)] = 1
            values = values * open_
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


def own_part(size: int, client: int, clients: int) -> slice:
    """A client's neurons when a layer is cut into equal contiguous parts."""
    return slice(round(client * size / clients), round((client + 1) * size / clients))


def own_share(sums: list[list[Tensor]]) -> float:
    """Each layer cut into one contiguous part per client: how much of client i's activation is in part i.

    The mean over clients and layers; 1/N when nobody has a part of its own.
    """
    shares = []
    for client, layers in enumerate(sums):
        for layer in layers:
            total = float(layer.sum())
            own = float(layer[own_part(len(layer), client, len(sums))].sum())
            shares.append(own / total if total else 1 / len(sums))
    return sum(shares) / len(shares)


def _short(sums: list[list[Tensor]]) -> list[list[list[float]]]:
    def round_(value: Any) -> float:
        return float(f"{value:.4g}")

    return [[[round_(value) for value in layer.tolist()] for layer in layers] for layers in sums]
