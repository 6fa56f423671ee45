"""Small runs for the tests of the page."""

from __future__ import annotations

from typing import Any

import torch

from fedpews.data import Federation, from_clients
from fedpews.experiment import Experiment

HOSTILE = "</script><img src=x onerror=alert(1)>"


def tiny(method: str = "fedavg+pews", **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 6,
        "seeds": [0, 1, 2],
        "target_accuracy": 0.4,
        "method": {"name": method},
        "warmup": {"rounds": 4} if "pews" in method else {},
        "train": {"steps": 2, "lr": 0.05},
        "model": {"hidden": [6, 5]},
        "runtime": {"engine": "eager"},
    }
    return Experiment(**settings | changes)


def federation(names: tuple[str, ...] = ("Oslo", "Lima", "Pune")) -> Federation:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(30 * len(names), 4, generator=draw)
    y = torch.arange(len(x)) % len(names)
    x[torch.arange(len(x)), y] += 2.0
    clients = [(x[y == k], y[y == k]) for k in range(len(names))]
    return from_clients(clients, (x, y), client_names=names)
