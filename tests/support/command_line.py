"""The command line, run inside the tests' own process."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from fedpews.cli import main


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


def fedpews(*arguments: str) -> Ended:
    """The command in this process: starting a new one costs seconds of imports each time."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["fedpews", *arguments])
        try:
            main()
        except SystemExit as end:
            code = end.code
    return Ended(int(str(code or 0)), out.getvalue(), err.getvalue())
