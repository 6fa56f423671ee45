"""The way in: version, help, completion, and a configuration of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from command_line import fedpews
from fedpews import __version__
from fedpews.cli import app
from fedpews.config import recipes
from fedpews.experiment import Experiment, known_keys, option_keys


def commands(command: click.Command, path: str = "fedpews") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}")


COMMANDS = dict(commands(typer.main.get_command(app)))


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers behind a line."""
    env = {
        **os.environ,
        "_FEDPEWS_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "fedpews"], env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def test_version_is_the_packages() -> None:
    assert fedpews("--version").stdout.strip() == f"fedpews {__version__}"


def test_python_m_is_the_command() -> None:
    command = [sys.executable, "-m", "fedpews", "list", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no list of 'nothing'" in done.stderr


@pytest.mark.parametrize("path", COMMANDS)
def test_no_help_text_is_taken_for_markup(path: str) -> None:
    texts = [getattr(parameter, "help", None) or "" for parameter in COMMANDS[path].params]
    assert not [text for text in (*texts, COMMANDS[path].help or "") if "[" in text]


def test_help_shows_the_defaults() -> None:
    shown = fedpews("reproduce", "--help").stdout
    assert "[default: results]" in shown
    assert "[default: (the --out folder)]" in shown


@pytest.mark.parametrize("recipe", recipes())
def test_a_new_file_is_the_recipe_and_names_every_other_key(recipe: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    assert fedpews("new", str(file), "--recipe", recipe).code == 0
    assert Experiment.load(file) == Experiment.load(recipe)
    text = file.read_text()
    keys = [
        key.rpartition(".")[2] for key in known_keys() if key.partition(".")[0] not in ("flower", "server")
    ]
    assert not [key for key in keys if f"\n{key} =" not in text and f"\n# {key} =" not in text]


def test_a_new_file_has_the_options_of_all_models_methods_and_tasks_with_their_meaning(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.toml"
    fedpews("new", str(file))
    tables = {part.partition("]")[0]: part for part in file.read_text().split("\n[")}
    keys = list(option_keys())
    for table in ("task", "model", "method", "optimizer", "server"):
        assert any(key.name.startswith(f"{table}.") for key in keys)
    for key in keys:
        name, _, owner = key.name.partition(" ")
        table, _, option = name.partition(".")
        assert key.text, f"{key.name} has no explanation"
        assert f"\n# {owner.strip('()')}: {key.text} ({key.type})\n# {option} =" in tables[table]


def test_an_option_of_a_new_file_is_set_without_its_comment_sign(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    fedpews("new", str(file))
    text = file.read_text()
    assert text.count("# depth = 8\n") == text.count("# temperature = 0.5\n") == 1
    file.write_text(
        text.replace("# depth = 8\n", "depth = 14\n").replace("# temperature = 0.5\n", "temperature = 0.7\n")
    )
    experiment = Experiment.load(file)
    assert (experiment.model.model_extra, experiment.method.model_extra) == (
        {"depth": 14},
        {"temperature": 0.7},
    )


def test_a_key_without_its_comment_sign_is_set(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    fedpews("new", str(file))
    file.write_text(file.read_text().replace("# participation = 1.0", "participation = 0.5"))
    assert tomllib.loads(file.read_text())["participation"] == 0.5


def test_new_never_writes_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("rounds = 7\n")
    done = fedpews("new", str(file))
    assert done.code == 2
    assert "already exists" in done.stderr
    assert file.read_text() == "rounds = 7\n"


def test_an_unknown_recipe_is_named_with_the_one_meant(tmp_path: Path) -> None:
    for arguments in (
        ["new", str(tmp_path / "a.toml"), "--recipe", "sinthetic-32k"],
        ["show", "sinthetic-32k"],
    ):
        done = fedpews(*arguments)
        assert done.code == 2
        assert "did you mean 'synthetic-32k'?" in done.stderr


@pytest.mark.parametrize("name", ["synthetic-32k", "table1"])
def test_show_prints_a_file_that_can_be_read_again(name: str) -> None:
    shown = fedpews("show", name).stdout
    assert shown.startswith("#")
    assert tomllib.loads(shown)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fedpews ru", "run"),
        ("fedpews run synthetic-32", "synthetic-32k"),
        ("fedpews run mi", "mine.toml"),
        ("fedpews run mine.toml --method scaffold+pews-f", "scaffold+pews-fixed"),
        ("fedpews run mine.toml --set train.l", "train.lr="),
        ("fedpews reproduce four", "four-clients"),
        ("fedpews list ke", "keys"),
    ],
)
def test_the_shell_completes(line: str, offered: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    assert offered in completed(line, tmp_path)
