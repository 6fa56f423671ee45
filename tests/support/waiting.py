"""Waiting for what another process or thread does, and processes that end themselves at a chosen moment."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DIE = """
import os
from pathlib import Path

batches = 0

def die(batch, seed):
    global batches
    batches += 1
    if batches == {batch}:
        try:
            Path({marker!r}).touch(exist_ok=False)
        except FileExistsError:
            return batch
        os.kill(os.getpid(), {number})
    return batch
"""


def when(look: Callable[[], T], seconds: float = 300.0) -> T:
    """What ``look`` returns, as soon as that is true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise TimeoutError("it did not happen")


def deadly(folder: Path, batch: int, number: int = signal.SIGKILL) -> str:
    """An augmentation, for `data.augment`, that sends its process a signal at that batch; only the first process."""
    file, marker = folder / "deadly.py", folder / "died"
    file.write_text(DIE.format(batch=batch, marker=str(marker), number=int(number)))
    return f"{file}:die"
