"""A real Dask scheduler with workers, for the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Dask:
    """A scheduler and workers, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
        self.address = str(json.loads(when(lambda: file.read_text() if file.exists() else ""))["address"])

    def add_worker(self) -> None:
        place = str(self._folder)
        self._start("worker", self.address, "--no-nanny", "--nthreads", "1", "--local-directory", place)

    def _start(self, kind: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *arguments, "--no-dashboard"]
        quiet = subprocess.DEVNULL
        self._processes.append(subprocess.Popen(command, stdout=quiet, stderr=quiet))

    def kill_the_worker_at_work(self) -> str:
        """End the worker that runs a task, as when its machine fails; its address."""
        import distributed

        with distributed.Client(self.address, set_as_default=False) as client:
            pids = client.run(os.getpid)
            address = next(worker for worker, tasks in client.processing().items() if tasks)
            os.kill(pids[address], signal.SIGKILL)
            return str(address)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()


def when(look: Any, seconds: float = 300.0) -> Any:
    """What ``look`` finds, as soon as it finds something."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise TimeoutError("it did not happen")
