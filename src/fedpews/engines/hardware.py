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
    """The cores this process may run on; a container or a batch system may have given it fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    # macOS and Windows do not tell
    return os.cpu_count() or 1


def describe_machine(device: torch.device) -> str:
    """What a run was trained on, for its summary."""
    named = device.type == "cuda" and torch.cuda.is_available()
    gpu = torch.cuda.get_device_name(device) if named else device.type
    return f"{available_cores()} cores ({platform.machine()}), {'no GPU' if gpu == 'cpu' else gpu}"


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # names of glibc's mallopt
_LARGEST_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, for its next allocation; say whether that could be arranged.

    A step of a convolutional network frees tens of megabytes and wants them again at once, and so does a round of many
    small clients. By default glibc
    gives them back to the system in between, and every page has to be mapped and cleared anew. Results do not
    change. Other C libraries have other allocators and are left alone.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    largest = 2 ** (8 * ctypes.sizeof(ctypes.c_int) - 1) - 1
    kept = library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    # the heaps of further arenas, which threads get, are given back whenever they are empty
    return bool(kept and library.mallopt(_TRIM_THRESHOLD, largest) and library.mallopt(_ARENA_MAX, 1))


@contextmanager
def settled() -> Iterator[None]:
    """While this lasts, objects that are there now are not searched for cycles.

    torch and the libraries around it make up a million of them. A search takes a fifth of a second, as long as several
    rounds of small clients, and rounds make enough objects of their own to cause one every few rounds.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        # whoever froze objects before us wants them to stay so
        if not was_frozen:
            gc.unfreeze()
