"""How a run across sites failed, or why a site cannot take part, for the process that started it.

Flower's own exit codes say nothing of it, so a file does.
"""

from __future__ import annotations

import json
from pathlib import Path

from fedpews.errors import FedpewsError, RunFailed, first_line
from fedpews.results import layout
from fedpews.results.files import write_atomically
from fedpews.results.schema import SitesErrorShape, read_object


def forget_failure(out: Path) -> None:
    (out / layout.SITES_ERROR).unlink(missing_ok=True)


def keep_failure(out: Path, error: Exception, who: str = "the server") -> None:
    """For whoever started the run, in another process."""
    ours = error if isinstance(error, FedpewsError) else RunFailed(f"{who} failed: {first_line(error)}")
    out.mkdir(parents=True, exist_ok=True)
    told = {"exit_code": ours.exit_code, "message": str(ours)}
    write_atomically(out / layout.SITES_ERROR, json.dumps(told).encode())


def raise_failure(out: Path) -> None:
    """What ended the run, as our own error with its exit code; nothing where it did not fail."""
    if not (out / layout.SITES_ERROR).exists():
        return
    told = read_object(out / layout.SITES_ERROR, SitesErrorShape)
    error = FedpewsError(told["message"])
    error.exit_code = told["exit_code"]
    raise error
