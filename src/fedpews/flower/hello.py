"""What a site says of itself when it is met, and what of it the server insists on."""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ConfigRecord, RecordDict

from fedpews.methods.wire import BadMessage
from fedpews.results.files import write_atomically
from fedpews.results.schema import SeenShape, read_object

if TYPE_CHECKING:
    from fedpews.data import Federation

HELLO, UNFIT, REFUSED = "hello", "unfit", "refused"
MOST_SAMPLES = 10**12
MOST_COLUMNS = 100_000


@dataclass(frozen=True)
class Facts:
    """A site in a few facts. None of them shows a sample or a label."""

    site: int
    version: str  # of fedpews
    config: str  # the experiment's fingerprint
    shape: str  # of one sample
    classes: int
    samples: int  # the site's own
    test_samples: int
    validation_samples: int
    data: (
        str  # a digest: of all the data when it has a name, else of the site's own, under a key that it keeps
    )
    columns: list[str] = field(default_factory=list)  # of a table: the name and type of each


@dataclass(frozen=True)
class Expected:
    """What every site must agree with the server on; None is not known here."""

    sites: int
    version: str
    config: str
    shape: str
    classes: int
    data: str | None
    columns: list[str] | None = None  # of the server's own test set; empty where that is no table

    def check(self, facts: Facts) -> None:
        """Refuse a site that differs, with both values."""
        if not 0 <= facts.site < self.sites:
            raise BadMessage(f"it says it is site {facts.site}; there are sites 0 to {self.sites - 1}")
        names = {
            "version": "fedpews",
            "config": "the experiment's fingerprint",
            "shape": "the shape of a sample",
            "classes": "the number of classes",
            "data": "the data's digest",
        }
        for name, words in names.items():
            mine, other = getattr(self, name), getattr(facts, name)
            if mine is not None and mine != other:
                raise BadMessage(f"{words} is {other} at the site and {mine} at the server")


class Seen:
    """What each site said at first contact. Within a run neither its key nor its data may become another's."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        known = path is not None and path.exists()
        self._seen: dict[str, dict[str, Any]] = (
            read_object(path, dict[str, SeenShape]) if known and path else {}
        )

    def check(self, facts: Facts, key: str | None) -> None:
        """Refuse a site that has changed, with both values; remember one that is new.

        Args:
            key: None where the operator's roster says whose it is: it may give a site a new one.
        """
        now = {"key": key, "data": facts.data, "samples": facts.samples, "test_samples": facts.test_samples}
        first = self._seen.setdefault(str(facts.site), now)
        for name, value in now.items():
            if first[name] != value and not (name == "key" and value is None):
                raise BadMessage(
                    f"it says it is site {facts.site}, whose {name} was {first[name]} at first contact "
                    f"and is {value} now"
                )
        if self._path is not None:
            write_atomically(self._path, (json.dumps(self._seen, indent=2) + "\n").encode())


def hello_content(facts: Facts) -> RecordDict:
    """The facts as Flower records."""
    return RecordDict({HELLO: ConfigRecord(asdict(facts))})


def unfit_content(error: Exception) -> RecordDict:
    """In the place of the facts: why this site cannot take part."""
    return RecordDict({HELLO: ConfigRecord({UNFIT: str(error)})})


def read_hello(content: RecordDict) -> Facts:
    """The inverse of ``hello_content``; the content is whatever came from the network."""
    record: Any = content.get(HELLO)
    if not isinstance(record, ConfigRecord):
        raise BadMessage("its hello is none")
    if UNFIT in record:
        raise BadMessage(f"it cannot take part: {record[UNFIT]!s:.2000}")
    columns = record.get("columns", [])
    if not isinstance(columns, list) or len(columns) > MOST_COLUMNS:
        raise BadMessage(f"its hello has columns {columns!r:.40}")
    for column in columns:
        if not isinstance(column, str) or len(column) > 1000 or not column.isprintable():
            raise BadMessage(f"its hello has a column {column!r:.40}")
    values: dict[str, Any] = {"columns": columns}
    for fact in fields(Facts):
        if fact.name == "columns":
            continue
        value = record.get(fact.name)
        wanted = int if fact.type == "int" else str
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise BadMessage(f"its hello has {fact.name} {value!r:.40}")
        if (isinstance(value, str) and len(value) > 100) or (
            isinstance(value, int) and not 0 <= value <= MOST_SAMPLES
        ):
            raise BadMessage(f"its hello has {fact.name} {value!r:.40}")
        values[fact.name] = value
    return Facts(**values)


def site_facts(config: str, site: int, data: Federation, own: bool, state: Path) -> Facts:
    """What a site says of itself.

    Args:
        own: whether the data is the site's alone; its digest is then keyed, so that nobody can guess at it.
        state: the site's own folder, where the key is kept.
    """
    from fedpews.data.digest import digest

    key = _salt(state / f"site-{site}" / "digest-key") if own else b""
    return Facts(
        site=site,
        version=version("fedpews"),
        config=config,
        shape=shape_in_words(data),
        classes=data.classes,
        samples=len(data.clients[site]),
        test_samples=len(data.test_y),
        validation_samples=len(data.validation[site]) if data.validation else 0,
        data=hashlib.blake2b(digest(data).encode(), key=key, digest_size=8).hexdigest(),
        columns=list(data.columns),
    )


def expected_of(config: str, data: Federation, named: bool) -> Expected:
    """What the server insists on."""
    from fedpews.data.digest import digest

    found = hashlib.blake2b(digest(data).encode(), digest_size=8).hexdigest() if named else None
    columns = list(data.columns) if len(data.test_y) else None
    return Expected(len(data), version("fedpews"), config, shape_in_words(data), data.classes, found, columns)


def shape_in_words(data: Federation) -> str:
    """The shape of one sample; of several inputs, each."""
    from fedpews.data.inputs import take
    from fedpews.torch_private import tree_leaves

    one = tree_leaves(take(data.x, torch.zeros(1, dtype=torch.int64)))
    return ", ".join("×".join(map(str, leaf.shape[1:])) for leaf in one)


def _salt(path: Path) -> bytes:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, secrets.token_bytes(16))
        path.chmod(0o600)
    return path.read_bytes()
