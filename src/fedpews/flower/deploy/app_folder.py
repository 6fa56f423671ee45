"""The folder of a Flower app: its files, and its hash, which a site compares before it runs anything."""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from fedpews.errors import ConfigError, FedpewsError, first_line
from fedpews.flower.deploy import template

CONFIG = "experiment.toml"
HALF = """from fedpews.flower import {half}

app = {half}(__file__)
"""


def new_app(folder: Path, experiment: str) -> list[Path]:
    """Write a Flower app with its README, and list its files; a folder that is not empty is refused.

    Args:
        experiment: the configuration's TOML.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "fedpews-app"
    (folder / CONFIG).write_text(experiment)
    for half in ("server_app", "client_app"):
        (folder / f"{half}.py").write_text(HALF.format(half=half))
    for file, source in (("pyproject.toml", "app_pyproject.toml"), ("README.md", "app_readme.md")):
        (folder / file).write_text(template(source, name=name))
    return sorted(folder.iterdir())


def starter() -> str:
    """An experiment whose sites bring their own data, for the user to complete."""
    return template("starter.toml")


class ForeignApp(FedpewsError):
    """The server sent another app than the one this site has read."""


@dataclass(frozen=True)
class Pin:
    """An app's folder and its hash: the only app that a site runs.

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
        received = hashlib.sha256(sent).hexdigest()
        if received != self.hash:
            raise ForeignApp(
                f"the server's app has the hash {received}, and this site runs only {self.hash} ({self.folder})"
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
        with warnings.catch_warnings():  # about Flower's own imports
            warnings.simplefilter("ignore")
            packed: bytes = build_fab_from_disk(folder)
    except Exception as error:
        raise ConfigError(f"{folder} cannot be packed as a Flower app: {first_line(error)}") from error
    return packed
