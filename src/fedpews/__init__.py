"""Federated learning among clients whose data have almost nothing in common.

>>> import fedpews
>>> experiment = fedpews.Experiment(rounds=10, method={"name": "fedprox+pews"})
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpews.callbacks import Callback
    from fedpews.compose import method
    from fedpews.data import Federation, from_clients
    from fedpews.errors import CheckpointError, ConfigError, DataMissing, FedpewsError, RunFailed
    from fedpews.experiment import Experiment
    from fedpews.methods import Average, ClientHalf, Cohort, Download, Method, Upload, Work
    from fedpews.neurons import Batch, Hidden, Network, NeuronGraph
    from fedpews.neurons.trace import trace
    from fedpews.result import Result, Run, load
    from fedpews.running import run
    from fedpews.tasks import Metric, Task
    from fedpews.warmup import Auto, Fixed, Learned, Random, with_warmup

__version__ = "0.2.0"

_MODULES = {
    "fedpews.compose": ("method",),
    "fedpews.data": ("Federation", "from_clients"),
    "fedpews.errors": ("CheckpointError", "ConfigError", "DataMissing", "FedpewsError", "RunFailed"),
    "fedpews.experiment": ("Experiment",),
    "fedpews.methods": ("Average", "ClientHalf", "Cohort", "Download", "Method", "Upload", "Work"),
    "fedpews.neurons": ("Batch", "Hidden", "Network", "NeuronGraph", "trace"),
    "fedpews.result": ("Result", "Run", "load"),
    "fedpews.callbacks": ("Callback",),
    "fedpews.running": ("run",),
    "fedpews.tasks": ("Metric", "Task"),
    "fedpews.warmup": ("Auto", "Fixed", "Learned", "Random", "with_warmup"),
}

__all__ = [
    "Auto", "Average", "Batch", "Callback", "CheckpointError", "ClientHalf", "Cohort", "ConfigError", "DataMissing",
    "Download", "Experiment", "Federation", "FedpewsError", "Fixed", "Hidden", "Learned", "Method", "Metric",
    "Network", "NeuronGraph", "Random", "Result", "Run", "RunFailed", "Task", "Upload", "Work", "from_clients",
    "load", "method", "run", "trace", "with_warmup",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the module of a public name when it is first used: `import fedpews` itself stays quick."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'fedpews' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
