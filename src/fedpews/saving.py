"""What of a run is written while it goes on, and when; a run without a folder writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from fedpews.build import Setup
from fedpews.engines.hardware import describe_machine
from fedpews.neurons.structure import fingerprint
from fedpews.observe import describe_federation
from fedpews.results.records import Record
from fedpews.results.run_folder import RunFolder
from fedpews.resuming import Reopened, about
from fedpews.server import Server
from fedpews.trees import Tree


class Saver:
    """The folder of a run, written to as its rounds are done."""

    def __init__(self, folder: RunFolder | None, setup: Setup, reopened: Reopened) -> None:
        self._folder, self._setup = folder, setup
        self.went_on = reopened.went_on
        was = () if reopened.checkpoint is None else reopened.checkpoint.about.get("machines", ())
        self.machines = list(dict.fromkeys([*was, describe_machine(setup.net.device)]))
        """All that the run was trained on."""
        # said once, in the first round that it is true of
        known = 0 if reopened.checkpoint is None else len(reopened.checkpoint.about.get("went_on", ()))
        self._untold = list(reopened.went_on[known:])
        self.saved = 0 if reopened.checkpoint is None else reopened.checkpoint.round
        """The round of the last checkpoint."""

    @property
    def place(self) -> str | None:
        """The folder in words; None where nothing is kept."""
        return None if self._folder is None else str(self._folder.path)

    def told(self, records: Sequence[Record]) -> list[Record]:
        """The records of a round, saying what was changed before it."""
        if not self._untold or not records:
            return [*records]
        said, self._untold = "; ".join(self._untold), []
        return [record | {"went_on": said} for record in records]

    def add(self, records: Sequence[Record], server: Server) -> None:
        """Write the records of a round that is done."""
        if self._folder is not None:
            self._describe(server)
            self._folder.append(records, server.observed)

    def end(self, records: Sequence[Record], server: Server) -> None:
        """After the last round: write records that had waited for their evaluation."""
        if self._folder is not None:
            # of a finished run that is resumed, this may be all there is to mend
            self._describe(server)
            self._folder.append(records)

    def _describe(self, server: Server) -> None:
        assert self._folder is not None
        self._folder.describe(lambda masked: self._federation(masked or bool(server.observed)))

    def save(self, round: int, server: Server, best: Mapping[int, Tree]) -> None:
        """Write a checkpoint, unless there is one of this round."""
        if self._folder is not None and self.saved != round:
            made = about(self._setup, server.engine)
            told = made | {
                "pending": server.pending,
                "went_on": list(self.went_on),
                "machines": self.machines,
            }
            self._folder.save_checkpoint(round, server.states, server.memories, told, best)
            self.saved = round

    def _federation(self, masked: bool) -> dict[str, Any]:
        data = self._setup.data
        counts = data.counts() if len(data.y) else None
        found = describe_federation(
            self._setup.net, data.client_names, data.class_names, counts, len(data), masked
        )
        made = self._setup.structure
        weights = sum(prod(shape) for shape in made["shapes"].values())
        model = {"fingerprint": fingerprint(made), "weights": weights}
        return found | {"data": self._setup.data_hash, "model": model}
