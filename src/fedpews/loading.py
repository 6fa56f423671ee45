"""A run's folder, read back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load as tensors_of

from fedpews.errors import CheckpointError, ConfigError, first_line
from fedpews.experiment import Experiment
from fedpews.results import layout
from fedpews.results.growing import read_lines
from fedpews.results.records import Rounds, read_summary
from fedpews.results.sums import check_files, read_checked, read_sums
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
        if model is None:
            from fedpews.build import build_network, load_data

            return build_network(self.experiment, load_data(self.experiment))[0].module(params)
        from torch import nn

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
    if not layout.is_begun(path):
        raise ConfigError(f"{path} holds no run: there is no {layout.CONFIG} in it")
    # all that are listed, also those that are gone
    check_files(path, read_sums(path))
    experiment = Experiment.load(path / layout.CONFIG)
    masks = _tensors(path, {seed: layout.masks_file(seed) for seed in experiment.seeds})
    return Run(
        path,
        experiment,
        # none before the first round, unless something vouches for them
        Rounds(read_lines(path, layout.ROUNDS)),
        read_summary(path) if layout.is_finished(path) else {},
        _tensors(path, {seed: layout.model_file(seed) for seed in experiment.seeds}),
        _tensors(path, {seed: layout.best_file(seed) for seed in experiment.seeds}),
        {
            seed: {int(name.removeprefix("client-")): mask.bool() for name, mask in tree.items()}
            for seed, tree in masks.items()
        },
    )


def _tensors(path: Path, files: Mapping[int, str]) -> dict[int, Tree]:
    """The tensors of each seed whose file is there."""
    found: dict[int, Tree] = {}
    for seed, name in files.items():
        if (path / name).exists():
            try:
                found[seed] = tensors_of(read_checked(path, name))
            except SafetensorError as error:
                raise CheckpointError(f"{path / name} is damaged: {first_line(error)}") from error
    return found
