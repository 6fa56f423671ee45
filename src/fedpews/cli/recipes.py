"""Configurations to start from: `fedpews new` and `show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedpews.cli.complete import recipe_names, recipes_and_studies
from fedpews.cli.console import out
from fedpews.errors import ConfigError, nearest

RecipeName = Annotated[
    str | None,
    typer.Option(
        help="The recipe to start from (fedpews list recipes).",
        metavar="NAME",
        autocompletion=recipe_names,
        show_default="synthetic-32k; for images of your own path-oct-tissue",
    ),
]
OwnData = Annotated[
    str | None, typer.Option(help="Your own data: folder:PATH or module:function.", metavar="NAME")
]
Shown = Annotated[
    str, typer.Argument(help="A recipe or a study, by its name.", autocompletion=recipes_and_studies)
]


def new(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = Path("my.toml"),
    recipe: RecipeName = None,
    data: OwnData = None,
) -> None:
    """Write a configuration of your own: a recipe's values, every other key beside them as a comment.

    With --data the file fits your own data: their clients and classes, a task, a model, one size for all images.
    """
    from fedpews.config import recipes
    from fedpews.experiment import commented_toml

    tables: dict[str, dict[str, Any]] = {}
    about = ""
    if data is not None:
        tables, about = _fit(data)
        recipe = recipe or ("path-oct-tissue" if tables["model"]["name"] == "cnn" else None)
    recipe = recipe or "synthetic-32k"
    if recipe not in (known := recipes()):
        raise ConfigError(f"there is no recipe {recipe!r}; {nearest(recipe, known)}")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent} is not a folder")
    try:
        with file.open("x") as new_file:
            new_file.write(commented_toml(recipe, str(file), tables))
    except FileExistsError:
        raise ConfigError(f"{file} exists already; give another name, or remove it first") from None
    out.print(escape(f"{about}written to {file}; run it with: fedpews run {file}"), soft_wrap=True)


def _fit(name: str) -> tuple[dict[str, dict[str, Any]], str]:
    """The tables that fit the user's own data, and the data in a line."""
    from fedpews.data.fitting import fit

    if ":" not in name:
        raise ConfigError("--data is for your own data, folder:PATH or module:function; see also --recipe")
    data, tables = fit(name)
    return tables, f"{name}: {len(data)} clients ({', '.join(data.names)}), {data.outputs}\n"


def show(name: Shown) -> None:
    """Print a recipe, or a study of the paper, as it is."""
    from fedpews.config import STUDIES, recipes, shipped

    files = shipped(STUDIES) | recipes()
    if name not in files:
        raise ConfigError(f"there is no recipe or study {name!r}; {nearest(name, files)}")
    out.print(escape(files[name].read_text().rstrip()), soft_wrap=True)


RECIPES = (new, show)
"""The commands of this file."""
