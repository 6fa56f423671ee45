"""Ctrl-C, SIGTERM and SIGHUP, heard so that a round is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def stop_signal(heard: Sequence[Callable[[], None]] = ()) -> Iterator[threading.Event]:
    """Set by the first Ctrl-C (or SIGTERM, or SIGHUP), so that the round is finished and saved; a second stops at once.

    A signal that is ignored stays ignored: that is how nohup keeps a run going when its terminal is closed.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        for callback in heard:
            callback()

    heeded = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.getsignal(number) for number in heeded}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
