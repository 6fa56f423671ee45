"""A network in memory: Flower's own messages and our own apps, without processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Error, Message, RecordDict  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from fedpews.flower import build_site  # noqa: E402
from fedpews.runtimes.flower import engine, post, roster  # noqa: E402
from fedpews.runtimes.flower.apps import make_client_app  # noqa: E402

Handler = Callable[[Message], Message | None]


class MemoryGrid:
    """What the server sees of a federation. A node is a function; None is a node that never answers."""

    def __init__(self) -> None:
        self.nodes: dict[int, Handler] = {}
        self.sent: list[Message] = []
        self._replies: dict[str, Message | Exception] = {}
        self._ids = itertools.count(1)

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            name = f"message-{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            ids.append(name)
            try:
                reply = self.nodes[message.metadata.dst_node_id](message)
            except Exception as error:  # noqa: BLE001 - as flwr-clientapp does it
                reply = Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
            if reply is not None:
                self._replies[name] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _quick_and_identified(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(post, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(roster, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(roster, "ASK_SECONDS", 0.1)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    assert engine.FlowerEngine.name == "flower"
    yield


@pytest.fixture
def grid() -> MemoryGrid:
    return MemoryGrid()


def site_handler(config: Path, state: Path, site: int, **settings: Any) -> Handler:
    """A site as a function of messages: the real ClientApp, with a node's configuration."""
    app = make_client_app(lambda number, given: build_site(config, number, given))
    node_config = {"site": site, "state-dir": str(state), **settings}

    def handle(message: Message) -> Message:
        return app(message, Context(1, 1, node_config, RecordDict(), {}))  # type: ignore[no-any-return]

    return handle
