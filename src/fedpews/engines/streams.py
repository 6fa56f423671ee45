"""Clients side by side on a GPU: every thread queues its kernels on a stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Streams:
    """The streams of an engine's threads. On a device without streams nothing happens.

    A client's kernels wait for what the server queued before it, and the server goes on when they are done. So memory
    that the server frees is not written to by a client before the server's kernels have read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def servers(self) -> Any:
        """The stream of the thread that asks; None where there are none."""
        is_cuda = self._device.type == "cuda" and torch.cuda.is_available()
        return torch.cuda.current_stream(self._device) if is_cuda else None

    @contextmanager
    def behind(self, server: Any) -> Iterator[None]:
        """While this lasts, this thread's kernels run on its own stream, behind what ``server`` has queued by now."""
        if server is None:
            yield
            return
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = torch.cuda.Stream(self._device)
        stream.wait_stream(server)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
