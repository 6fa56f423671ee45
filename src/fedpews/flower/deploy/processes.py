"""Flower's programs as child processes that never outlive us, however we end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from fedpews.errors import ConfigError, Interrupted
from fedpews.flower.deploy import template

LOOPBACK = "127.0.0.1"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
SUBREAPER, DEATH_SIGNAL = 36, 1  # prctl(2): orphans become our children; a child gets a signal when we die
GRACE_SECONDS, POLL_SECONDS = 5.0, 0.5


def program(name: str) -> str:
    """The path of one of Flower's commands, which are installed beside the Python that runs us."""
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise ConfigError(f"{name} is not installed: pip install 'fedpews[flower]'")
    return path


def environment(home: Path) -> dict[str, str]:
    """The environment of a Flower program with its own Flower home. Flower looks for its programs in PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(home)}


def key_values(settings: Mapping[str, Any]) -> str:
    """Settings in the form of Flower's command line; None is left out.

    >>> key_values({"site": 0, "data": "folder:/srv", "epsilon": None})
    'site=0 data="folder:/srv"'
    """
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None)


def free_port() -> int:
    """A port that no process uses now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def systemd_unit(what: str, writable: Sequence[Path], *more: str) -> str:
    """A systemd unit that gives this command again; its user may only write to the given folders.

    Args:
        more: arguments to add to those of this command.
    """
    arguments = [argument for argument in sys.argv[1:] if argument != "--unit"]
    command = shlex.join([str(Path(sys.executable).with_name("fedpews")), *arguments, *more])
    folders = " ".join(map(str, writable))
    # systemd reads % as the start of a specifier
    command, folder = (text.replace("%", "%%") for text in (command, str(Path.cwd())))
    return template("systemd.service", what=what, command=command, folder=folder, writable=folders)


class Processes:
    """Starts programs by name and ends them all, with everything they started.

    Args:
        folder: for Flower's home and the programs' logs.
    """

    def __init__(self, folder: Path) -> None:
        if os.name != "posix":
            raise ConfigError("sites can be started as processes of this machine on Linux and macOS only")
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        _prctl(SUBREAPER)

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def start(self, name: str, command: Sequence[str]) -> None:
        home = self.folder / "home"
        for path in (home, self.log(name).parent):
            path.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as file:
            self._running[name] = subprocess.Popen(
                list(command),
                env=environment(home),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us; we end them in order
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def ended(self, name: str) -> int | None:
        """The exit code, or None while the program runs."""
        return self._running[name].poll()

    def run(self, start: Callable[[], None], tend: Callable[[], bool | None]) -> None:
        """Start programs and look after them until ``tend`` returns False or raises, Ctrl-C or SIGTERM.

        No process is left running.
        """

        def stop(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, stop)
        try:
            start()
            while tend() is not False:
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            raise Interrupted("stopped") from None
        finally:
            self.stop_all()
            signal.signal(signal.SIGTERM, before)

    def stop_all(self) -> None:
        """End all programs in reverse order, with everything they started."""
        children = psutil.Process().children(recursive=True)
        for process in reversed(self._running.values()):
            process.terminate()
        _, alive = psutil.wait_procs(children, timeout=GRACE_SECONDS)
        # also what was started meanwhile
        alive = [*alive, *psutil.Process().children(recursive=True)]
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(alive, timeout=GRACE_SECONDS)
        for process in self._running.values():
            process.wait()
        self._running = {}


def leave_with_parent() -> None:
    """End this process at once when its parent is gone. A run's folder survives any kill."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def die_with_parent() -> None:
    """Get SIGTERM when the parent of this process is gone (on Linux)."""
    _prctl(DEATH_SIGNAL, signal.SIGTERM)


def _prctl(option: int, value: int = 1) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)
