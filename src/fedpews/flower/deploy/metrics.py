"""`GET /metrics` for Prometheus at a coordinator and at a site, read off the files that a run writes anyway."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from fedpews.errors import ConfigError, need_extra
from fedpews.outside import json_lines, read_text
from fedpews.results import layout

CURRENT = "current-run"
"""In a coordinator's folder: the folder of the run that was started last."""

MOST_BYTES = 2**30
TRAINED = re.compile(r"round (\d+) \(.*?\): trained on (\d+) samples.*; ([\d,]+) bytes to send")
"""A site's line about a round, in its status.log."""

Metric = tuple[str, str, str, list[tuple[dict[str, str], float]]]
"""counter or gauge, name, meaning, and the values by labels."""

Answers = list[dict[str, Any]]
"""Of one site, in the order of sites.jsonl."""


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
            for kind, name, text, values in collect():
                family = kinds[kind](name, text, labels=sorted(values[0][0]) if values else [])
                for labels, value in values:
                    family.add_metric([labels[key] for key in sorted(labels)], value)
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
    answers: dict[str, Answers] = {}
    for attempt in attempts:
        for site, answer in attempt.get("sites", {}).items():
            answers.setdefault(site, []).append(answer)

    def by_site(kind: str, name: str, meaning: str, value: Callable[[Answers], float]) -> Metric:
        return (
            kind,
            name,
            meaning,
            [({"site": site}, float(value(answers[site]))) for site in sorted(answers)],
        )

    def total(key: str) -> Callable[[Answers], float]:
        return lambda each: sum(answer.get(key, 0) for answer in each)

    def count(*outcomes: str) -> Callable[[Answers], float]:
        return lambda each: sum(answer.get("outcome") in outcomes for answer in each)

    def last(value: Callable[[Answers], float]) -> Callable[[Answers], float]:
        return lambda each: value(each[-1:])

    up, failed = last(count("accepted", "refused")), count("failed", "no answer", "absent")
    return [
        _one("gauge", "fedpews_rounds_done", "Rounds in rounds.jsonl of the current run", rounds),
        _one("counter", "fedpews_attempts", "Attempts at rounds", len(attempts)),
        by_site("gauge", "fedpews_site_up", "1 if the site answered the last time it was asked", up),
        by_site("gauge", "fedpews_site_last_seconds", "Seconds of its last answer", last(total("seconds"))),
        by_site("counter", "fedpews_site_seconds", "Seconds until its answers, summed", total("seconds")),
        by_site("counter", "fedpews_site_sent_bytes", "Bytes to the site", total("bytes_down")),
        by_site("counter", "fedpews_site_received_bytes", "Bytes from the site", total("bytes_up")),
        by_site("counter", "fedpews_refused_uploads", "Uploads that were refused", count("refused")),
        by_site("counter", "fedpews_failed_answers", "Times the site failed or did not answer", failed),
    ]


def site_metrics(state: Path) -> list[Metric]:
    """What a site's own people watch.

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
        _one("gauge", "fedpews_site_round", "The last round that this site trained", rounds),
        _one("gauge", "fedpews_site_samples", "Its training samples", samples),
        _one("counter", "fedpews_site_rounds_trained", "Rounds trained", len(trained)),
        _one("counter", "fedpews_site_upload_bytes", "Bytes of its uploads", uploads),
        _one("counter", "fedpews_site_failures", "Messages answered with a failure", failures),
        _one("gauge", "fedpews_site_refused", "1 if this site cannot take part", refused),
    ]


def _one(kind: str, name: str, meaning: str, value: float) -> Metric:
    """A metric with a single value."""
    return kind, name, meaning, [({}, float(value))]


def _lines(path: Path) -> list[Any]:
    """The whole lines of a file that may still grow, or not exist yet."""
    return [line for _, line in json_lines(read_text(path, MOST_BYTES), str(path))] if path.exists() else []
