"""Every command in an environment with the required packages only: it works, or names the extra it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import typer

from fedpews.cli import app

# runs in a process of its own, since modules that are imported already cannot be taken away
CHILD = """
import json, re, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

needed, left = set(), ["fedpews"]
while left:
    name = left.pop()
    if name not in needed:
        needed.add(name)
        try:
            found = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        left += [plain(re.match("[A-Za-z0-9._-]+", text)[0]) for text in found if "extra ==" not in text]
owners = packages_distributions()
missing = {name for name, given in owners.items() if not needed & {plain(one) for one in given}}

class Bare:
    def __init__(self, inner):
        self.inner = inner

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else self.inner.find_spec(name, path, target)

sys.meta_path[:] = map(Bare, sys.meta_path)

from typer.testing import CliRunner
from fedpews.cli import app

ended = []
for arguments in json.load(sys.stdin):
    answer = CliRunner().invoke(app, arguments)
    ended.append((type(answer.exception).__name__, str(answer.exception)))
print(json.dumps(ended))
"""

CONFIG = """
rounds = 1
seeds = [0]
[data]
name = "synthetic-3.2k"
train_per_class = 10
test_per_class = 10
[train]
batch_size = 16
"""

WORKS = ""
RUN = "run trial.toml --quiet --out"
# a command -> the extra that it needs
COMMANDS = {
    f"{RUN} plain": WORKS,
    f"{RUN} a --log tensorboard": "tensorboard",
    f"{RUN} a --log wandb": "wandb",
    f"{RUN} a --log mlflow": "mlflow",
    f"{RUN} a --log trackio": "trackio",
    f"{RUN} a --set privacy.clip=1 --set privacy.noise=1": "privacy",
    "run tables.toml --quiet --out a": "pandas",
    f'{RUN} a --set task.metrics=["torchmetrics.functional:accuracy"]': "metrics",
    "list methods": WORKS,
    "compare plain": WORKS,
    "new own.toml": WORKS,
    "show synthetic-32k": WORKS,
    "report plain": WORKS,
    "watch plain --port 65536": WORKS,
    "plot plain": WORKS,
    "reproduce table1 --no-run --quiet": WORKS,
    "reproduce table1 --quiet --on local:1": "cluster",
    "sweep trial.toml --quiet --grid train.lr=0.1 --out swept": WORKS,
    "sweep trial.toml --quiet --grid train.lr=0.1,0.2 --on local:1": "cluster",
    "sweep trial.toml --quiet --grid train.lr=0.1..0.2 --search optuna": "search",
    "data status": WORKS,
    "data get nothing": WORKS,
    "data show trial.toml": WORKS,
    "stats trial.toml": WORKS,
    "export plain --out exported": WORKS,
    "export plain --out exported-onnx --format onnx": "onnx",
    "flower new app": WORKS,
    "flower up trial.toml": "flower",
    "flower serve coordinator --name localhost": "flower",
    "flower approve coordinator key.pub --site 0 --name north": "flower",
    "flower start coordinator app --out b": "flower",
    "flower stats coordinator app --out c": "flower",
    "flower hash app": "flower",
    "site app --site 0 --superlink localhost:1 --ca ca.crt --key key": "flower",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """How each command ended: its exception's type and message."""
    here = tmp_path_factory.mktemp("bare")
    (here / "trial.toml").write_text(CONFIG)
    (here / "tables.toml").write_text('[data]\nname = "folder:tables"\n')
    for client in ("a", "b", "test"):
        (here / "tables" / client).mkdir(parents=True)
        (here / "tables" / client / "table.csv").write_text("x,label\n1,0\n2,1\n")
    asked = json.dumps([command.split() for command in COMMANDS])
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(
        command, cwd=here, input=asked, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(COMMANDS, map(tuple, answers), strict=True))


@pytest.mark.parametrize(("command", "extra"), COMMANDS.items())
def test_without_extras_a_command_works_or_names_the_one_it_needs(
    command: str, extra: str, ended: dict[str, tuple[str, str]]
) -> None:
    kind, message = ended[command]

    if extra:
        assert (kind, f"pip install 'fedpews[{extra}]'" in message) == ("ConfigError", True), message
    else:
        assert kind in ("NoneType", "SystemExit", "ConfigError"), message
        assert "pip install" not in message


def test_no_command_is_forgotten_here() -> None:
    def names(of: Any) -> set[str]:
        group = typer.main.get_command(of)
        return {
            f"{name} {inner}".strip()
            for name, command in group.commands.items()
            for inner in getattr(command, "commands", [""])
        }

    assert {name for name in names(app) if not any(f"{c} ".startswith(f"{name} ") for c in COMMANDS)} == set()
