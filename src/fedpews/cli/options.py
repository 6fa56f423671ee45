"""Options that several commands have, and what the shell offers on Tab. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedpews.cli.console import out
from fedpews.errors import ConfigError


def _begins(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def offered(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offered


def _recipes() -> list[str]:
    from fedpews.config import recipes

    return list(recipes())


def _studies() -> list[str]:
    from fedpews.config import STUDIES, shipped

    return list(shipped(STUDIES))


def _keys() -> list[str]:
    from fedpews.experiment import known_keys

    return [f"{key}=" for key in known_keys()]


def method_names(incomplete: str) -> list[str]:
    """Methods, and behind a ``+`` the server optimisers and warmups."""
    from fedpews.compose import METHODS, PERSONAL, SERVERS, WARMUPS

    head, plus, last = incomplete.rpartition("+")
    parts = (*SERVERS, *WARMUPS, *PERSONAL) if plus else METHODS
    return [f"{head}{plus}{part}" for part in parts if part.startswith(last)]


recipe_names = _begins(_recipes)
configs = _begins(lambda: [*_recipes(), *map(str, sorted(Path().glob("*.toml")))])
recipes_and_studies = _begins(lambda: [*_recipes(), *_studies()])
study_names = _begins(lambda: ["all", *_studies()])
key_names = _begins(_keys)
lists = _begins(lambda: ("methods", "data", "models", "tasks", "recipes", "studies", "keys"))

Config = Annotated[
    str,
    typer.Argument(
        help="A recipe (fedpews list recipes) or a TOML file. A file can run code that it names, so read it first.",
        autocompletion=configs,
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="A method, such as fedavg or scaffold+pews-fixed. Repeat the option to compare several.",
        autocompletion=method_names,
    ),
]
Rounds = Annotated[int | None, typer.Option(help="Number of communication rounds.")]
Seeds = Annotated[str | None, typer.Option(help="Seeds, separated by commas: 0,1,2.")]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder.", show_default="runs/CONFIG-METHOD")]
DataDir = Annotated[Path | None, typer.Option(help="Folder to search for data sets first.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a configuration key: train.lr=0.1. Repeat for several. For one of several methods: fedprox.mu=0.1.",
        autocompletion=key_names,
    ),
]
Results = Annotated[Path, typer.Option("--out", help="Folder for run folders and pages.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors and the result.")]

On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ADDRESS",
        help="Run cells on the workers of a Dask scheduler: tcp://10.0.0.5:8786. local:2 starts two workers here.",
    ),
]

Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="TRACKER",
        help="Also log to tensorboard, wandb, mlflow or trackio. Repeat the option for several.",
    ),
]


def parse_seeds(text: str | None) -> list[int] | None:
    """The seeds of ``--seeds 0,1,2``; None if the option is not given."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds {text!r}: give whole numbers such as 0,1,2") from error


def parse_settings(texts: list[str] | None) -> dict[str, Any]:
    """The keys and values of every ``--set``."""
    from fedpews.config import parse_setting

    return dict(parse_setting(text) for text in texts or [])


def say(text: str) -> None:
    """Print a line of a result as it is, however long."""
    out.print(escape(text), soft_wrap=True)
