"""What there is to choose from: `fedpews list`, `show` and `new`. Heavy modules are imported when used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedpews.cli.console import out
from fedpews.cli.options import lists, recipe_names, recipes_and_studies, say
from fedpews.errors import ConfigError, nearest


def new(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The new file.")] = Path("my.toml"),
    recipe: Annotated[
        str | None,
        typer.Option(
            help="The recipe to start from (fedpews list recipes).",
            metavar="NAME",
            autocompletion=recipe_names,
            show_default="synthetic-32k; path-oct-tissue for your own images",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Your own data: folder:PATH or module:function.", metavar="NAME")
    ] = None,
) -> None:
    """Write a configuration file with the values of a recipe and all other keys as comments.

    With --data the file is adapted to your data: clients, classes, task, model, image size.
    """
    from fedpews.config import recipes
    from fedpews.experiment import commented_toml

    tables: dict[str, dict[str, Any]] = {}
    about = ""
    if data is not None:
        from fedpews.data.loading import fit

        if ":" not in data:
            raise ConfigError(
                "--data needs your own data, folder:PATH or module:function; for a named data set use --recipe"
            )
        clients, tables = fit(data)
        about = f"{data}: {len(clients)} clients ({', '.join(clients.names)}), {clients.outputs}\n"
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
        raise ConfigError(f"{file} already exists; choose another name or remove it first") from None
    say(f"{about}written to {file}; run it with: fedpews run {file}")


def show(
    name: Annotated[
        str, typer.Argument(help="Name of a recipe or a study.", autocompletion=recipes_and_studies)
    ],
) -> None:
    """Print the TOML of a recipe or a study."""
    from fedpews.config import STUDIES, recipes, shipped

    files = shipped(STUDIES) | recipes()
    if name not in files:
        raise ConfigError(f"there is no recipe or study {name!r}; {nearest(name, files)}")
    say(files[name].read_text().rstrip())


def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="What to list: methods, data, models, tasks, recipes, studies or keys.", autocompletion=lists
        ),
    ],
) -> None:
    """List methods, data sets and partitions, models, tasks, recipes, studies or keys."""
    kinds = {
        "methods": _methods,
        "data": _data,
        "models": _models,
        "tasks": _tasks,
        "recipes": _recipes,
        "studies": _studies,
        "keys": _keys,
    }
    if what not in kinds:
        raise ConfigError(f"there is no list of {what!r}; {nearest(what, kinds)}")
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(no_wrap=True)
    for cells in kinds[what]():
        grid.add_row(*map(escape, cells))
    out.print(grid)


def _methods() -> Iterator[tuple[str, str]]:
    from fedpews.compose import METHODS, PERSONAL, SERVERS, WARMUPS, describe

    yield from ((name, describe(name)) for name in METHODS)
    for names in (SERVERS, WARMUPS, PERSONAL):
        yield "", ""
        yield from ((f"+ {name}", describe(name)) for name in names)


def _data() -> Iterator[tuple[str, str]]:
    import inspect

    from fedpews.data import PARTITIONS, SOURCES

    yield from ((name, source.description) for name, source in SOURCES.items())
    yield "A+B+...", "a combination of image sets; the labels of each set follow those of the set before"
    yield "folder:PATH", "your own data: a folder, .npz file or table per client, and a test set"
    yield "hf:PATH", "a Hugging Face dataset on disk or in the cache"
    yield "module:function", "your own data: a function that returns the clients and the test set"
    yield "", ""
    yield from (
        (f"partition {name}", (inspect.getdoc(scheme) or "").splitlines()[0])
        for name, scheme in PARTITIONS.items()
    )
    yield "partition flwr:NAME", "A partitioner of flwr-datasets."


def _models() -> Iterator[tuple[str, str]]:
    from fedpews.models import describe_models

    yield from describe_models()
    yield "timm:NAME", "models of timm; also torchvision:NAME and transformers:NAME"
    yield "module:Class", "your own torch.nn.Module"


def _tasks() -> Iterator[tuple[str, ...]]:
    from fedpews.tasks.task import describe_tasks

    yield from describe_tasks()
    yield "", "your own task: module:Task or path/to/file.py:Task (docs/tasks.md)"


def _recipes() -> Iterator[tuple[str, str]]:
    from fedpews.config import recipes

    for name, file in recipes().items():
        yield name, file.read_text().splitlines()[1].removeprefix("#").strip()
    yield "", ""
    yield "", "tables and figures of the paper: fedpews list studies"


def _studies() -> Iterator[tuple[str, str]]:
    from fedpews.paper.study import load_study, studies

    for name, file in studies().items():
        study = load_study(name)
        # the third line of every study's file
        time = file.read_text().splitlines()[2].removeprefix("# Expected time: ").rstrip(".")
        yield name, f"{study.item}: {study.title} ({time})"


def _keys() -> Iterator[tuple[str, ...]]:
    from fedpews.experiment import config_keys, option_keys

    yield "key", "type", "default", ""
    for key in (*config_keys(), *option_keys()):
        yield key.name, key.type, key.default, key.text
