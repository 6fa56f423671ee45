"""The command line: parse, call, print. One file for each group of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from fedpews.cli.console import explained, out
from fedpews.cli.data import data, stats
from fedpews.cli.flower import flower, run_site
from fedpews.cli.lists import list_, new, show
from fedpews.cli.runs import compare, export, plot, report, run, watch
from fedpews.cli.studies import reproduce, sweep
from fedpews.errors import ConfigError
from fedpews.ranks.rank import Rank

__all__ = ["app", "main"]

app = typer.Typer(
    name="fedpews",
    help="Federated learning for clients whose data have almost nothing in common.\n\n"
    "Train an example:\n\n"
    "  fedpews run synthetic-four --seeds 0\n\n"
    "Write a configuration and compare two methods:\n\n"
    "  fedpews new my.toml\n\n"
    "  fedpews run my.toml --method fedavg --method fedavg+pews",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {"run": run, "new": new, "sweep": sweep, "export": export},
    "Inspect runs": {"compare": compare, "report": report, "watch": watch, "plot": plot},
    "Look up": {"list": list_, "show": show},
    "Reproduce the paper": {"reproduce": reproduce},
    "Real sites": {"site": run_site},
    "Data": {"stats": stats},
}
for group, commands in GROUPS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=group)(command)
app.add_typer(flower, rich_help_panel="Real sites")
app.add_typer(data, rich_help_panel="Data")


def _version(is_given: bool) -> None:
    if is_given:
        import fedpews

        out.print(f"fedpews {fedpews.__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    context.obj = debug
    rank = Rank.here()
    if rank is not None and rank.is_shared and context.invoked_subcommand != "run":
        raise ConfigError(
            f"torchrun started {rank.world} processes, but only `fedpews run` can divide its work among them; run "
            f"`fedpews {context.invoked_subcommand}` without torchrun"
        )


def main() -> None:
    """The console command."""
    with explained("--debug" in sys.argv[1:]):
        app(prog_name="fedpews")
