"""Which Flower node is which site. A node's number changes when it restarts; a site's key and number do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedpews.data.client_tables import compare_columns
from fedpews.flower.deploy.keys import fingerprint
from fedpews.flower.hello import HELLO, REFUSED, Expected, Facts, Seen, read_hello
from fedpews.flower.known_sites import KnownSites
from fedpews.flower.messages import answers, deliver
from fedpews.methods.wire import BadMessage

ASK_SECONDS = 120.0
"""How long a node may take to say which site it is; it may have to load its data first."""

AGAIN_SECONDS = 60.0
"""A node that did not say which site it is, or was refused, gets asked again after this time: it may be mended."""

TELL_SECONDS = 20.0
"""How long a site that is refused may take to hear of it."""

POLL_SECONDS = 1.0


class Roster:
    """Sites by number, found by asking every node that has not been asked yet.

    Args:
        expected: what every site must agree with the server on.
        known: the operator's roster; a key that is not in it is nobody. None takes a key for a site's at first
            contact, and no other from then on.
    """

    def __init__(
        self,
        grid: Grid,
        expected: Expected,
        known: KnownSites | None,
        seen: Seen,
        say: Callable[[str], None],
    ) -> None:
        self._grid, self._expected, self._known, self._seen, self._say = grid, expected, known, seen, say
        self.facts: dict[int, Facts] = {}  # by site
        self._site: dict[int, int | None] = {}  # node -> site; None is a node that is of no use
        self._again: dict[int, float] = {}  # node -> when to ask it again
        self._told: set[int] = set()  # nodes that were said to come second
        self._refused: dict[int, str] = {}  # node -> why, as it was said
        self.refused: dict[int, str] = {}  # site -> why; a person must start it again with something changed
        # which columns every table must have: those of the server's test set, or of the site that came first
        self._columns = None if expected.columns is None else ("the server", expected.columns)

    @property
    def total(self) -> int:
        """How many sites there are."""
        return self._expected.sites

    def name(self, site: int) -> str:
        """What the operator calls a site."""
        return (self._known.names if self._known else {}).get(site, f"site-{site}")

    def online(self) -> dict[int, int]:
        """The node of every site that is connected now."""
        keys = {node.node_id: node.public_key for node in self._grid.get_nodes()}
        now = time.monotonic()
        self._ask({n: k for n, k in keys.items() if n not in self._site and self._again.get(n, now) <= now})
        found: dict[int, int] = {}
        # in the order in which they were met: whoever comes later takes nobody's place
        for node, site in self._site.items():
            if site is None or node not in keys:
                continue
            if found.setdefault(site, node) != node and node not in self._told:
                self._told.add(node)
                self._say(
                    f"nodes {found[site]} and {node} both say they are site {site}; the second is ignored"
                )
        return found

    def wait_for(self, sites: Iterable[int], seconds: float) -> dict[int, int]:
        """The nodes of these sites, as soon as all are there or refused, or the time is up."""
        wanted, until, told = set(sites), time.monotonic() + seconds, False
        while True:
            here = {site: node for site, node in self.online().items() if site in wanted}
            awaited = sorted(wanted - here.keys() - self.refused.keys())
            if not awaited or time.monotonic() >= until:
                return here
            if not told:
                missing = ", ".join(map(self.name, awaited))
                self._say(f"{len(here)} of {len(wanted)} sites are here; waiting for {missing}")
                told = True
            time.sleep(POLL_SECONDS)

    def _ask(self, keys: dict[int, bytes]) -> None:
        short = {node: fingerprint(key) if key else "" for node, key in keys.items()}
        for node, key in short.items():
            if self._known is not None and key not in self._known.by_key:
                self._site[node] = None
                self._say(
                    f"node {node} is nobody: its key {key or 'is missing and'} is not in the roster; if it is a "
                    "site of yours, approve it (fedpews flower approve) and start the run again"
                )
        asked = [node for node in keys if node not in self._site]
        content = RecordDict({HELLO: ConfigRecord({"sites": self._expected.sites})})
        questions = {node: Message(content, node, MessageType.QUERY, ttl=ASK_SECONDS) for node in asked}
        silent = dict.fromkeys(asked, f"no answer in {ASK_SECONDS:g} s")
        for node, reply in answers(self._grid, questions, ASK_SECONDS) if questions else ():
            if isinstance(reply, str):
                silent[node] = reply
                continue
            del silent[node]
            site = self._read(node, short[node], reply)
            if site is None:
                self._again[node] = time.monotonic() + AGAIN_SECONDS
            else:
                self._site[node] = site
        for node, why in silent.items():
            self._again[node] = time.monotonic() + AGAIN_SECONDS
            self._say(f"{self._who(node, short[node])} does not say which site it is: {why}")

    def _who(self, node: int, key: str) -> str:
        entry = self._known.by_key.get(key) if self._known else None
        return entry.name if entry else f"node {node} ({key or 'no key'})"

    def _read(self, node: int, key: str, reply: Message) -> int | None:
        number = self._known.by_key[key].number if self._known else None
        try:
            facts = read_hello(reply.content)
            number = facts.site if number is None else number
            self._expected.check(facts)
            if self._known is not None and number != facts.site:
                entry = self._known.by_key[key]
                raise BadMessage(
                    f"it says it is site {facts.site}, but its key is that of site {entry.number}, {entry.name}"
                )
            self._check_columns(facts)
            self._seen.check(facts, key if self._known is None else None)
        except BadMessage as error:
            if self._refused.get(node) != str(error):
                self._refused[node] = str(error)
                self._say(f"{self._who(node, key)} is refused: {error}")
                content = RecordDict({REFUSED: ConfigRecord({"why": str(error)})})
                told = Message(content, node, f"{MessageType.QUERY}.{REFUSED}", ttl=TELL_SECONDS)
                deliver(self._grid, {node: told}, TELL_SECONDS)
            if number is not None:
                self.refused[number] = str(error)
            return None
        self.facts[facts.site] = facts
        self.refused.pop(facts.site, None)
        self._columns = self._columns or (self.name(facts.site), facts.columns)
        shown = f", key {key}" if key else ""
        self._say(f"{self.name(facts.site)} is here: site {facts.site}, {facts.samples} samples{shown}")
        return facts.site

    def _check_columns(self, facts: Facts) -> None:
        who, columns = self._columns or ("", facts.columns)
        difference = compare_columns(facts.columns, columns)
        if difference:
            theirs = ", ".join(columns) or "no table"
            raise BadMessage(f"its table {difference:.500}; {who} has {theirs:.500}")
