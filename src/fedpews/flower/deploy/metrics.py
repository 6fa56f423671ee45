"""`GET /metrics` for Prometheus at a coordinator and at a site, computed from the files that a run writes anyway."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedpews.errors import ConfigError, need_extra
from fedpews.outside import json_lines, read_text
from fedpews.results import layout

CURRENT = "current-run"
"""In a coordinator's folder: the folder of the run that was started last."""

MOST_BYTES = 2**30
TRAINED = re.compile(r"round (\d+) \(.*?\): trained on (\d+) samples.*; ([\d,]+) bytes to send")
"""A site's line about a round, in its status.log."""

ALL = ""
"""The site of a metric that has one value."""


class Metric(NamedTuple):
    """A metric and its value for each site."""

    kind: Literal["counter", "gauge"]
    name: str
    meaning: str
    values: Mapping[str, float]


def serve_metrics(address: str, collect: Callable[[], Iterable[Metric]]) -> int:
    """Answer GET /metrics at an address, in a thread; the port.

    Args:
        address: a port on 127.0.0.1, or address:port.
    """
    client = need_extra("prometheus", "prometheus_client", "--metrics")
    families = import_module("prometheus_client.core")
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--metrics {address!r}: give a port or address:port, such as 9464 or 0.0.0.0:9464")

    class Collector:
        def collect(self) -> Iterator[Any]:
            kinds = {"counter": families.CounterMetricFamily, "gauge": families.GaugeMetricFamily}
            for kind, name, meaning, values in collect():
                family = kinds[kind](name, meaning, labels=[] if ALL in values else ["site"])
                for site, value in values.items():
                    family.add_metric([site] if site else [], float(value))
                yield family

    registry = client.CollectorRegistry()
    registry.register(Collector())
    try:
        server, _ = client.start_http_server(int(port), host or "127.0.0.1", registry)
    except OSError as error:
        raise ConfigError(f"--metrics {address}: {error.strerror}") from error
    return int(server.server_port)


def coordinator_metrics(folder: Path) -> list[Metric]:
    """What the operator watches: rounds, seconds, bytes, refused uploads, and which sites are up."""
    path = folder / CURRENT
    run = Path(read_text(path, 4096).strip()) if path.exists() else folder
    attempts = _lines(run / layout.SITES)
    rounds = max((int(line["round"]) for line in _lines(run / layout.ROUNDS)), default=0)
    answers: dict[str, list[dict[str, Any]]] = {}
    for attempt in attempts:
        for site, answer in attempt.get("sites", {}).items():
            answers.setdefault(site, []).append(answer)

    def total(key: str) -> dict[str, float]:
        return {site: sum(answer.get(key, 0) for answer in each) for site, each in answers.items()}

    def count(*outcomes: str) -> dict[str, float]:
        return {
            site: sum(answer.get("outcome") in outcomes for answer in each) for site, each in answers.items()
        }

    last = {site: each[-1] for site, each in answers.items()}
    up = {site: float(answer.get("outcome") in ("accepted", "refused")) for site, answer in last.items()}
    seconds = {site: answer.get("seconds", 0.0) for site, answer in last.items()}
    failed = count("failed", "no answer", "absent")
    return [
        Metric("gauge", "fedpews_rounds_done", "Rounds in rounds.jsonl of the current run", {ALL: rounds}),
        Metric("counter", "fedpews_attempts", "Attempts at rounds", {ALL: len(attempts)}),
        Metric("gauge", "fedpews_site_up", "1 if the site answered the last time it was asked", up),
        Metric("gauge", "fedpews_site_last_seconds", "Seconds of its last answer", seconds),
        Metric("counter", "fedpews_site_seconds", "Seconds until its answers, summed", total("seconds")),
        Metric("counter", "fedpews_site_sent_bytes", "Bytes to the site", total("bytes_down")),
        Metric("counter", "fedpews_site_received_bytes", "Bytes from the site", total("bytes_up")),
        Metric("counter", "fedpews_refused_uploads", "Uploads that were refused", count("refused")),
        Metric("counter", "fedpews_failed_answers", "Times the site failed or did not answer", failed),
    ]


def site_metrics(state: Path) -> list[Metric]:
    """What the operator of a site watches.

    Args:
        state: the site's folder in its state-dir.
    """
    path = state / layout.SITE_STATUS
    lines = read_text(path, MOST_BYTES).splitlines() if path.exists() else []
    trained = [match for line in lines if (match := TRAINED.match(line))]
    failures = sum(line.startswith("a message is answered with a failure") for line in lines)
    rounds, samples = (int(trained[-1][group]) if trained else 0 for group in (1, 2))
    uploads = sum(int(match[3].replace(",", "")) for match in trained)
    refused = (state / layout.SITES_ERROR).exists()
    return [
        Metric("gauge", "fedpews_site_round", "The last round that this site trained", {ALL: rounds}),
        Metric("gauge", "fedpews_site_samples", "Its training samples", {ALL: samples}),
        Metric("counter", "fedpews_site_rounds_trained", "Rounds trained", {ALL: len(trained)}),
        Metric("counter", "fedpews_site_upload_bytes", "Bytes of its uploads", {ALL: uploads}),
        Metric("counter", "fedpews_site_failures", "Messages answered with a failure", {ALL: failures}),
        Metric("gauge", "fedpews_site_refused", "1 if this site cannot take part", {ALL: refused}),
    ]


def _lines(path: Path) -> list[Any]:
    """The whole lines of a file that may still grow, or not exist yet."""
    return [line for _, line in json_lines(read_text(path, MOST_BYTES), str(path))] if path.exists() else []
