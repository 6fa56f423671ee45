"""What a finished run returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.neurons.network import Network
from fedpews.results.records import Rounds
from fedpews.tasks.names import show
from fedpews.trees import Tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedpews.report.runs import Run


@dataclass(frozen=True)
class Result:
    """A finished run."""

    experiment: Experiment
    rounds: Rounds
    summary: dict[str, Any]
    params: dict[int, Tree]
    """The global model by seed."""
    neurons: dict[int, dict[int, torch.Tensor]]
    """By seed and client: who owned what in the last warmup round."""
    folder: Path | None
    _net: Network
    best: dict[int, Tree] = field(default_factory=dict)
    """The best global model by seed, of a run that keeps it (``stop.patience``, ``stop.best``)."""
    finetuned: dict[int, dict[int, Tree]] = field(default_factory=dict)
    """By seed and client: the global model after ``finetune.epochs`` at the client."""

    def model(self, seed: int | None = None, *, best: bool = False, client: int | None = None) -> nn.Module:
        """A model of a seed (by default the first), ready for use: the last global one, the best one, or that of a
        client after fine-tuning."""
        seed = self.experiment.seeds[0] if seed is None else seed
        if client is not None:
            return self._net.at(seed).module(_get(self.finetuned.get(seed, {}), client, "finetune.epochs"))
        return self._net.at(seed).module(_get(self.best, seed, "stop.best") if best else self.params[seed])

    def __repr__(self) -> str:
        metric = self.experiment.goal.metric
        final = show(metric, self.summary["final"][metric]["mean"])
        where = "" if self.folder is None else f", in {self.folder}"
        return (
            f"<Result of {self.summary['method']}: {self.summary['rounds']} rounds, {len(self.params)} seed(s), "
            f"final {metric} {final}{where}>"
        )

    def _repr_html_(self) -> str:
        """The row of ``fedpews compare``, for a notebook."""
        from fedpews.report.compare import columns, table

        runs, rows = [self._run()], ""
        for tag, cells in (("th", columns(runs)), ("td", table(runs)[0])):
            rows += f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
        return f"<table>{rows}</table>"

    def _run(self) -> Run:
        from fedpews.report.runs import Run

        told = (list(self.rounds), self.summary, self.experiment.to_dict())
        return Run(self.summary["method"], self.folder, *told)

    def plot(
        self, path: str | Path | None = None, *, kind: str = "curves", format: str | None = None
    ) -> Figure:
        """A figure in the style of ``fedpews plot``, also written to ``path`` when one is given.

        Args:
            kind: curves, bytes, masks or clients.
        """
        from fedpews.report.figures import Masks, draw

        label, seed = self.summary["method"], self.experiment.seeds[0]
        masks: list[Masks] | None = [] if kind == "masks" and self.folder is None else None
        if masks is not None and self.neurons[seed]:
            layers = [
                {"name": layer.name, "start": layer.start, "size": layer.size}
                for layer in self._net.graph.layers
            ]
            owned = torch.stack(list(self.neurons[seed].values())).cpu().numpy()
            names = [f"client {client}" for client in self.neurons[seed]]
            masks = [Masks(label, owned, names, layers, f"{label}, last warmup round, seed {seed}")]
        return draw([self._run()], kind, path, format, masks)


def _get(found: Mapping[int, Tree], key: int, setting: str) -> Tree:
    if key not in found:
        raise ConfigError(f"there is none for {key}; a run keeps it if {setting} is set")
    return found[key]
