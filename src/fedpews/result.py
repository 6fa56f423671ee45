"""The results of a run: as ``fedpews.run`` returns them, and as ``fedpews.load`` reads them from a folder."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedpews.build import Model, build_network, build_task, load_data
from fedpews.config import flatten
from fedpews.data.federation import Federation
from fedpews.data.inputs import check, prepare
from fedpews.errors import ConfigError, first_line
from fedpews.experiment import Experiment
from fedpews.models.adapters import has_adapters
from fedpews.neurons.modules import main_output, run
from fedpews.neurons.network import Network
from fedpews.results import layout
from fedpews.results.files import is_expected, read_sums, read_tensors, read_verified
from fedpews.results.masks import Ownership, read_federation
from fedpews.results.records import Rounds, read_rounds
from fedpews.results.schema import GIVEN, read_summary
from fedpews.tasks.names import show
from fedpews.trees import Tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedpews.report.runs import Run as ReportedRun


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What `run` returns and `load` reads."""

    experiment: Experiment
    rounds: Rounds
    summary: dict[str, Any]
    """Empty if the run is not finished."""
    params: dict[int, Tree]
    """The last global model by seed."""
    best: dict[int, Tree]
    """The best global model by seed, of a run that keeps it (``stop.patience``, ``stop.best``)."""
    neurons: dict[int, dict[int, Tensor]]
    """By seed and client: the neurons that the client owned in the last warmup round."""
    finetuned: dict[int, dict[int, Tree]]
    """By seed and client: the global model after ``finetune.epochs`` at the client."""

    def weights(self, seed: int | None, best: bool, client: int | None) -> tuple[int, Tree]:
        """The seed, by default the first, and the weights of the model that ``model`` returns."""
        seed = self.experiment.seeds[0] if seed is None else seed
        name, setting, tree = "model", "", self.params.get(seed)
        if best:
            name, setting, tree = "best model", "stop.best", self.best.get(seed)
        if client is not None:
            name, setting = f"fine-tuned model of client {client}", "finetune.epochs"
            tree = self.finetuned.get(seed, {}).get(client)
        if tree is None:
            hint = f"a run keeps it if {setting} is set" if setting else f"there is {sorted(self.params)}"
            raise ConfigError(f"this run has no {name} of seed {seed}; {hint}")
        return seed, tree


@dataclass(frozen=True, kw_only=True)
class Result(Trained):
    """A finished run."""

    folder: Path | None
    _net: Network

    def model(self, seed: int | None = None, *, best: bool = False, client: int | None = None) -> nn.Module:
        """A model of a seed (by default the first), ready for use: the last global one, the best one, or that of a
        client after fine-tuning."""
        seed, params = self.weights(seed, best, client)
        return self._net.at(seed).module(params)

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

    def _run(self) -> ReportedRun:
        """The run as the report reads it from a folder; without a folder, with the masks of the last warmup round."""
        from fedpews.report.runs import Run as ReportedRun

        seed, federation, kept = self.experiment.seeds[0], {}, []
        if self.folder is None and self.neurons[seed]:
            clients, owned = zip(*self.neurons[seed].items(), strict=True)
            masks = torch.stack(owned).cpu().numpy()
            warmup = max(record["round"] for record in self.rounds if record["phase"] == "warmup")
            kept = [Ownership.of(seed, warmup, clients, masks, None, len(clients))]
            federation = {"layers": [asdict(layer) for layer in self._net.graph.layers]}
        return ReportedRun(
            self.summary["method"],
            self.folder,
            list(self.rounds),
            self.summary,
            self.experiment.to_dict(),
            in_memory=(federation, kept),
        )

    def plot(
        self, path: str | Path | None = None, *, kind: str = "curves", format: str | None = None
    ) -> Figure:
        """A figure in the style of ``fedpews plot``, also written to ``path`` when one is given.

        Args:
            kind: curves, bytes, masks or clients.
        """
        from fedpews.report.figures import draw

        return draw([self._run()], kind, path, format)


@dataclass(frozen=True, kw_only=True)
class Run(Trained):
    """A run read from its folder, finished or not."""

    folder: Path
    _model: Model | None = None
    _trust: bool = False

    @cached_property
    def _served(self) -> nn.Module:
        return self.model()

    def predict(self, x: Any, model: nn.Module | None = None) -> Tensor:
        """What the final model predicts for inputs as it was trained on: probabilities of classes or labels, or values.

        Args:
            x: a batch, as tensors or arrays; bytes are pixels and become [-1, 1].
            model: another of the run's models, such as ``model(best=True)``; by default that of the first seed.
        """
        self.check_trust("task")
        module = self._served if model is None else model
        with torch.no_grad():
            outputs = main_output(run(module, prepare(check(x, "x"))))
        return build_task(self.experiment).scores(outputs)

    def model(self, seed: int | None = None, *, best: bool = False, client: int | None = None) -> nn.Module:
        """A model of a seed, as that of a `Result`.

        It is the module that `load` was given, or else the experiment's model, built again, which needs its data.
        """
        seed, params = self.weights(seed, best, client)
        if self._model is None:
            if GIVEN in (self.experiment.model.name, self.experiment.data.name):
                raise ConfigError(
                    f"{self.folder}: its model or its data was given in Python, so the model cannot be built here; "
                    "pass your module, or a function that makes it: load(folder, model=...)"
                )
            self.check_trust()
            return build_module(self.experiment, load_data(self.experiment), seed, params, self.folder)
        module = copy.deepcopy(self._model) if isinstance(self._model, nn.Module) else self._model()
        missing = params.keys() - module.state_dict().keys()
        if missing:
            raise ConfigError(f"this is not the model that was trained: it has no {sorted(missing)[0]}")
        module.load_state_dict(params, strict=False)
        return module.eval()

    def check_trust(self, *tables: str) -> None:
        """Refuse to build what the folder names by a path or as code, unless the caller trusts it.

        Args:
            tables: of the configuration; by default those that a model is built from.
        """
        wanted = tables or ("model", "data", "task")
        values = {key: value for key, value in self.experiment.to_dict().items() if key in wanted}
        named = [f"{key} = {value!r:.80}" for key, value in flatten(values).items() if ":" in str(value)]
        if named and not self._trust:
            raise ConfigError(
                f"{self.folder} names code or files that building its model would open: {', '.join(named)}. Pass your "
                "own module, load(folder, model=Net), or say that you trust the folder: load(folder, trust=True)"
            )

    def __repr__(self) -> str:
        so_far = "" if self.summary else " so far"
        return f"<Run in {self.folder}: {self.experiment.method_label}, {len(self.rounds)} records{so_far}>"


def load(folder: str | Path, *, model: Model | None = None, trust: bool = False) -> Run:
    """Read a run's folder: its configuration, records, summary, models and masks. No code from the folder is run.

    Args:
        model: your own module or a function that makes one, for `Run.model`, if the run trained it.
        trust: allow `Run.model` to import code and open files that the folder's configuration names.

    >>> load("nowhere")
    Traceback (most recent call last):
    ...
    fedpews.errors.ConfigError: nowhere is not a run folder: it has no config.toml
    """
    path = Path(folder)
    if not (path / layout.CONFIG).exists():
        raise ConfigError(f"{path} is not a run folder: it has no {layout.CONFIG}")
    for name in read_sums(path):
        read_verified(path / name)
    experiment = Experiment.load(path / layout.CONFIG)

    def read(name: str, reader: Callable[[Path], Any] = read_tensors) -> dict[int, Any]:
        files = {seed: path / name.format(seed) for seed in experiment.seeds}
        return {seed: reader(file) for seed, file in files.items() if file.exists()}

    return Run(
        folder=path,
        experiment=experiment,
        rounds=Rounds(read_rounds(path) if is_expected(path / layout.ROUNDS) else []),
        summary=read_summary(path / layout.SUMMARY) if layout.is_finished(path) else {},
        params=read(layout.MODEL),
        best=read(layout.BEST),
        neurons=read(layout.MASKS, _read_masks),
        finetuned=read(layout.FINETUNED, _read_clients),
        _model=model,
        _trust=trust,
    )


def _read_masks(file: Path) -> dict[int, Tensor]:
    return {client: tree[""].bool() for client, tree in _read_clients(file, "client-([0-9]{1,9})()").items()}


def _read_clients(file: Path, pattern: str = "client-([0-9]{1,9})/(.+)") -> dict[int, Tree]:
    """The tensors of each client, whose number and their names the pattern finds."""
    clients: dict[int, Tree] = {}
    for name, value in read_tensors(file).items():
        match = re.fullmatch(pattern, name)
        if match is None:
            raise ConfigError(f"{file} is damaged: {name!r:.60} is of no client")
        clients.setdefault(int(match[1]), {})[match[2]] = value
    return clients


def build_module(
    experiment: Experiment, data: Federation, seed: int, params: Tree, folder: Path | None = None
) -> nn.Module:
    """The experiment's model with these values.

    Args:
        folder: of the run that trained them, which knows the base model of adapters.
    """
    net = build_network(experiment, data)[0]
    if folder is not None and has_adapters(net):
        base = read_federation(folder).get("model", {}).get("base", "")
        if net.frozen_digest() != base:
            raise ConfigError(f"{folder} was run on another base model than {experiment.model.start}")
    try:
        return net.at(seed).module(params)
    except (KeyError, RuntimeError) as error:
        raise ConfigError(f"this is not the model that was trained: {first_line(error)}") from error
