"""Looking at runs: `fedpews report`, `watch` and `plot`. Everything heavy is imported when used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedpews.cli.console import err, out
from fedpews.errors import ConfigError

Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders of run folders.")
]


def report(
    folders: Folders,
    file: Annotated[
        Path | None, typer.Option("--out", help="The page (by default report.html in the first folder).")
    ] = None,
) -> None:
    """One HTML page about one run or several: who is better, curves, clients, masks, data, settings."""
    from fedpews.report.html import write_report
    from fedpews.results.layout import REPORT

    path = write_report(folders, file or folders[0] / REPORT)
    out.print(escape(f"written to {path}"), soft_wrap=True)


def watch(
    folders: Folders,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes any that is free.")
    ] = 8500,
) -> None:
    """The same page while runs go on, at an address on this machine; new rounds appear by themselves."""
    from fedpews.report.live import HOST, serve

    try:
        server = serve(folders, port)
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be used ({error.strerror}); give another with --port, or --port 0"
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
        str, typer.Option(help="curves, bytes, masks, clients or heatmap.", metavar="KIND")
    ] = "curves",
    format: Annotated[str, typer.Option(help="pdf, svg or png.", metavar="FORMAT")] = "pdf",
    file: Annotated[
        Path | None, typer.Option("--out", help="The figure (by default KIND.FORMAT in the first folder).")
    ] = None,
) -> None:
    """A figure for a paper, in one style: text stays text, masks are drawn without interpolation."""
    from fedpews.report.figures import FORMATS, draw
    from fedpews.report.runs import find_runs

    if format not in FORMATS:
        raise ConfigError(f"there is no format {format!r}; choose from {', '.join(FORMATS)}")
    path = file or folders[0] / f"{kind}.{format}"
    draw(find_runs(folders), kind, path, None if file is not None and file.suffix else format)
    out.print(escape(f"drawn to {path}"), soft_wrap=True)


def write_joint_page(folders: list[Path], given: Path | None, label: str) -> None:
    """The page of all runs of a command, beside them; its path is the last thing printed.

    Args:
        given: the folder the command was told to write to, if it was.
        label: of the first run's method.
    """
    from fedpews.report.html import write_report
    from fedpews.results.layout import REPORT

    first = folders[0]
    if len(folders) == 1:
        path = first / REPORT
    elif given is not None:
        path = given / REPORT
    else:
        # of runs/synthetic-32k-fedavg and runs/synthetic-32k-fedavg+pews: runs/synthetic-32k.html
        path = first.with_name(f"{first.name.removesuffix(f'-{label}')}.html")
    out.print(escape(f"look at {write_report(folders, path)}"), soft_wrap=True)


PAGES = (report, watch, plot)
"""The commands of this file."""
