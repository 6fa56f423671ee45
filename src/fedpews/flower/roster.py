"""Which Flower node is which site.

A node's number changes when it restarts; a site's key and number do not. The operator approves keys in ``roster.toml``
(`KnownSites`), a site describes itself in a hello (`Facts`), and the server checks both (`Roster`).
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from fedpews.data import Federation
from fedpews.data.client_tables import compare_columns
from fedpews.data.federation import digest
from fedpews.data.inputs import take
from fedpews.errors import ConfigError, explain
from fedpews.experiment import Experiment
from fedpews.flower.data import AT_SITES
from fedpews.flower.deploy.keys import fingerprint
from fedpews.flower.limits import SAMPLES_MULTIPLE
from fedpews.flower.messages import deliver
from fedpews.methods.wire import BadMessage
from fedpews.outside import MOST_TOML, parse_toml, read_text
from fedpews.results.files import write_atomically
from fedpews.results.schema import SeenShape, read_object
from fedpews.torch_private import tree_leaves

HELLO, UNFIT, REFUSED = "hello", "unfit", "refused"

ASK_SECONDS = 120.0
"""How long a node may take to answer the hello; it may have to load its data first."""

AGAIN_SECONDS = 60.0
"""After this time a node that did not answer, or was refused, is asked again: its operator may have fixed it."""

REFUSE_SECONDS = 20.0
"""How long a site may take to receive its refusal."""

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class KnownSite:
    """One site of ``roster.toml``."""

    number: Annotated[int, Field(strict=True, ge=0)]
    name: str
    key: Annotated[str, Field(pattern="^SHA256:")]  # the public key's fingerprint, as ssh-keygen -lf shows it
    samples: Annotated[int, Field(strict=True, ge=1)] | None = None  # the most that it may declare


@dataclass(frozen=True)
class KnownSites:
    """Every site that the operator has approved. A node with any other key is ignored.

    >>> roster = KnownSites((KnownSite(0, "north", "SHA256:aaa"),))
    >>> roster.by_key["SHA256:aaa"].number
    0
    """

    sites: tuple[KnownSite, ...] = ()

    @cached_property
    def by_key(self) -> dict[str, KnownSite]:
        return {site.key: site for site in self.sites}

    @cached_property
    def by_number(self) -> dict[int, KnownSite]:
        return {site.number: site for site in self.sites}

    def adding(self, new: KnownSite) -> KnownSites:
        """A roster with one more site, whose number, name and key are all new."""
        for site in self.sites:
            for key in ("number", "name", "key"):
                if getattr(site, key) == (value := getattr(new, key)):
                    raise ConfigError(
                        f"{key} {value} is already that of site {site.number}, {site.name!r} ({site.key}); "
                        "remove that site from the roster first"
                    )
        return KnownSites(tuple(sorted((*self.sites, new), key=lambda site: site.number)))

    def write(self, path: Path) -> None:
        rows = [{k: v for k, v in asdict(site).items() if v is not None} for site in self.sites]
        write_atomically(path, tomli_w.dumps({"site": rows}).encode())

    @classmethod
    def read(cls, path: Path) -> KnownSites:
        if not path.exists():
            raise ConfigError(f"there is no roster {path}; approve sites with: fedpews flower approve")
        rows = parse_toml(read_text(path, MOST_TOML), str(path)).get("site", [])
        try:
            sites = TypeAdapter(list[KnownSite]).validate_python(rows)
        except ValidationError as error:
            raise ConfigError(f"{path} is no roster: {explain(error, 'site.')}") from error
        known = cls()
        for site in sites:
            known = known.adding(site)
        return known


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


def describe_shape(data: Federation) -> str:
    """The shape of one sample; with several inputs, of each."""
    leaves = tree_leaves(take(data.x, torch.zeros(1, dtype=torch.int64)))
    return ", ".join("×".join(map(str, leaf.shape[1:])) for leaf in leaves)


def data_digest(data: Federation, key: bytes = b"") -> str:
    """A short digest of the data. With a secret key of the site it cannot be compared with a guess."""
    return hashlib.blake2b(digest(data).encode(), key=key, digest_size=8).hexdigest()


@dataclass(frozen=True)
class Expected:
    """What every site must have in common with the server; None is unknown to the server."""

    sites: int
    version: str
    config: str
    shape: str
    classes: int
    data: str | None
    columns: list[str] | None = None  # of the server's test set; empty if it is no table
    samples: tuple[int, ...] | None = None  # of each site
    base: str | None = None

    @classmethod
    def of(cls, experiment: Experiment, data: Federation, base: str | None = None) -> Expected:
        """What the server knows; data that has a name is the same at every site."""
        named = experiment.data.name != AT_SITES
        return cls(
            sites=len(data),
            version=version("fedpews"),
            config=experiment.fingerprint(),
            shape=describe_shape(data),
            classes=data.classes,
            data=data_digest(data) if named else None,
            columns=list(data.columns) if len(data.test_y) else None,
            samples=tuple(map(len, data.clients)) if named else None,
            base=base,
        )

    def check(self, facts: Facts) -> None:
        """Refuse a site that differs, with both values."""
        if facts.site >= self.sites:
            raise BadMessage(f"it says it is site {facts.site}; there are sites 0 to {self.sites - 1}")
        names = {
            "version": "fedpews",
            "config": "the experiment's fingerprint",
            "shape": "the shape of a sample",
            "classes": "the number of classes",
            "data": "the data's digest",
            "base": "the digest of the model's frozen parameters",
        }
        for name, words in names.items():
            expected, declared = getattr(self, name), getattr(facts, name)
            if expected is not None and expected != declared:
                raise BadMessage(f"{words} is {declared} at the site and {expected} at the server")
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


class Roster:
    """Sites by number. Every new node is asked which site it is, and its answer is checked.

    Args:
        expected: what every site must have in common with the server.
        known: the operator's roster; a node with another key is ignored. Without one, a site's key at first contact
            is its key for the run.
        report: called with every line for the operator.
        without: sites that the operator excludes, by name or number.
    """

    def __init__(
        self,
        grid: Grid,
        expected: Expected,
        known: KnownSites | None,
        seen: Seen,
        report: Callable[[str], None],
        without: Collection[str] = (),
    ) -> None:
        self._grid, self._expected, self._known, self._seen = grid, expected, known, seen
        self._report = report
        self.facts: dict[int, Facts] = {}  # by site
        self.refused: dict[int, str] = {}  # site -> why; its operator must change something and restart it
        self._site: dict[int, int | None] = {}  # node -> site; None is a node that is ignored
        self._again: dict[int, float] = {}  # node -> when to ask it again
        self._reported: set[str] = set()
        # the columns that every table must have: the server's, or those of the first site
        self._columns = None if expected.columns is None else ("the server", expected.columns)
        names = {self.name(site): site for site in range(expected.sites)}
        names |= {str(site): site for site in range(expected.sites)}
        if unknown := sorted(set(without) - names.keys()):
            raise ConfigError(f"--without: there is no site {unknown[0]!r}; the sites are {', '.join(names)}")
        self.excluded = {names[site] for site in without}

    def describe_refused(self, sites: Collection[int]) -> str:
        """Why these sites are refused."""
        return "; ".join(f"{self.name(site)} is refused: {self.refused[site]}" for site in sorted(sites))

    @property
    def total(self) -> int:
        """The number of sites of the experiment."""
        return self._expected.sites

    def name(self, site: int) -> str:
        """The operator's name of a site."""
        entry = self._entry(site)
        return entry.name if entry else f"site-{site}"

    def _entry(self, site: int) -> KnownSite | None:
        return self._known.by_number.get(site) if self._known else None

    def most_samples(self, site: int, kind: str = "samples") -> float:
        """The most samples of a site that count: a multiple of the others' median, where nothing else bounds them.

        Args:
            kind: the field of ``Facts``.
        """
        entry = self._entry(site)
        if self._expected.samples is not None or (entry is not None and entry.samples is not None):
            return math.inf
        others: list[float] = [getattr(facts, kind) for other, facts in self.facts.items() if other != site]
        return SAMPLES_MULTIPLE * statistics.median_low(others or [math.inf])

    def online(self) -> dict[int, int]:
        """The node of every site that is connected now."""
        keys = {node.node_id: node.public_key for node in self._grid.get_nodes()}
        now = time.monotonic()
        self._ask({n: k for n, k in keys.items() if n not in self._site and self._again.get(n, now) <= now})
        nodes: dict[int, int] = {}
        # in the order in which they connected: a later node does not replace an earlier one
        for node, site in self._site.items():
            if site is None or site in self.excluded or node not in keys:
                continue
            if (first := nodes.setdefault(site, node)) != node:
                self.report_once(
                    f"nodes {first} and {node} both say they are site {site}; the second is ignored"
                )
        return nodes

    def wait_for(self, sites: Iterable[int], seconds: float) -> dict[int, int]:
        """The nodes of these sites, as soon as all are connected or refused, or the time is up."""
        wanted, until, reported = set(sites), time.monotonic() + seconds, False
        while True:
            connected = {site: node for site, node in self.online().items() if site in wanted}
            awaited = sorted(wanted - connected.keys() - self.refused.keys())
            if not awaited or time.monotonic() >= until:
                return connected
            if not reported:
                missing = ", ".join(map(self.name, awaited))
                self._report(f"{len(connected)} of {len(wanted)} sites are connected; waiting for {missing}")
                reported = True
            time.sleep(POLL_SECONDS)

    def _ask(self, keys: dict[int, bytes]) -> None:
        """Ask these nodes which site they are."""
        prints = {node: fingerprint(key) if key else "" for node, key in keys.items()}
        for node, key in prints.items():
            if self._known is not None and key not in self._known.by_key:
                self._site[node] = None
                self._report(
                    f"node {node} is ignored: its key {key or 'is missing and'} is not in the roster; if it is a "
                    "site of yours, approve it (fedpews flower approve) and start the run again"
                )
        asked = [node for node in keys if node not in self._site]
        content = RecordDict({HELLO: ConfigRecord({"sites": self._expected.sites})})
        questions = {node: Message(content, node, MessageType.QUERY, ttl=ASK_SECONDS) for node in asked}
        silent = dict.fromkeys(asked, f"no answer in {ASK_SECONDS:g} s")
        for node, reply in deliver(self._grid, questions, ASK_SECONDS):
            if isinstance(reply, str):
                silent[node] = reply
                continue
            del silent[node]
            site = self._admit(node, prints[node], reply)
            if site is not None:
                self._site[node] = site
        for node, why in silent.items():
            self._report(f"{self._describe(node, prints[node])} does not say which site it is: {why}")
        for node in asked:
            self._again[node] = time.monotonic() + AGAIN_SECONDS

    def _describe(self, node: int, key: str) -> str:
        entry = self._known.by_key.get(key) if self._known else None
        return entry.name if entry else f"node {node} ({key or 'no key'})"

    def _admit(self, node: int, key: str, reply: Message) -> int | None:
        """The site of a node that answered; None if it is refused."""
        entry = self._known.by_key[key] if self._known else None
        number = entry.number if entry else None
        try:
            facts = read_hello(reply.content)
            number = facts.site if number is None else number
            self._expected.check(facts)
            if entry is not None and entry.number != facts.site:
                raise BadMessage(
                    f"it says it is site {facts.site}, but its key is that of site {entry.number}, {entry.name}"
                )
            declared = max(facts.samples, facts.test_samples, facts.validation_samples)
            if entry is not None and entry.samples is not None and declared > entry.samples:
                raise BadMessage(
                    f"it declares {declared} samples, and the roster has {entry.samples} for {entry.name}"
                )
            who, columns = self._columns or (self.name(facts.site), facts.columns)
            difference = compare_columns(facts.columns, columns)
            if difference:
                theirs = ", ".join(columns) or "no table"
                raise BadMessage(f"its table {difference:.500}; {who} has {theirs:.500}")
            self._seen.check(facts, key if self._known is None else None)
        except BadMessage as error:
            self._refuse(node, key, str(error))
            if number is not None:
                self.refused[number] = str(error)
            return None
        self.facts[facts.site] = facts
        self.refused.pop(facts.site, None)
        self._columns = who, columns
        shown = f", key {key}" if key else ""
        self._report(
            f"{self.name(facts.site)} is connected: site {facts.site}, {facts.samples} samples{shown}"
        )
        return facts.site

    def report_once(self, text: str) -> bool:
        """Report a line unless it was reported before; whether it was new."""
        is_new = text not in self._reported
        if is_new:
            self._reported.add(text)
            self._report(text)
        return is_new

    def _refuse(self, node: int, key: str, why: str) -> None:
        """Report a refusal here and at the site, once for each reason."""
        if not self.report_once(f"{self._describe(node, key)} is refused: {why}"):
            return
        content = RecordDict({REFUSED: ConfigRecord({"why": why})})
        refusal = Message(content, node, f"{MessageType.QUERY}.{REFUSED}", ttl=REFUSE_SECONDS)
        # the reply says nothing, but waiting for it lets the site receive the refusal
        list(deliver(self._grid, {node: refusal}, REFUSE_SECONDS))
