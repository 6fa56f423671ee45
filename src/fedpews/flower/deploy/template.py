"""The files of a Flower app for an experiment: its configuration and two lines for each half."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from fedpews.errors import ConfigError

APP = "server_app.py", "client_app.py"
HALF = """from fedpews.flower import {half}

app = {half}(__file__)
"""
PYPROJECT = """[project]
name = "{name}"
version = "1.0.0"
description = "An experiment of fedpews across sites"
license = "Apache-2.0"
dependencies = []  # every machine has fedpews[flower] already; Flower would install what stands here at each start

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "{publisher}"
fab-include = ["*.py", "*.toml"]

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]  # of the server; change with: flwr run . CONNECTION -c 'resume=true'
out = ""                # the run's folder on the server's machine
resume = false          # go on where the run in it stopped
roster = ""             # the coordinator's roster.toml: which key is which site's
data-dir = ""           # where the server looks for data sets
test = ""               # an .npz file with x and y, or a table: the server's test set, when the data is at the sites
"""


def write_app(
    folder: Path, experiment: str, *, name: str = "fedpews-app", publisher: str = "fedpews"
) -> None:
    """A Flower app in an existing folder; ``experiment`` is the configuration's TOML."""
    (folder / "experiment.toml").write_text(experiment)
    for file in APP:
        (folder / file).write_text(HALF.format(half=file.removesuffix(".py")))
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name, publisher=publisher))


def new_app(folder: Path, experiment: str) -> list[Path]:
    """A new app with its README; a folder that already has something in it is left alone."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "fedpews-app"
    write_app(folder, experiment, name=name)
    (folder / "README.md").write_text(_shipped("app_readme.md").replace("APP_NAME", name))
    return sorted(folder.iterdir())


def starter() -> str:
    """An experiment whose sites bring their own data, to be filled in."""
    return _shipped("starter.toml")


def _shipped(name: str) -> str:
    return resources.files("fedpews.flower.deploy").joinpath(name).read_text()
