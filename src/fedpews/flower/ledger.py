"""What a site has released under client-side differential privacy: once for each seed and round, within a budget."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from typing_extensions import TypedDict

from fedpews.errors import FedpewsError
from fedpews.experiment import Experiment
from fedpews.flower.messages import Request, SeedDownload
from fedpews.methods.private import epsilon
from fedpews.methods.wire import BadMessage
from fedpews.results.files import write_atomically
from fedpews.results.schema import read_object


class BudgetSpent(FedpewsError):
    """One more release would exceed the site's budget."""


class Release(TypedDict):
    """One upload: the multiplier of its noise, and the digest of the request that it answers."""

    noise: float
    request: str


class Ledger:
    """The releases of a site over all runs and experiments, in ``ledger.json`` of its folder.

    A coordinator that asks for a round again gets the same bytes and no fresh noise. The server's name of its run
    makes no difference: it may choose another.

    Args:
        budget: the largest ε of all releases together, at the experiment's δ; None is that of the experiment itself,
            each of whose seeds and rounds is answered once.
    """

    def __init__(self, folder: Path, experiment: Experiment, budget: float | None) -> None:
        self._path, self._answers, self._experiment = folder / "ledger.json", folder / "answers", experiment
        self._budget = math.inf if budget is None else budget
        self._answers.mkdir(mode=0o700, parents=True, exist_ok=True)
        # messages are answered in processes of their own
        self.lock = FileLock(folder / "ledger.lock")

    def releases(self) -> dict[str, Release]:
        releases: dict[str, Release]
        releases = read_object(self._path, dict[str, Release]) if self._path.exists() else {}
        return releases

    def epsilon(self, more: int = 0) -> float:
        """ε of all releases and so many more: Gaussian noises compose as one of multiplier (Σ 1/z²)^(-1/2)."""
        table = self._experiment.privacy
        noises = [*(release["noise"] for release in self.releases().values()), *[table.noise] * more]
        if not noises or not all(noises):
            return math.inf if noises else 0.0
        together = sum(noise**-2 for noise in noises) ** -0.5
        return epsilon(together, 1, table.delta, 1, 1, "client")

    def answer(self, request: Request, sent: SeedDownload) -> bytes | None:
        """What this request was answered with; None if its round was not answered yet."""
        release = self.releases().get(self._key(request, sent))
        if release is None:
            return None
        path = self._file(request, sent)
        if release["request"] != _digest(request, sent) or not path.exists():
            raise BadMessage(
                f"round {request.round}, seed {sent.seed} was answered already, and this is another request for it"
            )
        return path.read_bytes()

    def check(self, more: int) -> None:
        """Refuse so many releases if they would exceed the budget."""
        if math.isfinite(self._budget) and not (spent := self.epsilon(more)) <= self._budget:
            raise BudgetSpent(
                f"this site's budget is ε = {self._budget:g} and {self.epsilon():.4g} of it is spent in "
                f"{len(self.releases())} releases; this round would make it {spent:.4g}"
            )

    def add(self, request: Request, uploads: Mapping[int, bytes]) -> None:
        """Keep the uploads and count them, before they are sent."""
        releases = self.releases()
        for sent in request.downloads:
            write_atomically(self._file(request, sent), uploads[sent.seed])
            noise, digest = self._experiment.privacy.noise, _digest(request, sent)
            releases[self._key(request, sent)] = {"noise": noise, "request": digest}
        write_atomically(self._path, (json.dumps(releases, indent=1) + "\n").encode())
        # the server never asks for older ones again
        for sent in request.downloads:
            for path in self._answers.glob(f"{self._experiment.fingerprint()}-{sent.seed}-*"):
                if int(path.name.rpartition("-")[2]) < sent.kept:
                    path.unlink()

    def _key(self, request: Request, sent: SeedDownload) -> str:
        return f"{self._experiment.fingerprint()}-{sent.seed}-{request.round}"

    def _file(self, request: Request, sent: SeedDownload) -> Path:
        return self._answers / self._key(request, sent)


def _digest(request: Request, sent: SeedDownload) -> str:
    about: Any = (request.round, request.lr, sent.seed, sent.accepted)
    return hashlib.sha256(repr(about).encode() + sent.data).hexdigest()
