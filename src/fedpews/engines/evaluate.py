"""The score of a model on the test or the validation data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.data.inputs import take
from fedpews.neurons.modules import channels_last
from fedpews.neurons.network import Network
from fedpews.tasks.metrics import Sums, accuracy
from fedpews.torch_private import tree_map_only
from fedpews.trees import Tree

CHUNK, HEAVY_CHUNK = 1000, 250
"""Test samples per pass. Constants, so that the numbers do not depend on the machine."""

HEAVY = 10**6
"""Operations a sample from which a network is heavy: more samples at once would only outgrow the caches."""


OWNERS = 100
"""Up to so many clients, each client's own samples are scored separately."""

Part = Literal["test", "validation"]


def chunk_size(net: Network) -> int:
    """How many samples to evaluate in one pass."""
    return HEAVY_CHUNK if net.flops > HEAVY else CHUNK


@dataclass(frozen=True)
class Score:
    """Sums over the samples of a test set, and over those of each client that has its own."""

    sums: Sums
    clients: Mapping[int, Sums] = field(default_factory=dict)
    # by the site's name: how many test samples of its own it has, and the sums over them
    sites: Mapping[str, tuple[int, Sums]] = field(default_factory=dict, kw_only=True)

    @property
    def accuracy(self) -> float:
        """Of one class per sample."""
        return accuracy(self.sums["correct"], self.sums["seen"])

    @property
    def mean_loss(self) -> float:
        """Over the samples, each weighing what the task says."""
        return float(self.sums["loss"]) / float(self.sums["weight"])

    def client_accuracy(self, counts: Tensor) -> list[float]:
        """Each client's accuracy on its own test samples, or else on the common ones at its own mix of classes.

        For one class per sample; ``counts`` is (clients, classes).
        """
        width = counts.shape[1]
        correct, seen = self.sums["correct"][:width], self.sums["seen"][:width]
        tested = seen > 0
        by_class = correct[tested].double() / seen[tested]
        mix = counts[:, tested].double()
        accuracies: list[float] = ((mix @ by_class) / mix.sum(1).clamp_min(1)).tolist()
        for client, sums in self.clients.items():
            accuracies[client] = accuracy(sums["correct"], sums["seen"])
        return accuracies


def cut(
    data: Federation, part: Part, size: int, owner: int | None = None
) -> list[tuple[int | None, Tensor | slice]]:
    """The test or validation data in chunks of one pass, each with the client that its samples belong to, or None.

    With ``owner`` only that client's samples.
    """
    owned = data.test_clients if part == "test" else data.validation
    if not owned:
        return [(None, slice(first, first + size)) for first in range(0, len(data.test_y), size)]
    groups: dict[int | None, Tensor] = {client: rows for client, rows in enumerate(owned) if len(rows)}
    if owner is not None:
        groups = {owner: owned[owner]}
    elif len(groups) > OWNERS:
        groups = {None: torch.cat(owned)}
    if part == "test" and owner is None:
        mine = torch.zeros(len(data.test_y), dtype=torch.bool, device=data.test_y.device)
        mine[torch.cat(owned)] = True
        left = (~mine).nonzero().flatten()
        groups[None] = torch.cat([groups[None], left]) if None in groups else left
    return [
        (client, rows) for client, all_rows in groups.items() for rows in all_rows.split(size) if len(rows)
    ]


def score_chunk(net: Network, params: Tree, data: Federation, part: Part, rows: Tensor | slice) -> Sums:
    """The sums over one chunk of samples."""
    if part == "test":
        x, y = take(data.test_x, rows), data.test_y[rows]
    else:
        x, y = data.batch(rows)
    with torch.no_grad():
        # images: channels last is the order in which convolutions copy nothing
        if net.survives_channels_last:
            x = tree_map_only(Tensor, channels_last, x)
        return data.task.sums(net.predict(params, x), y)
