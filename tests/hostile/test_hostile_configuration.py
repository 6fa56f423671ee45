"""A configuration names code, and that code runs; what nobody wrote for the purpose does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import fedpews
from fedpews.experiment import Experiment
from fedpews.user_code import load_module, load_named

MODULE = """
from functools import cache, partial
from os import system
from pathlib import Path
from shutil import rmtree
from torch import nn
import subprocess

class Net(nn.Linear):
    pass

class Own:
    def __init__(self, **given): Path("ran").touch()

def make(inputs, classes):
    return nn.Linear(inputs, classes)

cached, small = cache(make), partial(make, classes=4)
hidden = partial(system)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "written_by_a_user", raising=False)
    (tmp_path / "written_by_a_user.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize("name", ["Net", "make", "cached", "small"])
def test_a_module_or_a_function_that_makes_one_is_accepted(name: str, here: Path) -> None:
    from torch import nn

    for place in ("written_by_a_user", str(here / "written_by_a_user.py")):
        assert callable(load_named(f"{place}:{name}", nn.Module))


@pytest.mark.parametrize("name", ["system", "rmtree", "subprocess", "hidden", "Own", "Path"])
def test_what_a_module_only_imports_is_no_model(name: str, here: Path) -> None:
    from torch import nn

    for place in ("written_by_a_user", str(here / "written_by_a_user.py")):
        with pytest.raises(ImportError):
            load_named(f"{place}:{name}", nn.Module)
    assert not (here / "ran").exists()


COMMANDS = [
    ("model.name=os:system", "model.command=touch ran"),
    ("model.name=subprocess:Popen", 'model.args=["touch", "ran"]'),
    ("model.name=subprocess:run", 'model.args=["touch", "ran"]'),
    ("model.name=builtins:eval", "model.source=open('ran', 'w')"),
    ("model.name=pathlib:Path", "model.x=ran"),
    ("model.name=written_by_a_user:system", "model.command=touch ran"),
    ("model.name=written_by_a_user:hidden", "model.command=touch ran"),
    ("model.name=written_by_a_user:Own", "model.x=1"),
    ("data.name=os:getcwd",),
    ("data.name=written_by_a_user:Own",),
    ("data.augment=['os:system']",),
    ("task.name=os:system",),
    ("task.metrics=['shutil:rmtree']",),
    ("method.name=subprocess:CompletedProcess", "method.args=1"),
    ("train.optimizer=os:system",),
]


@pytest.mark.parametrize("settings", COMMANDS, ids=lambda settings: settings[0])
def test_a_command_in_the_place_of_a_class_never_runs(settings: tuple[str, ...], here: Path) -> None:
    keys = [part for setting in settings for part in ("--set", setting)]
    done = fedpews("run", "synthetic-3.2k", "--rounds", "1", "--out", "run", *keys)
    assert done.code == 2, done.stderr
    assert not (here / "ran").exists()
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_in_the_working_directory_takes_no_installed_modules_place(here: Path) -> None:
    for name in ("numpy", "torch", "pydantic", "json", "statistics", "scipy"):
        (here / f"{name}.py").write_text("open('ran', 'w')")
    lists = (
        "from fedpews.cli import app\n"
        'for what in ("methods", "data", "models", "tasks", "recipes", "keys"):\n'
        '    app(["list", what], standalone_mode=False)'
    )
    done = subprocess.run([sys.executable, "-P", "-c", lists], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (here / "ran").exists()


def test_the_working_directory_is_looked_at_last(here: Path) -> None:
    (here / "numpy.py").write_text("open('ran', 'w')")
    before = list(sys.path)
    assert load_module("written_by_a_user").Net
    assert sys.path == before
    assert load_module("fedpews.seeds").fold
    assert not (here / "ran").exists()


def test_resume_runs_nothing_that_only_the_folder_names(here: Path) -> None:
    done = fedpews("run", "synthetic-3.2k", "--rounds", "1", "--out", "run", "--set", "runtime.engine=eager")
    assert done.code == 0, done.stderr
    evil = here / "evil.py"
    evil.write_text("open('ran', 'w')")
    config = here / "run" / "config.toml"
    text = config.read_text().replace('name = "mlp"', f'name = "{evil}:Net"')
    config.write_text(text.replace('name = "classification"', f'name = "{evil}:Task"'))
    # with its digests the folder would be refused before anything in it is looked at
    (here / "run" / "SHA256SUMS").unlink()
    assert "evil" in config.read_text()
    for command in (["compare", "run"], ["report", "run"], ["plot", "run", "--format", "svg"]):
        assert fedpews(*command).code == 0
    # a finished run goes by its checkpoint, which knows what it is of, not by what lies beside it
    done = fedpews("run", "synthetic-3.2k", "--rounds", "1", "--out", "run", "--resume")
    assert done.code == 0, done.stderr
    assert "evil" not in config.read_text()
    assert not (here / "ran").exists()


def test_reading_a_configuration_runs_nothing(here: Path) -> None:
    (here / "evil.py").write_text("open('ran', 'w')")
    (here / "my.toml").write_text('[model]\nname = "evil:Net"\n[method]\nname = "evil.py:Method"\n')
    assert Experiment.load(here / "my.toml").model.name == "evil:Net"
    assert not (here / "ran").exists()
