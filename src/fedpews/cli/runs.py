"""The commands about runs: run, compare, report, watch, plot and export. Heavy modules are imported when used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedpews.cli.console import err, out, print_table
from fedpews.cli.options import (
    Config,
    DataDir,
    Log,
    Methods,
    Out,
    Quiet,
    Resume,
    Rounds,
    Seeds,
    Set,
    parse_seeds,
    parse_settings,
    say,
)
from fedpews.errors import ConfigError
from fedpews.ranks.rank import Rank
from fedpews.report.figures import FORMATS, KINDS, draw
from fedpews.report.runs import find_runs
from fedpews.results.layout import REPORT, legal_name

if TYPE_CHECKING:
    from fedpews.callbacks import Callback
    from fedpews.experiment import Experiment

_kinds = list(KINDS)

RUN_FOLDERS = "Run folders, or folders of run folders."

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help=RUN_FOLDERS)]


def run(
    config: Config,
    method: Methods = None,
    rounds: Rounds = None,
    seeds: Seeds = None,
    folder: Out = None,
    data_dir: DataDir = None,
    set_: Set = None,
    resume: Resume = False,
    quiet: Quiet = False,
    log: Log = None,
) -> None:
    """Train one or several methods and compare them.

    Each run writes its records, models and checkpoints to a folder. The last line
    printed is the path of an HTML report on all runs; `fedpews watch` shows it
    during the run. --resume continues a killed run and gives the same numbers.

    To use several machines or GPUs: `torchrun ... -m fedpews run CONFIG`
    (docs/how-to/ranks.md).
    """
    from fedpews.running import run as run_alone
    from fedpews.trackers import tracking

    runs = resolve_runs(config, method, rounds, seeds, folder, set_)
    rank = Rank.here()
    if rank is not None and rank.rank > 0:
        from fedpews.ranks.running import work

        raise typer.Exit(work(rank, [experiment for experiment, _ in runs], data_dir))
    # torchrun starts the same command again when a rank has died
    resume = resume or (rank is not None and rank.restarts > 0)
    with ExitStack() as stack:
        run_experiment: Any = run_alone
        if rank is not None and rank.is_shared:
            from fedpews.ranks.running import lead, leading

            run_experiment = partial(lead, stack.enter_context(leading(rank, runs[0][0].runtime.device)))
        for experiment, path in runs:
            with progress(experiment, quiet) as bar, tracking(log or [], path) as trackers:
                run_experiment(
                    experiment, out=path, resume=resume, data_dir=data_dir, callbacks=[bar, trackers]
                )
    show_runs(runs, folder)


@contextmanager
def progress(experiment: Experiment, quiet: bool, names_engine: bool = True) -> Iterator[Callback]:
    """A callback that shows a progress bar; before it a line with the engine, unless that is not wanted."""
    from fedpews.callbacks import Callback
    from fedpews.report.progress import ProgressBar

    with ProgressBar(experiment.method_label, err, quiet) as bar:

        def begin(_: Any, done: int, engine: str) -> None:
            bar.begin(experiment.rounds, done)
            if names_engine and not quiet:
                again = f", from round {done + 1}" if done else ""
                err.print(escape(f"{experiment.method_label}: {engine}{again}"), soft_wrap=True)

        def stopping() -> None:
            if names_engine:
                err.print("finishing this round, then saving; Ctrl-C again stops at once", soft_wrap=True)

        yield Callback(begin=begin, round=bar.round, stopping=stopping)


def resolve_runs(
    config: str,
    method: list[str] | None,
    rounds: int | None,
    seeds: str | None,
    folder: Path | None,
    set_: list[str] | None,
) -> list[tuple[Experiment, Path]]:
    """The experiments of a command line, each with its folder; the options of all methods are checked."""
    from fedpews.build import build_method
    from fedpews.config import config_name, settings_by_method
    from fedpews.experiment import Experiment

    changes: dict[str, Any] = {} if rounds is None else {"rounds": rounds}
    changes |= {} if seeds is None else {"seeds": parse_seeds(seeds)}
    settings = parse_settings(set_)
    named = [{"method.name": name} for name in method or []] or [{}]
    names = method or [str(settings.get("method.name") or Experiment.load(config).method.name)]
    by_method = zip(named, settings_by_method(settings, names), strict=True)
    experiments = [Experiment.load(config, changes | name | own) for name, own in by_method]
    labels = [legal_name(experiment.method_label) for experiment in experiments]
    if len(set(labels)) < len(labels):
        raise ConfigError("the same method is given twice")
    # a wrong option is refused before the first method is trained
    for experiment in experiments:
        try:
            build_method(experiment)
        except ConfigError as error:
            if len(experiments) == 1:
                raise
            shared = [key for key in settings if key.startswith("method.")]
            hint = "; to set an option of one method, use its name: --set fedprox.mu=0.1" if shared else ""
            raise ConfigError(f"--method {experiment.method_label}: {error}{hint}") from error
    if folder is None:
        paths = [Path("runs") / legal_name(f"{config_name(config)}-{e.method_label}") for e in experiments]
    else:
        paths = [folder / label for label in labels] if len(labels) > 1 else [folder]
    return list(zip(experiments, paths, strict=True))


def show_runs(runs: list[tuple[Experiment, Path]], folder: Path | None) -> None:
    """Print how runs did and where they are, and write one page about all of them.

    Args:
        folder: the --out of the command.
    """
    from fedpews.report.html import write_report

    (experiment, first), paths = runs[0], [path for _, path in runs]
    compare(paths)
    say(f"results in {', '.join(map(str, paths))}")
    if len(paths) > 1 and folder is None:
        # of runs/synthetic-32k-fedavg and runs/synthetic-32k-fedavg+pews: runs/synthetic-32k.html
        page = first.with_name(f"{first.name.removesuffix(f'-{experiment.method_label}')}.html")
    else:
        page = (folder or first) / REPORT
    say(f"look at {write_report(paths, page)}")


def compare(
    folders: Annotated[list[Path], typer.Argument(help=RUN_FOLDERS)],
    plot: Annotated[
        Path | None, typer.Option(help="Also plot the metric over rounds to this file (png, pdf, svg).")
    ] = None,
) -> None:
    """Compare each run with the first one, seed by seed."""
    from fedpews.report.compare import columns, goal_text, remarks, table, verdicts

    runs = find_runs(folders)
    goal = runs[0].goal
    reach = "" if goal.value is None else f"rounds to reach {goal_text(goal)}; "
    heads = columns(runs)
    for sentence in remarks(runs):
        say(sentence)
    print_table([heads, *table(runs)], f"{reach}mean ± standard deviation over seeds", heads[1:])
    for sentence in verdicts(runs):
        say(sentence)
    if plot is not None:
        draw(runs, "curves", plot)
        say(f"drawn to {plot}")


def report(
    folders: Folders,
    file: Annotated[
        Path | None, typer.Option("--out", help="Output file (by default report.html in the first folder).")
    ] = None,
) -> None:
    """Write an HTML report with differences, curves, clients, masks and settings."""
    from fedpews.report.html import write_report

    say(f"written to {write_report(folders, file or folders[0] / REPORT)}")


def watch(
    folders: Folders,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 chooses a free port.")
    ] = 8500,
) -> None:
    """Serve the report on 127.0.0.1 and update it during a run."""
    from fedpews.report.html import HOST, serve

    try:
        server = serve(folders, port)
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be used ({error.strerror}); choose another with --port, or use --port 0"
        ) from error
    with server:
        out.print(f"look at http://{HOST}:{server.server_port}/ (Ctrl-C ends)", soft_wrap=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            err.print("ended")


def plot(
    folders: Folders,
    kind: Annotated[
        str, typer.Option(help=f"{', '.join(_kinds[:-1])} or {_kinds[-1]}.", metavar="KIND")
    ] = "curves",
    format: Annotated[str, typer.Option(help="pdf, svg or png.", metavar="FORMAT")] = "pdf",
    file: Annotated[
        Path | None, typer.Option("--out", help="Output file (by default KIND.FORMAT in the first folder).")
    ] = None,
) -> None:
    """Draw a figure for a paper: curves, bytes, masks or clients."""
    if format not in FORMATS:
        raise ConfigError(f"there is no format {format!r}; choose from {', '.join(FORMATS)}")
    path = file or folders[0] / f"{kind}.{format}"
    draw(find_runs(folders), kind, path, None if file is not None and file.suffix else format)
    say(f"drawn to {path}")


def export(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run folder, or with --weights the experiment's TOML file."),
    ],
    format: Annotated[
        str, typer.Option(help="onnx, torch-export, hf or safetensors.", metavar="FORMAT")
    ] = "safetensors",
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Output folder, which must not exist.", show_default="RUN/export-FORMAT"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the model (by default the first).")] = None,
    best: Annotated[bool, typer.Option("--best", help="Export the best model instead of the last.")] = False,
    client: Annotated[
        str | None, typer.Option(help="Export the fine-tuned model of this client (name or number).")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="At a site: a .safetensors file that the site received or trained.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="With --weights: the site's data, folder:PATH or FILE.py:function.")
    ] = None,
    data_dir: DataDir = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Allow the run folder to run code and open files that it names.")
    ] = False,
) -> None:
    """Export a model with a model card, and check the outputs of the exported file."""
    from fedpews.exporting import choose_from_run, choose_weights
    from fedpews.exporting import export as write

    if weights is None and data is not None:
        raise ConfigError("--data needs --weights; a run folder already names its data")
    if weights is not None:
        chosen, beside = choose_weights(run, weights, data, data_dir), weights.parent
    else:
        chosen, beside = choose_from_run(run, seed, best, client, data_dir, trust), run
    path = folder or beside / f"export-{format}"
    difference = write(chosen, format, path)
    say(
        f"{chosen.about}: on {chosen.compared_on} its outputs differ by at most {difference:.1g} of the largest output"
    )
    say(f"written to {path}")
