"""How the C library hands memory to the kernels."""

from __future__ import annotations

import ctypes
import sys

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
