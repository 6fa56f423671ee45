"""What this machine has to train on, and how Python and the C library use its memory."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedpews.errors import ConfigError


def find_device(name: str) -> torch.device:
    """The device that ``runtime.device`` names; ``auto`` is a GPU if there is one.

    >>> find_device("cpu")
    device(type='cpu')
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, available in there.items() if available))
    device = torch.device(name)
    if not there.get(device.type, False):
        raise ConfigError(
            f"runtime.device is {name!r}, but torch finds no such device here (it was built "
            f"{'with CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'}); "
            f"use {' or '.join(kind for kind, available in there.items() if available)}, or auto"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"runtime.device is {name!r}, but there are {torch.cuda.device_count()} CUDA devices, counted from 0"
        )
    return device


def available_cores() -> int:
    """The cores this process may run on; a container or a batch system may allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    # not known on macOS and Windows
    return os.cpu_count() or 1


def describe_machine(device: torch.device) -> str:
    """The machine in words, for the summary of a run."""
    named = device.type == "cuda" and torch.cuda.is_available()
    gpu = torch.cuda.get_device_name(device) if named else device.type
    return f"{available_cores()} cores ({platform.machine()}), {'no GPU' if gpu == 'cpu' else gpu}"


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # names of glibc's mallopt
_LARGEST_MMAP_THRESHOLD = 32 << 20


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc; None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next allocation; returns whether that is possible.

    A step of a convolutional network, or a round of many small clients, frees tens of megabytes and allocates them
    again at once. By default glibc returns them to the system in between, and every page has to be mapped and cleared
    again. Results do not change. Other C libraries have other allocators; nothing is done there.
    """
    library = _glibc()
    if library is None:
        return False
    largest = 2 ** (8 * ctypes.sizeof(ctypes.c_int) - 1) - 1
    kept = library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    # the heaps of further arenas, which threads use, are returned to the system when they are empty
    return bool(kept and library.mallopt(_TRIM_THRESHOLD, largest) and library.mallopt(_ARENA_MAX, 1))


MUCH = 256 << 20
"""Bytes of freed memory that are worth a return to the system: mapping them again takes some 50 ms."""


class _Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = (
        ("before", ctypes.c_size_t * 8),
        ("free", ctypes.c_size_t),  # fordblks: bytes that are kept, but not in use
        ("trimmable", ctypes.c_size_t),
    )


def return_freed_memory() -> None:
    """Return the memory that was kept to the system, if it is much.

    Called after an evaluation: training allocates tensors of other sizes, which do not fit into the gaps that are left,
    so that gaps would add up from round to round. Between clients it would cost a tenth of a round of a ResNet-18.
    """
    library = _glibc()
    if library is None or not hasattr(library, "mallinfo2"):  # before glibc 2.33
        return
    library.mallinfo2.restype = _Heap
    if library.mallinfo2().free > MUCH:
        library.malloc_trim(0)


@contextmanager
def settled() -> Iterator[None]:
    """A context in which Python's garbage collector does not search the objects that exist now.

    torch and its libraries have a million of them. A search takes a fifth of a second, as long as several rounds of
    small clients, and every few rounds make enough new objects to start one.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        # objects that the caller froze before stay frozen
        if not was_frozen:
            gc.unfreeze()
