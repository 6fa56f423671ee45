"""Send messages, wait for the answers, and survive whatever comes back."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import TypeVar

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

Key = TypeVar("Key", bound=Hashable)

POLL_SECONDS = 0.3


def deliver(grid: Grid, messages: Mapping[Key, Message], seconds: float) -> dict[Key, Message | str]:
    """Each message's reply, or in words why there is none. A key without an entry did not answer in time."""
    keys = list(messages)
    ids = list(grid.push_messages([messages[key] for key in keys]))
    waiting = {message_id: key for key, message_id in zip(keys, ids, strict=False) if message_id}
    answers: dict[Key, Message | str] = {
        key: "the message could not be sent" for key in keys if key not in waiting.values()
    }
    until = time.monotonic() + seconds
    while waiting and time.monotonic() < until:
        for message_id, key in list(waiting.items()):
            answer = _collect(grid, message_id)
            if answer is not None:
                answers[key] = answer
                del waiting[message_id]
        if waiting:
            time.sleep(POLL_SECONDS)
    return answers


def _collect(grid: Grid, message_id: str) -> Message | str | None:
    """One by one, so that an answer that cannot even be unpacked harms nobody else's."""
    try:
        replies = list(grid.pull_messages([message_id]))
    except httpx.HTTPError:
        raise  # the SuperLink itself is out of reach
    except Exception as error:  # noqa: BLE001 - whatever a foreign message brings about
        return f"its answer cannot be unpacked: {type(error).__name__}: {error!s:.200}"
    if not replies:
        return None
    reply = replies[0]
    if reply.has_error():
        return f"{reply.error.reason or 'unknown error'} (code {reply.error.code})"
    return reply if reply.has_content() else "its answer is empty"


def log_line(text: str) -> None:
    """A line in Flower's log, which ``flwr run --stream`` shows."""
    from logging import INFO

    from flwr.supercore import log

    log(INFO, "%s", text)
