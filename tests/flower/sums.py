"""A warmup round as sums, for secure aggregation: Σ m⊙x, Σ m and Σ θ are all that the server needs.

A protocol that shows the server only the mean of the clients' arrays (Flower's SecAgg+ does) gets one list of
arrays from each client and hands one back. Everything is sent in full length, as a hidden mask must be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpews.trees import Tree


def pack_sums(params: Mapping[str, Tensor], mask: Mapping[str, Tensor], theta: Tensor) -> list[NDArray[Any]]:
    """m⊙x and m for each parameter, then θ; a name the mask lacks is owned whole.

    >>> [part.tolist() for part in pack_sums({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([1.0, 0.0])},
    ...                                      torch.tensor([0.5]))]
    [[3.0, 0.0], [1.0, 0.0], [0.5]]
    """
    owned = {
        name: mask.get(name, torch.ones(())).to(value.dtype).expand_as(value)
        for name, value in params.items()
    }
    masked = [torch.where(owned[name] > 0, value, 0.0) for name, value in params.items()]
    return [part.numpy().copy() for part in (*masked, *owned.values(), theta)]


def unpack_sums(
    means: Sequence[NDArray[Any]], old: Mapping[str, Tensor], clients: int
) -> tuple[Tree, Tensor]:
    """The new model and θ_g from the means over all clients; an element nobody owns keeps its old value.

    Args:
        means: what ``pack_sums`` gave, averaged over the clients with equal weights.
    """
    parts = [torch.from_numpy(np.asarray(part, np.float32)) for part in means]
    count = len(old)
    if len(parts) != 2 * count + 1:
        raise ValueError(f"{len(parts)} arrays where {2 * count + 1} are expected")
    params = {}
    for (name, kept), total, owners in zip(old.items(), parts[:count], parts[count:-1], strict=True):
        covered = owners > 0.5 / clients  # a count of 0 or more, out of a quantised mean
        share = (owners * clients).round().clamp_min(1) / clients
        params[name] = torch.where(covered, total / share, kept)
    return params, parts[-1]
