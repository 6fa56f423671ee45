"""Statistics across sites: the server asks twice, first for sums and then for histograms on common edges."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from pydantic import TypeAdapter, ValidationError

from fedpews.data import Federation
from fedpews.data.statistics import (
    Histograms,
    Privacy,
    Statistics,
    Sums,
    describe,
    histograms,
    histograms_from_bytes,
    sums_from_bytes,
    to_bytes,
)
from fedpews.data.table import FEDERATED
from fedpews.errors import ConfigError, RunFailed, explain
from fedpews.experiment import Experiment
from fedpews.flower.data import AT_SITES
from fedpews.flower.hello import Expected, Seen
from fedpews.flower.logs import SiteLog
from fedpews.flower.messages import MOST_BYTES, deliver, pack, size_on_wire, unpack
from fedpews.flower.roster import KnownSites, Roster
from fedpews.methods.wire import BadMessage
from fedpews.outside import read_bytes
from fedpews.results.files import write_atomically
from fedpews.results.layout import STATISTICS

KIND = "statistics"
"""Of the message, and of its record."""


def is_scaled(experiment: Experiment) -> bool:
    """Whether the server must learn the sites' statistics before they train."""
    return experiment.data.scaling == FEDERATED and experiment.data.name == AT_SITES


def privacy_of(experiment: Experiment) -> Privacy:
    return Privacy(experiment.data.min_count, experiment.data.count_noise)


def answer(data: Federation, site: int, privacy: Privacy, question: RecordDict) -> RecordDict:
    """A site's answer: its sums, or its histograms if the question has edges."""
    try:
        edges = TypeAdapter(list[list[float]]).validate_json(unpack(question, KIND))
    except ValidationError as error:
        raise BadMessage(f"the edges have {explain(error)}") from None
    if not edges:
        return RecordDict({KIND: pack(to_bytes(describe(data, site, privacy)))})
    return RecordDict({KIND: pack(to_bytes(histograms(data, site, edges, privacy)))})


def collect(
    experiment: Experiment,
    data: Federation,
    grid: Grid,
    out: Path,
    known: KnownSites | None,
    only_sums: bool = False,
) -> Statistics:
    """Ask every site that is connected; stop with one line if a site does not fit, or fewer than min_sites answer.

    Args:
        data: what the server has.
        known: the operator's roster, if there is one.
        only_sums: without the second question.
    """
    limits, expected, report = experiment.flower, Expected.of(experiment, data), SiteLog(out).report
    sites = Roster(grid, expected, known, Seen(None), report)
    nodes = sites.gather(range(sites.total), limits, limits.join_seconds, "a comparison of the sites")
    for site, why in sites.refused.items():
        raise ConfigError(f"the sites' statistics cannot be compared: {sites.name(site)} is refused: {why}")
    sent = dict.fromkeys(map(sites.name, sorted(nodes)), 0)

    def ask(edges: list[list[float]], answers: dict[str, Any], read: Callable[[bytes], Any]) -> None:
        """Add each site's answer under its name."""
        content = RecordDict({KIND: pack(json.dumps(edges).encode())})
        kind, seconds = f"{MessageType.QUERY}.{KIND}", limits.round_seconds
        messages = {site: Message(content, node, kind, ttl=seconds) for site, node in sorted(nodes.items())}
        replies: Mapping[int, Message | str] = dict(deliver(grid, messages, seconds))
        for site in messages:
            name, reply = sites.name(site), replies.get(site, "no answer")
            try:
                if isinstance(reply, str):
                    raise BadMessage(reply)
                answers[name] = read(unpack(reply.content, KIND))
                sent[name] += size_on_wire(reply)
            except (BadMessage, ConfigError) as error:
                raise RunFailed(f"{name} sent no statistics: {error}") from None

    sums: dict[str, Sums] = {}
    counts: dict[str, Histograms] = {}
    ask([], sums, lambda content: sums_from_bytes(content, next(iter(sums.values()), None)))
    names = list(experiment.data.classes or data.class_names)
    statistics = Statistics(experiment.data.name, names, privacy_of(experiment), sums)
    if not only_sums:
        ask(statistics.edges, counts, lambda content: histograms_from_bytes(content, statistics.edges))
    statistics = replace(statistics, histograms=counts, bytes_sent=sent)
    write_atomically(out / STATISTICS, json.dumps(asdict(statistics), allow_nan=False).encode())
    return statistics


def read_statistics(folder: Path) -> Statistics:
    """The statistics that a folder holds."""
    path = folder / STATISTICS
    try:
        return TypeAdapter(Statistics).validate_json(read_bytes(path, 64 * MOST_BYTES[KIND]))
    except ValidationError as error:
        raise ConfigError(f"{path} is damaged: {explain(error)}") from None
