"""Which Flower node is which site.

A node's number changes when it restarts; a site's key and number do not. The operator approves keys in ``roster.toml``
(`KnownSites`), a site describes itself in a hello, and the server checks both (`Roster`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import tomli_w
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from pydantic import Field, TypeAdapter, ValidationError

from fedpews.config import FlowerTable
from fedpews.data.client_tables import compare_columns
from fedpews.errors import ConfigError, RunFailed, explain
from fedpews.flower.deploy.keys import fingerprint
from fedpews.flower.hello import HELLO, Expected, Facts, Seen, read_hello
from fedpews.flower.messages import deliver
from fedpews.methods.wire import BadMessage
from fedpews.outside import MOST_TOML, parse_toml, read_text
from fedpews.results.files import write_atomically

REFUSED = "refused"

SAMPLES_MULTIPLE = 10
"""A site's samples count at most as so many times the median of the other sites', unless the roster says how many it
has or the server knows."""

ASK_SECONDS = 120.0
"""How long a node may take to answer the hello; it may have to load its data first."""

AGAIN_SECONDS = 60.0
"""After this time a node that did not answer, or was refused, is asked again: its operator may have fixed it."""

REFUSE_SECONDS = 20.0
"""How long a site may take to receive its refusal."""

POLL_SECONDS = 1.0


class TooFewSites(RunFailed):
    """Not enough sites are connected, or not enough of them answered."""


class SitesRefused(ConfigError):
    """Sites that are needed cannot take part as they were started."""


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

    def gather(
        self, sites: Collection[int], limits: FlowerTable, seconds: float, purpose: str
    ) -> dict[int, int]:
        """The nodes of these sites, as soon as all are connected, or after some seconds at least ``min_sites``."""
        least, until = min(limits.min_sites, len(sites)), time.monotonic() + seconds
        reported = False
        while True:
            connected = {site: node for site, node in self.online().items() if site in sites}
            awaited = sorted(set(sites) - connected.keys() - self.refused.keys())
            refused = sorted(set(sites) - connected.keys() - set(awaited))
            if refused and not is_enough(limits, len(sites), len(sites) - len(refused)):
                # waiting cannot help
                each = "; ".join(f"{self.name(site)} is refused: {self.refused[site]}" for site in refused)
                raise SitesRefused(
                    f"{purpose} cannot begin. {each}. Correct that and give the command again; a run goes on "
                    "with --resume."
                )
            late = time.monotonic() - until
            if not awaited or (late >= 0 and len(connected) >= least):
                return connected
            if late >= limits.wait_seconds:
                raise TooFewSites(
                    f"{purpose} needs at least {least} sites (flower.min_sites), but only {len(connected)} of "
                    f"{len(sites)} came within {limits.wait_seconds:g} s (flower.wait_seconds): "
                    f"{sorted(connected) or 'none'}. Start the sites and give the command again; a run goes on with "
                    "--resume."
                )
            if not reported:
                missing = ", ".join(map(self.name, awaited))
                self._report(f"{len(connected)} of {len(sites)} sites are connected; waiting for {missing}")
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


def is_enough(limits: FlowerTable, asked: int, good: int) -> bool:
    """Whether a round is complete with so many good uploads of the clients that were asked."""
    if good < min(limits.min_sites, asked):
        return False
    return limits.max_failures is None or asked - good <= limits.max_failures
