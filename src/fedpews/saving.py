"""Saving a run while it goes on; a run without a folder saves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from fedpews.build import Setup
from fedpews.engines.engine import Engine
from fedpews.engines.hardware import describe_machine
from fedpews.models.adapters import has_adapters
from fedpews.neurons.structure import fingerprint
from fedpews.result import Result
from fedpews.results.folder import RunFolder
from fedpews.results.masks import Ownership
from fedpews.results.memories import Store
from fedpews.results.records import Record
from fedpews.resuming import Resumed, about, check_engine, find_resumed, update_config
from fedpews.server import Server
from fedpews.trees import Tree


class Saver:
    """Writes a run to its folder: ``start``, ``record`` and ``checkpoint`` for each round, ``finish``."""

    def __init__(self, folder: RunFolder | None, setup: Setup, resume: bool) -> None:
        self._folder, self._setup = folder, setup
        self.path = None if folder is None else folder.path
        self._resumed = Resumed() if folder is None else find_resumed(folder, setup, resume)
        self.resumed = self._resumed.checkpoint
        """The checkpoint that the run continues from, if any."""
        self._changes = list(self._resumed.changes)
        known: Mapping[str, Any] = {} if self.resumed is None else self.resumed.about
        self._machines = list(dict.fromkeys([*known.get("machines", ()), describe_machine(setup.net.device)]))
        self._logged = len(known.get("went_on", ()))  # changes that the records have already
        self._saved = 0 if self.resumed is None else self.resumed.round  # the round of the last checkpoint
        self._is_described = False

    def start(self, engine: Engine, why: str, memories: Store) -> list[Record]:
        """Continue with an engine, after all checks; the records so far."""
        if self._folder is None:
            return []
        if self.resumed is not None:
            change = check_engine(engine, why, self.resumed, self._setup, self._folder.path)
            self._changes += [f"after round {self.resumed.round}: {change}"] if change else []
        update_config(self._folder, self._setup.experiment, self._resumed.earlier)
        return self._folder.start(self.resumed, memories)

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
        if self._folder is not None and self._saved != round:
            more = {"pending": server.measurer.pending, "went_on": self._changes, "machines": self._machines}
            made = about(self._setup, server.engine) | more
            self._folder.save_checkpoint(round, server.states, best, server.memories, made)
            self._saved = round

    def finish(self, result: Result) -> None:
        """Complete the summary, and write it with the models and masks."""
        result.summary["machines"] = self._machines
        if self._changes:
            result.summary["went_on"] = self._changes
        if self._folder is None:
            return
        net = self._setup.net
        params, best = result.params, result.best
        if not has_adapters(net):
            params, best = (
                {seed: tree | net.at(seed).constants() for seed, tree in trees.items()}
                for trees in (params, best)
            )
        self._folder.finish(result.summary, params, result.neurons, best, result.finetuned)

    def describe(self) -> str:
        """What is saved of a run that stops now, and how to continue it."""
        if self._folder is None:
            return "nothing was saved"
        path = self._folder.path
        if not self._saved:
            return f"nothing was saved yet; the same command with --resume begins again ({path})"
        return f"saved as of round {self._saved}: go on with the same command and --resume ({path})"

    def _federation(self, masked: bool) -> dict[str, Any]:
        setup, data = self._setup, self._setup.data
        weights = sum(prod(shape) for shape in setup.structure["shapes"].values())
        return {
            "clients": len(data),
            "client_names": list(data.client_names),
            "class_names": list(data.class_names),
            # the server of real sites has no samples
            "counts": data.counts().tolist() if len(data.y) else None,
            "layers": [
                {"name": layer.name, "start": layer.start, "size": layer.size}
                # without masks the model is not traced: it may have no neuron, such as a last layer alone
                for layer in (setup.net.graph.layers if masked else ())
            ],
            "data": setup.data_hash,
            "model": {
                "fingerprint": fingerprint(setup.structure),
                "weights": weights,
                "base": setup.structure["frozen"],
            },
        }
