"""What a site declares when it connects, and what the server compares it with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
from flwr.app import ConfigRecord, RecordDict
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from fedpews.data import Federation
from fedpews.data.federation import digest
from fedpews.data.inputs import take
from fedpews.errors import explain
from fedpews.experiment import Experiment
from fedpews.flower.data import AT_SITES
from fedpews.methods.wire import BadMessage
from fedpews.results.files import write_atomically
from fedpews.results.schema import SeenShape, read_object
from fedpews.torch_private import tree_leaves

HELLO, UNFIT = "hello", "unfit"


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r:.40} is not printable")
    return text


Text = Annotated[str, Field(strict=True, max_length=100)]
Count = Annotated[int, Field(strict=True, ge=0, le=10**12)]
Column = Annotated[str, Field(strict=True, max_length=1000), AfterValidator(_printable)]


@dataclass(frozen=True)
class Facts:
    """What a site declares in its hello. None of it shows a sample or a label."""

    site: Count
    version: Text  # of fedpews
    config: Text  # the experiment's fingerprint
    shape: Text  # of one sample
    classes: Count
    samples: Count  # for training
    test_samples: Count
    validation_samples: Count
    data: Text  # a digest: of all the data if it has a name, else of the site's data under a secret key
    columns: Annotated[list[Column], Field(strict=True, max_length=100_000)] = field(default_factory=list)
    base: Text = ""  # a digest of the frozen parameters, which are not sent


def hello_content(about: Facts | Exception) -> RecordDict:
    """A site's answer to a hello: its facts, or why it cannot take part."""
    return RecordDict(
        {HELLO: ConfigRecord(asdict(about) if isinstance(about, Facts) else {UNFIT: str(about)})}
    )


def read_hello(content: RecordDict) -> Facts:
    """The inverse of ``hello_content``; the content comes from the network and is checked."""
    record: Any = content.get(HELLO)
    if not isinstance(record, ConfigRecord):
        raise BadMessage("its hello has no facts")
    if UNFIT in record:
        raise BadMessage(f"it cannot take part: {record[UNFIT]!s:.2000}")
    try:
        return TypeAdapter(Facts).validate_python(dict(record))
    except ValidationError as error:
        raise BadMessage(f"its hello has {explain(error)}") from None


def common_facts(experiment: Experiment, data: Federation) -> dict[str, Any]:
    """The facts that the server and every site must agree on."""
    leaves = tree_leaves(take(data.x, torch.zeros(1, dtype=torch.int64)))
    return {
        "version": version("fedpews"),
        "config": experiment.fingerprint(),
        # of each input, if there are several
        "shape": ", ".join("×".join(map(str, leaf.shape[1:])) for leaf in leaves),
        "classes": data.classes,
    }


def data_digest(data: Federation, key: bytes = b"") -> str:
    """A short digest of the data. With a secret key of the site it cannot be compared with a guess."""
    return hashlib.blake2b(digest(data).encode(), key=key, digest_size=8).hexdigest()


MUST_AGREE = {
    "version": "fedpews",
    "config": "the experiment's fingerprint",
    "shape": "the shape of a sample",
    "classes": "the number of classes",
    "data": "the data's digest",
    "base": "the digest of the model's frozen parameters",
}


@dataclass(frozen=True)
class Expected:
    """What the server knows of every site."""

    sites: int
    facts: Mapping[str, Any]  # of `MUST_AGREE`, those that the server knows
    columns: list[str] | None = None  # of the server's test set; empty if it is no table
    samples: tuple[int, ...] | None = None  # of each site

    @classmethod
    def of(cls, experiment: Experiment, data: Federation, base: str | None = None) -> Expected:
        """What the server knows; data that has a name is the same at every site."""
        facts, samples = common_facts(experiment, data), None
        if base is not None:
            facts["base"] = base
        if experiment.data.name != AT_SITES:
            facts["data"], samples = data_digest(data), tuple(map(len, data.clients))
        columns = list(data.columns) if len(data.test_y) else None
        return cls(len(data), facts, columns, samples)

    def check(self, facts: Facts) -> None:
        """Refuse a site that differs, with both values."""
        if facts.site >= self.sites:
            raise BadMessage(f"it says it is site {facts.site}; there are sites 0 to {self.sites - 1}")
        for name, expected in self.facts.items():
            if expected != (declared := getattr(facts, name)):
                raise BadMessage(f"{MUST_AGREE[name]} is {declared} at the site and {expected} at the server")
        if self.samples is not None and facts.samples != self.samples[facts.site]:
            raise BadMessage(
                f"it declares {facts.samples} samples, and the server knows that it has {self.samples[facts.site]}"
            )


class Seen:
    """What each site declared at first contact (``sites-seen.json``): its key and data may not change in a run."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._seen = read_object(path, dict[str, SeenShape])

    def check(self, facts: Facts, key: str | None) -> None:
        """Refuse a site that has changed, with both values; remember a new one.

        Args:
            key: None if the operator's roster binds keys to sites: the operator may give a site a new key.
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
