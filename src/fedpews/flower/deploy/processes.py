"""Child processes that never outlive us, whatever way we end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedpews.errors import ConfigError

SUBREAPER, DEATH_SIGNAL = 36, 1  # prctl(2): orphans come to us; a child gets a signal when we die
GRACE_SECONDS = 5.0


class Processes:
    """Starts programs by name and ends them all, with everything they started."""

    def __init__(self) -> None:
        if os.name != "posix":
            raise ConfigError("sites can be started as processes of this machine on Linux and macOS only")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        _prctl(SUBREAPER)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as file:
            self._running[name] = subprocess.Popen(
                list(command),
                env=dict(env),
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

    def stop_all(self) -> None:
        """End what was started, in reverse order, and whatever is left of it."""
        everybody = {
            pid for process in self._running.values() for pid in (process.pid, *descendants(process.pid))
        }
        everybody |= descendants(os.getpid())
        for process in reversed(self._running.values()):
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + GRACE_SECONDS
        while any(map(_alive, everybody)) and time.monotonic() < until:
            self._reap()
            time.sleep(0.05)
        for pid in {*everybody, *descendants(os.getpid())}:
            if _alive(pid):
                _signal(pid, signal.SIGKILL)
        for process in self._running.values():
            process.wait()
        until = time.monotonic() + 1.0
        while any(map(_alive, everybody)) and time.monotonic() < until:
            self._reap()
            time.sleep(0.02)
        self._reap()
        self._running = {}

    def _reap(self) -> None:
        """Collect the exit codes of our children, and of orphans that were handed to us."""
        known = {process.pid for process in self._running.values()}
        for process in self._running.values():
            process.poll()
        for pid in descendants(os.getpid()) - known:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def leave_with_parent() -> None:
    """End this process at once when the one that started it is gone. A run's folder stands any kill."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def descendants(pid: int) -> set[int]:
    """Every process that a process started, directly or not (on Linux; elsewhere none are known)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found: set[int] = set()
    edge = [pid]
    while edge:
        new = [child for parent in edge for child in children.get(parent, ()) if child not in found]
        found |= set(new)
        edge = new
    return found


def _alive(pid: int) -> bool:
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def die_with_parent() -> None:
    """Be told to end when the process that started this one is gone."""
    _prctl(DEATH_SIGNAL, signal.SIGTERM)


def _prctl(option: int, value: int = 1) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)
