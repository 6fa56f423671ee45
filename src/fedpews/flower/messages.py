"""Flower messages between server and sites, whose payload is the wire format's bytes, and how they are sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from pydantic import Field, TypeAdapter, ValidationError
from safetensors.torch import save

from fedpews.engines.engine import Part
from fedpews.errors import explain
from fedpews.methods.wire import BadMessage
from fedpews.tasks.metrics import Sums

REQUEST, PAYLOAD, FORMAT = "request", "payload", "fedpews.wire"
POLL_SECONDS = 0.3

FRAME = 2**16
"""Bytes that Flower's own objects around the content of a message may take."""

MOST_BYTES = {
    "hello": 2**22,
    "train": FRAME,
    "evaluate": FRAME,
    "personal": FRAME,
    "final": FRAME,
    "best": FRAME,
    "refused": FRAME,
    "statistics": 2**24,
}
"""The most bytes that a reply may have, by kind of the request."""

Count = Annotated[int, Field(strict=True, ge=0)]
"""A whole number: a site's files are named after it."""
Scaling = tuple[list[float], list[Annotated[float, Field(gt=0)]]]
"""The centre and the spread of each feature, by which sites scale their inputs."""


@dataclass(frozen=True)
class SeedDownload:
    """One seed's share of a message to a site."""

    seed: Count
    data: bytes = b""  # an encoded download
    accepted: Count = 0  # the round whose memory the site must start from; 0 is none
    kept: Count = 0  # the server never asks for an older round than this again


@dataclass(frozen=True)
class Request:
    """What a site is asked to do."""

    run: str  # names the memory that belongs to this run
    round: Count
    lr: float
    downloads: tuple[SeedDownload, ...]
    scaling: Scaling | None = None  # with data.scaling = "federated"


REQUESTS = TypeAdapter(Request)


def request_content(request: Request) -> RecordDict:
    """A request as Flower records."""
    about = REQUESTS.dump_json(request, exclude={"downloads": {"__all__": {"data"}}})
    payloads = {_key(download.seed): pack(download.data) for download in request.downloads}
    return RecordDict({REQUEST: ConfigRecord({REQUEST: about}), **payloads})


def read_request(content: RecordDict) -> Request:
    """The inverse of ``request_content``; the content comes from the network and is checked."""
    record: Any = content.get(REQUEST)
    about = record.get(REQUEST) if isinstance(record, ConfigRecord) else None
    if not isinstance(about, bytes):
        raise BadMessage("the message has no request")
    try:
        request = REQUESTS.validate_json(about)
    except ValidationError as error:
        raise BadMessage(f"the message's request has {explain(error)}") from None
    downloads = [replace(sent, data=unpack(content, _key(sent.seed))) for sent in request.downloads]
    return replace(request, downloads=tuple(downloads))


def reply_content(
    uploads: Mapping[int, bytes], scores: Mapping[Part, Mapping[int, Sums]] | None = None
) -> RecordDict:
    """A site's answer: an encoded upload for each seed, and the sums over its samples by part of its data and seed."""
    payloads = {_key(seed): pack(data) for seed, data in uploads.items()}
    for part, by_seed in (scores or {}).items():
        for seed, sums in by_seed.items():
            tensors = {name: value.double().contiguous() for name, value in sums.items()}
            payloads[f"{part}-{seed}"] = pack(save(tensors))
    return RecordDict(payloads)


def read_reply(content: RecordDict, seed: int) -> bytes:
    """The encoded upload of a seed; the content comes from the network."""
    return unpack(content, _key(seed))


def pack(data: bytes) -> ArrayRecord:
    """Bytes as one array, which Flower cuts into chunks when it is large."""
    return ArrayRecord({PAYLOAD: Array(dtype="uint8", shape=(len(data),), stype=FORMAT, data=data)})


def unpack(content: RecordDict, key: str) -> bytes:
    """The bytes that ``pack`` put into a record, checked."""
    record = content.get(key)
    if not isinstance(record, ArrayRecord) or list(record) != [PAYLOAD]:
        raise BadMessage(f"the message has no payload for {key}")
    array = record[PAYLOAD]
    if array.stype != FORMAT or not isinstance(array.data, bytes):
        raise BadMessage(f"the payload for {key} is in the format {array.stype!r:.40}, not {FORMAT!r}")
    data: bytes = array.data
    return data


def size_on_wire(message: Message) -> int:
    """The bytes of all objects that make up a message, as Flower sends them (without HTTP and TLS)."""
    from fedpews.flower.flwr_private import get_all_nested_objects

    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


def deliver(
    grid: Grid, messages: Mapping[int, Message], seconds: float, more: int = 0
) -> Iterator[tuple[int, Message | str]]:
    """Each message's reply, or why there is none, as they come in. A key that is missing did not answer in time.

    Args:
        messages: of one kind, which says how many bytes a reply may have; a larger one is not fetched any further.
        more: bytes that a reply may have in addition.
    """
    if not messages:
        return
    kind = next(iter(messages.values())).metadata.message_type.rpartition(".")[2]
    most_bytes = MOST_BYTES["hello" if kind == MessageType.QUERY else kind] + more
    keys = list(messages)
    ids = list(grid.push_messages([messages[key] for key in keys]))
    waiting = {message_id: key for key, message_id in zip(keys, ids, strict=False) if message_id}
    for key in set(keys) - set(waiting.values()):
        yield key, "the message could not be sent"
    until = time.monotonic() + seconds
    while waiting and time.monotonic() < until:
        for message_id, key in list(waiting.items()):
            answer = _collect(grid, message_id, most_bytes)
            if answer is not None:
                del waiting[message_id]
                yield key, answer
        if waiting:
            time.sleep(POLL_SECONDS)


def _collect(grid: Grid, message_id: str, most_bytes: int) -> Message | str | None:
    """One reply: fetched alone, so that a reply that cannot be unpacked does not harm the others."""
    try:
        with _metered(grid, most_bytes):
            replies = list(grid.pull_messages([message_id]))
    except httpx.HTTPError:
        raise  # the SuperLink itself is out of reach
    except BadMessage as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a message from outside may raise anything
        return f"its answer cannot be unpacked: {type(error).__name__}: {error!s:.200}"
    if not replies:
        return None
    reply = replies[0]
    if reply.has_error():
        return f"{reply.error.reason or 'unknown error'!s:.2000} (code {reply.error.code})"
    if (size := size_on_wire(reply)) > most_bytes:
        return f"its answer has {size} bytes, at most {most_bytes} are possible"
    return reply if reply.has_content() else "its answer is empty"


@contextmanager
def _metered(grid: Grid, most_bytes: int) -> Iterator[None]:
    """Stop fetching the pieces of a reply when they come to more than an honest one has.

    Flower fetches a reply piece by piece (5 MB each) without a limit; only its client can count them.
    """
    from fedpews.flower.flwr_private import client_of

    client = client_of(grid)
    if client is None:
        yield
        return
    pull: Callable[[Any], Any] = client.PullObject
    fetched = 0

    def count(request: Any) -> Any:
        nonlocal fetched
        if fetched > most_bytes:
            raise BadMessage(f"its answer has more than {most_bytes} bytes, the most that is possible")
        answer = pull(request)
        fetched += len(answer.object_content)
        return answer

    client.PullObject = count
    try:
        yield
    finally:
        del client.PullObject


def _key(seed: int) -> str:
    return f"seed-{seed}"
