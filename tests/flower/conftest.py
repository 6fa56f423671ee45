"""Quick polls, and a network in memory."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

from flwr.supercore.task_identity import TaskIdentity
from memory_grid import MemoryGrid

from fedpews.flower import messages, roster


@pytest.fixture(autouse=True)
def _quick_and_identified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(roster, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(roster, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(roster, "REFUSE_SECONDS", 0.1)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


@pytest.fixture
def grid() -> MemoryGrid:
    return MemoryGrid()
