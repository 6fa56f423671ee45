"""A real Dask scheduler with workers, for the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from waiting import when


class Dask:
    """A scheduler and workers, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))

        def address() -> str:
            # not there yet, or not written to its end
            with suppress(FileNotFoundError, ValueError):
                return str(json.loads(file.read_text())["address"])
            return ""

        self.address = when(address)

    def add_worker(self) -> None:
        place = str(self._folder)
        self._start("worker", self.address, "--no-nanny", "--nthreads", "1", "--local-directory", place)

    def _start(self, kind: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *arguments, "--no-dashboard"]
        quiet = subprocess.DEVNULL
        self._processes.append(subprocess.Popen(command, stdout=quiet, stderr=quiet))

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
