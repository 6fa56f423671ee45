"""What travels between server and sites: Flower messages whose payload is the wire format's bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedpews.methods.wire import BadMessage

TASK, PAYLOAD, FORMAT = "task", "payload", "fedpews.wire"


@dataclass(frozen=True)
class Part:
    """One seed's share of a message to a site."""

    seed: int
    data: bytes  # an encoded download
    accepted: int = 0  # the round whose memory the site must start from; 0 is none
    kept: int = 0  # older rounds than this are never asked for again


@dataclass(frozen=True)
class Task:
    """What a site is asked to do in a round."""

    run: str  # names the memory that belongs to this run
    round: int
    lr: float
    parts: tuple[Part, ...]


def task_content(task: Task) -> RecordDict:
    """A task as Flower records."""
    about = ConfigRecord(
        {
            "run": task.run,
            "round": task.round,
            "lr": task.lr,
            "seeds": [part.seed for part in task.parts],
            "accepted": [part.accepted for part in task.parts],
            "kept": [part.kept for part in task.parts],
        }
    )
    return RecordDict({TASK: about, **{_key(part.seed): pack(part.data) for part in task.parts}})


def read_task(content: RecordDict) -> Task:
    """The inverse of ``task_content``."""
    about: Mapping[str, Any] = content[TASK]
    columns = zip(about["seeds"], about["accepted"], about["kept"], strict=True)
    parts = tuple(Part(seed, unpack(content, _key(seed)), *rounds) for seed, *rounds in columns)
    return Task(str(about["run"]), int(about["round"]), float(about["lr"]), parts)


def reply_content(uploads: Mapping[int, bytes]) -> RecordDict:
    """A site's answer: an encoded upload for each seed."""
    return RecordDict({_key(seed): pack(data) for seed, data in uploads.items()})


def read_reply(content: RecordDict, seeds: Sequence[int]) -> Iterator[tuple[int, bytes | BadMessage]]:
    """Each seed's bytes, or why there are none. The content is whatever came from the network."""
    for seed in seeds:
        try:
            yield seed, unpack(content, _key(seed))
        except BadMessage as error:
            yield seed, error


def pack(data: bytes) -> ArrayRecord:
    """Bytes as one array, which Flower cuts into chunks when it is large."""
    return ArrayRecord({PAYLOAD: Array(dtype="uint8", shape=(len(data),), stype=FORMAT, data=data)})


def unpack(content: RecordDict, key: str) -> bytes:
    record = content.get(key)
    if not isinstance(record, ArrayRecord) or list(record) != [PAYLOAD]:
        raise BadMessage(f"the message has no payload for {key}")
    array = record[PAYLOAD]
    if array.stype != FORMAT or not isinstance(array.data, bytes):
        raise BadMessage(f"the payload for {key} is in the format {array.stype!r:.40}, not {FORMAT!r}")
    data: bytes = array.data
    return data


def size_on_wire(message: Message) -> int:
    """The bytes of all objects a message is made of, as Flower sends them (without HTTP and TLS)."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


def _key(seed: int) -> str:
    return f"seed-{seed}"
