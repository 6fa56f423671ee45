"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_core_each() -> None:
    """Tests run side by side already."""
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Searches for reference cycles leave out the million objects of imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_search_for_cycles_before_every_run() -> Iterator[None]:
    """It takes as long as the rest of a tiny run; `settled` has a test of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedpews.running.settled", nullcontext)
        yield


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of compiled programs for all test processes of a session; a person's own is left alone."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ["FEDPEWS_CACHE"] = str(folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def _signals_as_in_a_terminal() -> None:
    """Behind ``nohup``, or in a script's background, signals that tests send to themselves would be ignored."""
    usual = {"SIGINT": signal.default_int_handler, "SIGHUP": signal.SIG_DFL, "SIGTERM": signal.SIG_DFL}
    for name, handler in usual.items():
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of machine code the same graph, step by step in Python, as on a GPU without a code generator."""
    from fedpews.engines.compiled import engine
    from fedpews.engines.compiled.program import Looped, Step

    monkeypatch.setattr(
        engine, "load", lambda program, *given: Looped(Step(program), 1, len(program.changes))
    )
