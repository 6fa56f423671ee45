"""The folder of a Flower app: its files, and its hash, which a site compares before it runs anything."""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fedpews.errors import ConfigError, FedpewsError, first_line

CONFIG = "experiment.toml"
SHIPPED = resources.files("fedpews.flower.deploy")
HALF = """from fedpews.flower import {half}

app = {half}(__file__)
"""
PYPROJECT = """[project]
name = "{name}"
version = "1.0.0"
description = "An experiment of fedpews across sites"
license = "Apache-2.0"
dependencies = []  # every machine has fedpews[flower] already; Flower would install what is listed here at each start

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedpews"
fab-include = ["*.py", "*.toml"]

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]  # of the server; change with: flwr run . CONNECTION -c 'resume=true'
out = ""                # the run's folder on the server's machine
resume = false          # go on where the run in it stopped
before = 0              # with it: as if this round and all after it had not been
without = ""            # sites to exclude, by name or number, with commas between them
roster = ""             # the coordinator's roster.toml: which key is which site's
data-dir = ""           # where the server looks for data sets
stats = false           # only ask the sites for statistics of their data
test = ""               # an .npz file with x and y, or a table: the server's test set, when the data is at the sites
"""


def write_app(folder: Path, experiment: str, name: str = "fedpews-app") -> None:
    """Write a Flower app into an existing folder; ``experiment`` is the configuration's TOML."""
    (folder / CONFIG).write_text(experiment)
    for half in ("server_app", "client_app"):
        (folder / f"{half}.py").write_text(HALF.format(half=half))
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name))


def new_app(folder: Path, experiment: str) -> list[Path]:
    """Write a new app with its README; a folder that is not empty is refused."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "fedpews-app"
    write_app(folder, experiment, name)
    (folder / "README.md").write_text((SHIPPED / "app_readme.md").read_text().replace("APP_NAME", name))
    return sorted(folder.iterdir())


def starter() -> str:
    """An experiment whose sites bring their own data, for the user to complete."""
    return (SHIPPED / "starter.toml").read_text()


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
