"""`fedpews flower`: an experiment as a Flower app, and a deployment on this machine to try it on."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from fedpews.cli.console import err, out
from fedpews.cli.options import Config, DataDir, Methods, Out, Quiet, Resume, Rounds, Seeds, Set
from fedpews.errors import ConfigError

flower = typer.Typer(
    name="flower",
    help="The same experiments across real sites, with Flower as the network.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@flower.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the app.")],
    config: Annotated[
        str | None, typer.Option(help="A recipe or TOML file to start from; by default data at the sites.")
    ] = None,
    set_: Set = None,
) -> None:
    """Write a Flower app: the experiment, two lines for each half, and a README with every command."""
    from fedpews.configs import override, parse_setting, read_config
    from fedpews.experiment import Experiment
    from fedpews.flower.deploy.template import new_app, starter

    changes = dict(parse_setting(text) for text in set_ or [])
    if config is None and not changes:
        text = starter()
    else:
        values = tomllib.loads(starter()) if config is None else read_config(config)
        text = Experiment(**override(values, changes)).to_toml()
    for path in new_app(folder, text):
        out.print(str(path))


@flower.command()
def up(
    config: Config,
    sites: Annotated[
        int | None, typer.Option(help="How many sites; one for each client of the data.")
    ] = None,
    site_data: Annotated[
        list[str] | None,
        typer.Option(
            help="With data.name = 'sites': a site's own data, folder:PATH or FILE.py:function; once each."
        ),
    ] = None,
    test: Annotated[Path | None, typer.Option(help="With it: the server's test set, an .npz file.")] = None,
    method: Methods = None,
    rounds: Rounds = None,
    seeds: Seeds = None,
    folder: Out = None,
    data_dir: DataDir = None,
    set_: Set = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment on a SuperLink and SuperNodes on this machine, with TLS and authentication.

    The run's folder is that of `fedpews run`, and sites.jsonl says who answered in each round.
    """
    from fedpews.cli.pages import write_joint_page
    from fedpews.cli.runs import resolve_runs, show_runs
    from fedpews.flower.deploy.loopback import up as run_up
    from fedpews.report.progress import ProgressBar

    _check_installed()
    runs = resolve_runs(config, method, rounds, seeds, folder, set_)
    for experiment, place in runs:

        def say(text: str) -> None:
            if not quiet:
                err.print(text, soft_wrap=True, markup=False)

        with ProgressBar(experiment.method_label, err, quiet) as bar:
            total = experiment.rounds
            run_up(
                experiment,
                place,
                sites=sites,
                site_data=site_data or (),
                test=test,
                resume=resume,
                data_dir=data_dir,
                begin=lambda done, bar=bar, total=total: bar.begin(total, done),  # type: ignore[misc]
                round=bar.round,
                say=say,
            )
    places = [place for _, place in runs]
    show_runs(places)
    write_joint_page(places, folder, runs[0][0].method_label)


def _check_installed() -> None:
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise ConfigError("Flower is not installed: pip install 'fedpews[flower]'")
