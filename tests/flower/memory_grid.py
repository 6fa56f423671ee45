"""A network in memory: Flower's own messages and our own apps, without processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedpews.flower.app import make_client_app
from fedpews.flower.site import Site

Handler = Callable[[Message], Message | None]


def over_the_wire(message: Message) -> Message:
    """The message as it comes out at the other end: taken apart into Flower's objects and put together again."""
    parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    received = inflate_object_from_contents(message.object_id, parts)
    received.metadata.__dict__["_message_id"] = message.metadata.message_id
    return received  # type: ignore[no-any-return]


class MemoryGrid:
    """What the server sees of a federation. A node is a function; None is a node that never answers."""

    def __init__(self) -> None:
        self.nodes: dict[int, Handler] = {}
        self.keys: dict[int, bytes] = {}
        self.sent: list[Message] = []
        self.answered: list[Message] = []
        self._replies: dict[str, Message] = {}
        self._ids = itertools.count(1)

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[Any]:
        """As Flower tells them: with the public key that each has registered with, if it has."""
        return [SimpleNamespace(node_id=n, public_key=self.keys.get(n, b"")) for n in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            name = f"message-{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            ids.append(name)
            try:
                reply = self.nodes[message.metadata.dst_node_id](over_the_wire(message))
            except Exception as error:  # noqa: BLE001 - as flwr-clientapp does it
                reply = Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
            if reply is not None:
                self._replies[name] = over_the_wire(reply)
                self.answered.append(self._replies[name])
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))


def site_handler(config: Path, state: Path, site: int, **settings: Any) -> Handler:
    """A site as a function of messages: the real ClientApp, with a node's configuration."""
    app = make_client_app(config, Site)
    node_config = {"site": site, "state-dir": str(state), **settings}

    def handle(message: Message) -> Message:
        return app(message, Context(1, 1, node_config, RecordDict(), {}))  # type: ignore[no-any-return]

    return handle
