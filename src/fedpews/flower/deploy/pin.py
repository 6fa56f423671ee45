"""The app that a site has read and agreed to: nothing else from the network is ever run."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

from fedpews.errors import ConfigError, FedpewsError, first_line


class ForeignApp(FedpewsError):
    """The server sent another app than the one this site has read."""


@dataclass(frozen=True)
class Pin:
    """A folder with an app, and the hash that Flower gives it.

    The site runs the files of its own folder. What the server sends is only compared, and never unpacked.
    """

    folder: Path
    hash: str

    @classmethod
    def of(cls, folder: Path) -> Pin:
        """Read the app in a folder."""
        return cls(folder.resolve(), app_hash(folder))

    def check(self, sent: bytes) -> None:
        """Refuse another app than this, with both hashes."""
        found = hashlib.sha256(sent).hexdigest()
        if found != self.hash:
            raise ForeignApp(
                f"the server's app has the hash {found}, and this site runs only {self.hash} ({self.folder})"
            )
        now = app_hash(self.folder)
        if now != self.hash:
            raise ForeignApp(
                f"the files in {self.folder} were changed since this site started: {self.hash} then, {now} now; "
                "start it again to agree to them"
            )


def app_hash(folder: Path) -> str:
    """The SHA-256 of an app as Flower packs it: the same files give the same hash on every machine."""
    return hashlib.sha256(pack_app(folder)).hexdigest()


def pack_app(folder: Path) -> bytes:
    """An app as Flower sends it."""
    from fedpews.flower.flwr_private import build_fab_from_disk

    if not (folder / "pyproject.toml").exists():
        raise ConfigError(
            f"{folder} is no Flower app: it has no pyproject.toml (fedpews flower new makes one)"
        )
    try:
        with warnings.catch_warnings():  # of what Flower itself uses
            warnings.simplefilter("ignore")
            packed: bytes = build_fab_from_disk(folder)
    except Exception as error:
        raise ConfigError(f"{folder} cannot be packed as a Flower app: {first_line(error)}") from error
    return packed
