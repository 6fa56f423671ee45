"""Saving a run while it goes on, and resuming it: what must be as it was, and how a finished run is made longer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import Any

import torch

from fedpews.build import Setup
from fedpews.config import flatten
from fedpews.engines.engine import Engine
from fedpews.engines.hardware import describe_machine
from fedpews.errors import CheckpointError, ConfigError, first_line
from fedpews.experiment import FREE, Experiment
from fedpews.models.adapters import has_adapters
from fedpews.neurons.structure import difference as difference_of_models
from fedpews.neurons.structure import fingerprint
from fedpews.result import Result
from fedpews.results import checkpoint as checkpoints
from fedpews.results import layout
from fedpews.results.checkpoint import Checkpoint
from fedpews.results.folder import RunFolder
from fedpews.results.masks import Ownership
from fedpews.results.memories import Store
from fedpews.results.records import Record
from fedpews.results.schema import GIVEN
from fedpews.server import Server
from fedpews.trees import Tree

STATE_LAYOUT = "4"
"""Of what methods keep; raised when a method's state or memory changes shape, so that no run is resumed wrongly."""

CHANGED = "runtime.resume=changed"
"""The setting that lets a run continue even if its numbers will differ from those of a run that never stopped."""

OF_LENGTH = {"rounds", "warmup.rounds", "warmup.fraction", "runtime.engine"}
"""Keys that may differ if a run is made longer; the engine is compared itself."""


class Saver:
    """Writes a run to its folder: ``start``, ``record`` and ``checkpoint`` for each round, ``finish``.

    A run without a folder saves nothing.
    """

    def __init__(self, folder: RunFolder | None, setup: Setup, resume: bool) -> None:
        self._folder, self._setup = folder, setup
        self.path = None if folder is None else folder.path
        self.resumed: Checkpoint | None = None
        """The checkpoint that the run continues from, if any."""
        self._earlier: Experiment | None = None  # that the folder's run was started with
        if folder is not None and folder.has_run:
            if not resume:
                raise ConfigError(
                    f"{folder.path} already holds a run; add --resume to go on with it, or give another --out"
                )
            self.resumed = checkpoints.newest(folder.path)
            self._earlier = _experiment_of(folder, self.resumed)
        known: Mapping[str, Any] = {} if self.resumed is None else self.resumed.about
        self._changes: list[str] = [*known.get("went_on", ())]  # since the run began, each with its round
        self._logged = len(self._changes)  # changes that the records have already
        self._machines = list(dict.fromkeys([*known.get("machines", ()), describe_machine(setup.net.device)]))
        self.saved = 0 if self.resumed is None else self.resumed.round
        """The round of the last checkpoint."""
        self._is_described = False
        if self._earlier is not None:
            self._compare(self._earlier)

    def _compare(self, earlier: Experiment) -> None:
        """Refuse to continue with other settings, data or another model.

        More rounds are allowed if they leave the earlier rounds as they were. A lower learning rate is allowed only
        with ``runtime.resume=changed``.
        """
        setup, now, checkpoint = self._setup, self._setup.experiment, self.resumed
        changed = _differences(earlier, now)
        is_lower = changed.keys() == {"train.lr"} and now.train.lr < earlier.train.lr
        if is_lower and checkpoint is not None and now.runtime.resume == "changed":
            self._log_change(f"train.lr was {earlier.train.lr:g} and is {now.train.lr:g}")
        elif changed:
            refusal = _why_not_longer(earlier, now, changed)
            if refusal is not None:
                hint = f" --set {CHANGED} goes on with it from the last checkpoint." if is_lower else ""
                raise CheckpointError(f"{self.path} {refusal}. Give another --out.{hint}")
        if checkpoint is not None:
            was = checkpoint.about
            if was["layout"] != STATE_LAYOUT:
                raise CheckpointError(
                    f"{self.path} was begun by another version of fedpews; finish it with that one, or give another "
                    "--out."
                )
            data, other_model = was["data"], difference_of_models(was["model"], setup.structure)
        else:
            # config.toml has the fingerprints of what was given in Python
            data, model = earlier.data.fingerprint, (earlier.model.model_extra or {}).get("fingerprint")
            is_same = model in (None, fingerprint(setup.structure))
            other_model = None if is_same else "its fingerprint differs"
        if data not in (None, setup.data_hash):
            raise CheckpointError(f"{self.path} was run on other data than is here now. Give another --out.")
        if other_model is not None:
            raise CheckpointError(
                f"{self.path} was run with another model: {other_model}. Give another --out."
            )

    def _log_change(self, text: str) -> None:
        self._changes.append(f"after round {self.saved}: {text}")

    def start(self, engine: Engine, why: str, memories: Store) -> list[Record]:
        """Continue with an engine, after all checks; the records so far.

        Args:
            why: why this engine was chosen.
        """
        if self._folder is None:
            return []
        if self.resumed is not None:
            self._compare_engine(engine, why, self.resumed.about["made_with"])
        experiment, earlier = self._setup.experiment, self._earlier
        is_same = earlier is not None and earlier.fingerprint() == experiment.fingerprint()
        if not (is_same and self._folder.is_intact(layout.CONFIG)):
            if is_same and layout.CONFIG in self._folder.sums:
                logging.getLogger("fedpews").warning(
                    "%s was lost or damaged; it is written again", self._folder.config
                )
            self._folder.write_config(experiment.to_toml())
        return self._folder.start(self.resumed, memories)

    def _compare_engine(self, engine: Engine, why: str, was: Mapping[str, str]) -> None:
        """Refuse an engine whose numbers differ from those of the checkpoint, unless they may."""
        may_change, now = self._setup.experiment.runtime.resume == "changed", engine.made_with()
        engine.go_on(was, may_change=may_change)
        changed = ", ".join(
            f"{key} was {was[key]} and is {now.get(key, 'none')}"
            for key in ("engine", "torch", "compiler", "processor")
            if key in was and was[key] != now.get(key)
        )
        if not changed:
            return
        if was["engine"] != now["engine"]:
            changed += f" ({why}; --set runtime.engine={was['engine']} keeps it)"
        if not may_change:
            raise CheckpointError(
                f"{self.path} cannot go on to the same numbers: {changed}. Bring that back, give another --out, or go "
                f"on to numbers that differ by rounding: --set {CHANGED}"
            )
        self._log_change(changed)

    def record(self, records: Sequence[Record], observed: Sequence[Ownership] = ()) -> list[Record]:
        """Write the records of a round; the first ones after a change say what was changed."""
        new = self._changes[self._logged :]
        if new and records:
            records = [record | {"went_on": "; ".join(new)} for record in records]
            self._logged = len(self._changes)
        if self._folder is not None:
            if not self._is_described:
                self._folder.describe(lambda masked: self._federation(masked or bool(observed)))
                self._is_described = True
            self._folder.append(records, observed)
        return [*records]

    def checkpoint(self, round: int, server: Server, best: Mapping[int, Tree]) -> None:
        """Write a checkpoint, unless there is one of this round."""
        if self._folder is None or self.saved == round:
            return
        about = {
            "layout": STATE_LAYOUT,
            "experiment": self._setup.experiment.to_dict(),
            "data": self._setup.data_hash,
            "model": self._setup.structure,
            "made_with": server.engine.made_with(),
            "went_on": self._changes,
            "machines": self._machines,
        }
        self._folder.save_checkpoint(round, server.states, best, server.memories, about)
        self.saved = round

    def finish(self, result: Result) -> None:
        """Complete the summary, and write it with the models and masks."""
        result.summary["machines"] = self._machines
        if self._changes:
            result.summary["went_on"] = self._changes
        if self._folder is None:
            return
        net, files = self._setup.net, {}
        for seed, params in result.params.items():
            constants = {} if has_adapters(net) else net.at(seed).constants()
            files[layout.MODEL.format(seed)] = params | constants
            if seed in result.best:
                files[layout.BEST.format(seed)] = result.best[seed] | constants
            clients = result.finetuned.get(seed, {}).items()
            if clients:
                tuned = {f"client-{i}/{name}": value for i, tree in clients for name, value in tree.items()}
                files[layout.FINETUNED.format(seed)] = tuned
            if result.neurons[seed]:
                masks = {f"client-{i}": mask.to(torch.uint8) for i, mask in result.neurons[seed].items()}
                files[layout.MASKS.format(seed)] = masks
        self._folder.finish(result.summary, files)

    def describe(self) -> str:
        """What is saved of a run that stops now, and how to continue it."""
        if self._folder is None:
            return "nothing was saved"
        path = self._folder.path
        if not self.saved:
            return f"nothing was saved yet; the same command with --resume begins again ({path})"
        return f"saved as of round {self.saved}: go on with the same command and --resume ({path})"

    def _federation(self, masked: bool) -> dict[str, Any]:
        setup, data = self._setup, self._setup.data
        weights = sum(prod(shape) for shape in setup.structure["shapes"].values())
        return {
            "clients": len(data),
            "client_names": list(data.client_names),
            "class_names": list(data.class_names),
            # the server of real sites has no samples
            "counts": data.counts().tolist() if len(data.y) else None,
            # without masks the model is not traced: it may have no neuron, such as a last layer alone
            "layers": [asdict(layer) for layer in setup.net.graph.layers] if masked else [],
            "data": setup.data_hash,
            "model": {
                "fingerprint": fingerprint(setup.structure),
                "weights": weights,
                "base": setup.structure["frozen"],
            },
        }


def add_fingerprints(setup: Setup) -> Setup:
    """The setup whose experiment has the fingerprints of a model and data given in Python."""
    values = setup.experiment.to_dict()
    if values["model"]["name"] == GIVEN:
        values["model"]["fingerprint"] = fingerprint(setup.structure)
    if values["data"]["name"] == GIVEN:
        values["data"]["fingerprint"] = setup.data_hash
    return replace(setup, experiment=Experiment(**values))


def _experiment_of(folder: RunFolder, checkpoint: Checkpoint | None) -> Experiment:
    """The experiment that a folder's run was started with; the checkpoint has it even if config.toml is lost."""
    if checkpoint is not None:
        return Experiment(**checkpoint.about["experiment"])
    try:
        return Experiment.load(folder.config)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder.config} is missing or damaged ({first_line(error)}), and there is no checkpoint that knows what "
            "was run. Start again in another folder (--out)."
        ) from error


def _differences(earlier: Experiment, now: Experiment) -> dict[str, tuple[Any, Any]]:
    """The keys in which two experiments differ and that decide the numbers, with both values."""
    a, b = flatten(earlier.to_dict()), flatten(now.to_dict())
    changed = {key: (a.get(key), b.get(key)) for key in a | b if a.get(key) != b.get(key)}
    if earlier.train.diverged == "stop":
        # no client was left out so far, whatever happens to those that diverge from now on
        changed.pop("train.diverged", None)
    return {key: values for key, values in changed.items() if not key.startswith(FREE)}


def _why_not_longer(
    earlier: Experiment, now: Experiment, changed: Mapping[str, tuple[Any, Any]]
) -> str | None:
    """Why a run of ``earlier`` cannot become one of ``now`` by adding rounds; None if it can."""
    if changed.keys() - OF_LENGTH:
        words = [f"{key} is {was} there and {value} here" for key, (was, value) in changed.items()]
        return f"holds another experiment: {', '.join(words[:3])}"
    if now.rounds < earlier.rounds:
        return f"holds a run of {earlier.rounds} rounds, more than the {now.rounds} asked for"
    longer = (
        f"was begun for {earlier.rounds} rounds, and with {now.rounds} its first ones would have been others"
    )
    if earlier.warmup_rounds != now.warmup_rounds:
        was, key = earlier.warmup_rounds, "warmup.rounds"
        return f"{longer}: the warmup had {was} rounds, now {now.warmup_rounds}; --set {key}={was} keeps it"
    if now.train.lr_schedule == "cosine" and now.rounds != earlier.rounds:
        return f"{longer}: the cosine schedule of the learning rate ends with the run"
    return None
