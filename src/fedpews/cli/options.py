"""Options that several commands have, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedpews.cli import complete
from fedpews.errors import ConfigError

Config = Annotated[
    str,
    typer.Argument(
        help="A recipe's name (fedpews list recipes) or a TOML file. A file may name code, which runs: read it first.",
        autocompletion=complete.configs,
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="Method, such as fedavg, fedprox+pews, scaffold+pews-fixed. Several: one run each, compared.",
        autocompletion=complete.method_names,
    ),
]
Rounds = Annotated[int | None, typer.Option(help="Communication rounds T.")]
Seeds = Annotated[str | None, typer.Option(help="Comma-separated, for instance 0,1,2.")]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder.", show_default="runs/CONFIG-METHOD")]
DataDir = Annotated[Path | None, typer.Option(help="Where data sets lie or are put.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key: --set train.lr=0.1. An option of one method among several: --set fedprox.mu=0.1.",
        autocompletion=complete.key_names,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where a run in the folder stopped.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Only errors and the result.")]

On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ADDRESS",
        help="Run cells on the workers of a Dask scheduler, such as tcp://10.0.0.5:8786; local:2 starts two here.",
    ),
]

Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="TRACKER",
        help="Also send every round to tensorboard, wandb, mlflow or trackio; several: one option each.",
    ),
]


def parse_seeds(text: str) -> list[int]:
    """The seeds of ``--seeds 0,1,2``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds {text!r}: give whole numbers such as 0,1,2") from error
