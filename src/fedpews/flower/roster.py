"""Which Flower node is which site. A node's number changes when it restarts, a site's does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedpews.flower.messages import deliver

HELLO = "hello"
ASK_SECONDS = 120.0
"""How long a node may take to say which site it is; it starts a process for it."""

AGAIN_SECONDS = 60.0
"""A node that did not say which site it is gets asked again after this time."""

POLL_SECONDS = 1.0


class Roster:
    """Sites by number, found by asking every node that has not been asked yet."""

    def __init__(self, grid: Grid, total: int, say: Callable[[str], None]) -> None:
        self._grid, self._total, self._say = grid, total, say
        self._site: dict[int, int | None] = {}  # node -> site; None is a node that is of no use
        self._again: dict[int, float] = {}  # node -> when to ask it again

    def online(self) -> dict[int, int]:
        """The node of every site that is connected now."""
        nodes = sorted(self._grid.get_node_ids())
        now = time.monotonic()
        self._ask([node for node in nodes if node not in self._site and self._again.get(node, now) <= now])
        found: dict[int, int] = {}
        for node in nodes:
            site = self._site.get(node)
            if site is None:
                continue
            if site in found:
                self._say(
                    f"nodes {found[site]} and {node} both say they are site {site}; the second is ignored"
                )
                self._site[node] = None
            else:
                found[site] = node
        return found

    def wait_for(self, sites: Iterable[int], seconds: float) -> dict[int, int]:
        """The nodes of these sites, as soon as all are there or the time is up."""
        wanted, until, told = set(sites), time.monotonic() + seconds, False
        while True:
            here = {site: node for site, node in self.online().items() if site in wanted}
            if len(here) == len(wanted) or time.monotonic() >= until:
                return here
            if not told:
                missing = ", ".join(str(site) for site in sorted(wanted - here.keys()))
                self._say(f"{len(here)} of {len(wanted)} sites are here; waiting for {missing}")
                told = True
            time.sleep(POLL_SECONDS)

    def _ask(self, nodes: list[int]) -> None:
        content = RecordDict({HELLO: ConfigRecord({"sites": self._total})})
        questions = {node: Message(content, node, MessageType.QUERY, ttl=ASK_SECONDS) for node in nodes}
        answers = deliver(self._grid, questions, ASK_SECONDS) if questions else {}
        for node in nodes:
            reply = answers.get(node)
            if isinstance(reply, Message):
                self._site[node] = self._read(node, reply)
            else:
                self._again[node] = time.monotonic() + AGAIN_SECONDS
                self._say(f"node {node} does not say which site it is: {reply or 'no answer'}")

    def _read(self, node: int, reply: Message) -> int | None:
        record: Any = reply.content.get(HELLO)
        site = record.get("site") if isinstance(record, ConfigRecord) else None
        if not isinstance(site, int) or isinstance(site, bool) or not 0 <= site < self._total:
            self._say(f"node {node} says it is site {site!r:.40}; there are sites 0 to {self._total - 1}")
            return None
        self._say(f"site {site} is here (node {node})")
        return site
