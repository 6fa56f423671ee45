"""The compiler as a process that nobody's Ctrl-C reaches, and the folders it works in."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ABANDONED = 24 * 3600.0
"""Seconds after which a folder of another machine, whose processes cannot be asked, is taken for left over."""


def run_apart(
    command: Sequence[str], text: str | None = None, folder: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own; its output and errors come together.

    Ctrl-C goes to every process of a terminal's foreground group. A compiler that dies of it would look like one that
    cannot compile, and the round would be trained on another engine than those before it.
    """
    with subprocess.Popen(
        [*command],
        stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=folder,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(text)
        except BaseException:
            # whoever stops at once leaves no compiler behind, nor what it started
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output)


@contextmanager
def scratch_folder(cache: Path) -> Iterator[Path]:
    """A folder to build in, gone afterwards; those that killed processes left behind go first."""
    remove_abandoned(cache)
    name = f"building-{_host()}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=cache, prefix=name) as scratch:
        yield Path(scratch)


def remove_abandoned(cache: Path) -> None:
    """Delete the folders of builds whose process is gone."""
    for path in cache.glob("building-*"):
        match = re.fullmatch(r"building-(\w+)-(\d+)-\w+", path.name)
        # anything else with this name is of an earlier version, whose process nobody knows
        host, number = (match[1], int(match[2])) if match else ("", 0)
        with suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > ABANDONED
            if is_old or (host == _host() and not _is_running(number)):
                shutil.rmtree(path, ignore_errors=True)


def _host() -> str:
    return re.sub(r"\W", "_", socket.gethostname())


def _is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
