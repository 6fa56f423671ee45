"""A Dask scheduler by its address, or one of our own for as long as the command runs."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError, first_line, need_extra

if TYPE_CHECKING:
    from distributed import Client

LOCAL = "local"
ANSWER_WITHIN = 20
"""Seconds for a scheduler to answer."""


@dataclass(frozen=True)
class Place:
    """Where cells run: a scheduler's address, or so many processes of this machine."""

    address: str = ""
    processes: int = 0

    @classmethod
    def parse(cls, text: str) -> Place:
        """What ``--on`` was given.

        >>> Place.parse("local:2"), Place.parse("tcp://10.0.0.5:8786").address
        (Place(address='', processes=2), 'tcp://10.0.0.5:8786')
        """
        kind, _, rest = text.partition(":")
        if kind == LOCAL and rest.isdecimal() and int(rest) > 0:
            return cls(processes=int(rest))
        if "://" in text:
            return cls(address=text)
        raise ConfigError(
            f"--on {text!r}: give the address of a Dask scheduler, such as tcp://10.0.0.5:8786, or local:2 for two "
            "processes here"
        )


@contextmanager
def connect(place: Place) -> Iterator[Client]:
    """A client of the scheduler there, until the block ends."""
    distributed = _distributed()
    if place.processes:
        with _deaf_to_ctrl_c():
            cluster = distributed.LocalCluster(
                n_workers=place.processes,
                threads_per_worker=1,
                dashboard_address=None,
                # Dask would end a worker at its share of the memory; a cell needs what it needs
                memory_limit=0,
                # what becomes of a cell is told by the table
                silence_logs=logging.CRITICAL + 1,
            )
        with cluster, distributed.Client(cluster, set_as_default=False) as client:
            yield client
        return
    try:
        client = distributed.Client(place.address, timeout=ANSWER_WITHIN, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConfigError(f"no Dask scheduler answers at {place.address}: {first_line(error)}") from error
    with client:
        yield client


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that are started inside do not hear the terminal's Ctrl-C: the command tells their cells to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _distributed() -> Any:
    return need_extra("cluster", "distributed", "--on")
