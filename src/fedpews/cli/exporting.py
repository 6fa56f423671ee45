"""`fedpews export`: a run's model as files that other systems load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedpews.cli.options import DataDir, say
from fedpews.errors import ConfigError


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder; with --weights an experiment's TOML.")
    ],
    format: Annotated[
        str, typer.Option(help="onnx, torch-export, hf or safetensors.", metavar="FORMAT")
    ] = "safetensors",
    folder: Annotated[
        Path | None, typer.Option("--out", help="A new folder.", show_default="RUN/export-FORMAT")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="By default the run's first.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best model instead of the last.")] = False,
    client: Annotated[
        str | None, typer.Option(help="A client's own model after fine-tuning: its name or number.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="At a site: the .safetensors file that it got or made.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="With --weights: the site's data, folder:PATH or FILE.py:function.")
    ] = None,
    data_dir: DataDir = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Import the code and open the files that the folder names.")
    ] = False,
) -> None:
    """Export a model with a model card, after checking its outputs."""
    from fedpews.exporting import choose_from_run, choose_weights
    from fedpews.exporting import export as write

    if weights is None and data is not None:
        raise ConfigError("--data belongs to --weights; a run's folder says which data it had")
    if weights is not None:
        chosen, beside = choose_weights(run, weights, data, data_dir), weights.parent
    else:
        chosen, beside = choose_from_run(run, seed, best, client, data_dir, trust), run
    path = folder or beside / f"export-{format}"
    difference = write(chosen, format, path)
    say(
        f"{chosen.about}: on {chosen.compared_on} its outputs differ by at most {difference:.1g} of the largest"
    )
    say(f"written to {path}")
