"""Who works on which trial, so that the trials of a process that died are known from those still running.

A process that searches holds a lock file beside its results, which the system lets go of even after kill -9; and it
writes the time into the storage now and then, for those who search with the same storage but another folder.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

SIGN_EVERY = 30.0
"""Seconds between two signs of life."""
LOST_AFTER = 180.0
"""Seconds without one after which a process is taken for dead; clocks may differ by a minute."""

FOLDER = ".search"


@dataclass(frozen=True)
class Holder:
    """This process, as its trials name it."""

    name: str
    folder: Path


def attribute(name: str) -> str:
    """Of the study: when a holder last gave a sign of life."""
    return f"alive {name}"


def is_lost(holder: Holder, name: str, seen: float | None) -> bool:
    """Whether the process of that name is gone.

    Args:
        seen: its last sign of life, in seconds since 1970.
    """
    if name == holder.name:
        return False
    path = _path(holder.folder, name)
    if not path.exists():
        return seen is None or time.time() - seen > LOST_AFTER
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    lock.release()
    path.unlink(missing_ok=True)
    return True


@contextmanager
def holding(root: Path, sign: Callable[[str, float], None]) -> Iterator[Holder]:
    """Be a holder, for as long as the block lasts.

    Args:
        sign: writes the time of a sign of life into the storage, under the study's attribute.
    """
    holder = Holder(secrets.token_hex(6), root / FOLDER)
    holder.folder.mkdir(parents=True, exist_ok=True)
    path = _path(holder.folder, holder.name)
    lock = FileLock(path, thread_local=False)
    over = threading.Event()

    def keep_signing() -> None:
        while not over.wait(SIGN_EVERY):
            sign(attribute(holder.name), time.time())

    with lock:
        sign(attribute(holder.name), time.time())
        thread = threading.Thread(target=keep_signing, name="signs of life", daemon=True)
        thread.start()
        try:
            yield holder
        finally:
            over.set()
            thread.join()
            # what it leaves unfinished may be taken over at once
            sign(attribute(holder.name), 0.0)
    path.unlink(missing_ok=True)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"
