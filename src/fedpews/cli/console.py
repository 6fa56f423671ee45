"""Where commands print, and how an error that the user can fix becomes one line and a documented exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedpews.errors import ConfigError, FedpewsError, Interrupted, RankLost, first_line
from fedpews.ranks.rank import Rank

out = Console(highlight=False, emoji=False)
"""For results."""
err = Console(stderr=True, highlight=False, emoji=False)
"""For everything else."""

SHORT = 12
"""Characters of a text that stay on one line, however narrow the window."""

NO_MEMORY = ("not enough memory", "can't allocate memory")
"""Words of torch, in a RuntimeError."""


@contextmanager
def explained(debug: bool) -> Iterator[None]:
    """Turn an expected failure into a line on standard error and its exit code.

    An unexpected error stays a traceback: it is a bug, to be reported.
    """
    # a name on disk need not be text; such a byte is shown as \udc80 instead of ending the command
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except Exception as error:
        known = as_known(error)
        if debug or known is None:
            raise
        rank = Rank.here()
        # the ranks of a machine have the same error: one of them prints it
        if rank is None or rank.local_rank == 0:
            prefix = "" if rank is None or rank.rank == 0 else f"rank {rank.rank}: "
            mark = "" if isinstance(known, Interrupted) else "[bold red]error:[/] "
            # a name may hold what moves a terminal's cursor
            shown = re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", "?", str(known))
            err.print(f"{mark}{prefix}{escape(shown)}", soft_wrap=True)
        if isinstance(known, RankLost):
            # threads that still wait for an answer would keep the process
            sys.stdout.flush()
            os._exit(known.exit_code)
        sys.exit(known.exit_code)


def as_known(error: Exception) -> FedpewsError | None:
    """The error as one with an exit code; None for a bug.

    >>> str(as_known(PermissionError(13, "Permission denied", "runs/a/.lock")))
    'runs/a/.lock: Permission denied'
    """
    if isinstance(error, FedpewsError):
        return error
    if isinstance(error, OSError):
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return FedpewsError(f"{' and '.join(names)}: {error.strerror}" if names else first_line(error))
    if isinstance(error, RecursionError):
        return ConfigError("the configuration or the data are nested too deeply")
    if isinstance(error, RuntimeError) and "Symlink loop" in str(error):
        return FedpewsError(str(error))
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        return FedpewsError(f"there is not enough memory: {first_line(error)}")
    return None


def print_table(
    rows: Sequence[Sequence[str]],
    title: str = "",
    numbers: Container[str] = ("MB", "samples", "classes", "bytes sent"),
) -> None:
    """Print rows, of which the first has the names of the columns; those of numbers are on the right.

    In a narrow window text is folded, and numbers run on: a number that is cut is another number.
    """
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    needed = 0
    for head, *cells in zip(*rows, strict=True):
        is_number, width = head in numbers, max(map(len, [head, *cells]))
        width = width if is_number else min(SHORT, width)
        overflow: Literal["crop", "fold"] = "crop" if is_number else "fold"
        justify: Literal["right", "left"] = "right" if is_number else "left"
        table.add_column(escape(head), no_wrap=is_number, overflow=overflow, justify=justify, min_width=width)
        needed += width + 3
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    Console(highlight=False, emoji=False, width=max(out.width, needed)).print(table)
