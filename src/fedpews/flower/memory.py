"""A site's private memory on its own disk (mask scores, control variates), and what the server knows of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from fedpews.errors import ConfigError, FedpewsError
from fedpews.results.memories import Version
from fedpews.results.tensors import read_nest, write_nest
from fedpews.trees import Nest, leaves


class MemoryLost(FedpewsError):
    """The server goes on from a round that this site has no memory of."""


class SiteMemory:
    """One file for each seed and round. A site may finish a round and lose its answer on the way, so the round
    before is kept until the server has saved that it will never ask for it again.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     memory = SiteMemory(Path(folder), site=0, run="a" * 32)
    ...     memory.write(0, 1, {"scores": torch.zeros(2)}, kept=0)
    ...     memory.write(0, 2, {"scores": torch.ones(2)}, kept=1)
    ...     memory.read(0, accepted=1)["scores"]
    tensor([0., 0.])
    """

    def __init__(self, folder: Path, site: int, run: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", run):  # it comes from the network and becomes a folder's name
            raise ConfigError(f"the server's name of its run is not one: {run!r:.50}")
        self.folder = folder / f"site-{site}" / run

    def read(self, seed: int, accepted: int) -> Nest | None:
        """The memory after the round that the server accepted last; None if there was none, or nothing in it."""
        if accepted == 0:
            return None
        path = self._path(seed, accepted)
        if not path.exists():
            raise MemoryLost(
                f"the server goes on from round {accepted}, but {path} is not here. Bring the site's state-dir "
                "back, or set flower.lost_memory to 'restart' to let this site start anew."
            )
        memory, _ = read_nest(path)
        return memory if any(True for _ in leaves(memory)) else None

    def write(self, seed: int, round: int, memory: Nest, kept: int) -> None:
        """Keep the memory after a round, and drop what is older than ``kept``."""
        path = self._path(seed, round)
        # the site's alone: what it learnt of its own data is in here
        for folder in (self.folder.parent, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        write_nest(path, memory, {"round": round})
        path.chmod(0o600)
        for path in self.folder.glob(f"seed-{seed}-round-*.safetensors"):
            if int(path.stem.rpartition("-")[2]) < kept:
                path.unlink(missing_ok=True)

    def _path(self, seed: int, round: int) -> Path:
        return self.folder / f"seed-{seed}-round-{round}.safetensors"


class AcceptedRounds:
    """What the server keeps in the place of clients' memories: the round in which each site was last accepted.

    The memories themselves never leave their sites.
    """

    def __init__(self) -> None:
        self._accepted: dict[str, int] = {}
        # of the last two checkpoints: a server whose last one is damaged goes on from the one before it
        self._saved: dict[str, int] = {}
        self._saved_before: dict[str, int] = {}

    def restore(self, saved: Mapping[str, Version]) -> None:
        self._accepted = {key: version.number for key, version in saved.items()}
        self._saved, self._saved_before = dict(self._accepted), {}

    def get(self, seed: int, client: int) -> Nest | None:
        return None

    def put(self, seed: int, client: int, memory: Nest) -> None:
        pass

    def accept(self, seed: int, client: int, round: int) -> None:
        """The client's upload of this round counts, so its next round starts from this one's memory."""
        self._accepted[f"{seed}-{client}"] = round

    def accepted(self, seed: int, client: int) -> int:
        """The round whose memory a client goes on from; 0 before its first."""
        return self._accepted.get(f"{seed}-{client}", 0)

    def kept(self, seed: int, client: int) -> int:
        """The oldest round whose memory a server that goes on from one of its two checkpoints could ask for."""
        return self._saved_before.get(f"{seed}-{client}", 0)

    def commit(self) -> dict[str, Version]:
        self._saved_before, self._saved = self._saved, dict(self._accepted)
        return {key: Version(round) for key, round in self._saved.items()}

    def keep(self, files: Collection[str]) -> None:
        pass
