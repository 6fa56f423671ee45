"""What all tests share."""

from __future__ import annotations

import signal

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_core_each() -> None:
    """Tests run side by side already."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _signals_as_in_a_terminal() -> None:
    """Behind ``nohup``, or in a script's background, signals that tests send to themselves would be ignored."""
    usual = {"SIGINT": signal.default_int_handler, "SIGHUP": signal.SIG_DFL, "SIGTERM": signal.SIG_DFL}
    for name, handler in usual.items():
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
