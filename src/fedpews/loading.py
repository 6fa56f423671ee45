"""A run's folder, read back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError, first_line
from fedpews.experiment import Experiment
from fedpews.results import layout
from fedpews.results.checkpoints import known_marks
from fedpews.results.records import Rounds, read_rounds
from fedpews.results.schema import GIVEN, read_summary
from fedpews.results.sums import check_files, read_sums
from fedpews.results.tensors import read_tensors
from fedpews.trees import Tree

if TYPE_CHECKING:
    from torch import Tensor, nn

    Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Run:
    """What a folder holds of a run, finished or not."""

    folder: Path
    experiment: Experiment
    rounds: Rounds
    summary: dict[str, Any]
    """Empty if the run has not come to its end."""
    params: dict[int, Tree]
    """The last global model by seed."""
    best: dict[int, Tree]
    """The best global model by seed, of a run that keeps it."""
    neurons: dict[int, dict[int, Tensor]]
    """By seed and client: who owned what in the last warmup round."""

    def model(self, seed: int | None = None, *, best: bool = False, model: Model | None = None) -> nn.Module:
        """The last or the best global model of a seed (by default the first), ready for use.

        Args:
            model: your own module or a function that makes one, if that is what was trained; else the experiment's
                model is built again, for which its data must be there.
        """
        seed = self.experiment.seeds[0] if seed is None else seed
        found = self.best if best else self.params
        if seed not in found:
            raise ConfigError(f"{self.folder} has no {'best ' if best else ''}model of seed {seed}")
        params = found[seed]
        from torch import nn

        if model is None and GIVEN in (self.experiment.model.name, self.experiment.data.name):
            raise ConfigError(
                f"{self.folder}: its model or its data was given in Python, so the model cannot be built here; "
                f"pass your module, or a function that makes it: model({seed}, model=…)"
            )
        if model is None:
            from fedpews.build import build_network, load_data

            net = build_network(self.experiment, load_data(self.experiment))[0]
            try:
                return net.module(params)
            except (KeyError, RuntimeError) as error:
                raise ConfigError(f"this is not the model that was trained: {first_line(error)}") from error
        made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        missing = params.keys() - made.state_dict().keys()
        if missing:
            raise ConfigError(f"this is not the model that was trained: it has no {sorted(missing)[0]}")
        made.load_state_dict(params, strict=False)
        return made.eval()

    def __repr__(self) -> str:
        done = "" if self.summary else " so far"
        return f"<Run in {self.folder}: {self.experiment.method_label}, {len(self.rounds)} records{done}>"


def load(folder: str | Path) -> Run:
    """Read a run's folder: its configuration, records, summary, models and masks.

    >>> load("nowhere")
    Traceback (most recent call last):
    ...
    fedpews.errors.ConfigError: nowhere holds no run: there is no config.toml in it
    """
    path = Path(folder)
    if not (path / layout.CONFIG).exists():
        raise ConfigError(f"{path} holds no run: there is no {layout.CONFIG} in it")
    # all that are listed, also those that are gone
    check_files(path, read_sums(path))
    experiment = Experiment.load(path / layout.CONFIG)
    begun = (path / layout.ROUNDS).exists() or known_marks(path)[0].size > 0
    summary = read_summary(path, layout.SUMMARY) if layout.is_finished(path) else {}
    return Run(
        path,
        experiment,
        Rounds(read_rounds(path) if begun else []),
        summary,
        _models(path, {seed: layout.model_file(seed) for seed in experiment.seeds}),
        _models(path, {seed: layout.best_file(seed) for seed in experiment.seeds}),
        {seed: _masks(file) for seed, file in layout.masks_files(path).items()},
    )


def _models(path: Path, files: Mapping[int, str]) -> dict[int, Tree]:
    return {seed: read_tensors(path / file) for seed, file in files.items() if (path / file).exists()}


def _masks(file: Path) -> dict[int, Tensor]:
    found = read_tensors(file)
    clients = {name: name.removeprefix("client-") for name in found}
    # isascii too: ² is a digit to isdigit, and no number
    strange = [name for name, number in clients.items() if not (number.isascii() and number.isdigit())]
    if strange:
        raise ConfigError(f"{file} is damaged: {strange[0]!r:.60} is no client")
    return {int(clients[name]): mask.bool() for name, mask in found.items()}
