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
    attempts = [line for _, line in _lines(run / layout.SITES)]
    last: dict[str, dict[str, Any]] = {}
    sums: dict[str, dict[str, float]] = {
        name: {} for name in ("seconds", "bytes_down", "bytes_up", "refused", "failed")
    }
    for attempt in attempts:
        for site, answer in attempt.get("sites", {}).items():
            last[site] = answer
            for name in ("seconds", "bytes_down", "bytes_up"):
                sums[name][site] = sums[name].get(site, 0) + float(answer.get(name, 0))
            sums["refused"][site] = sums["refused"].get(site, 0) + (answer.get("outcome") == "refused")
            failed = answer.get("outcome") in ("failed", "no answer", "absent")
            sums["failed"][site] = sums["failed"].get(site, 0) + failed
    rounds = max((int(line["round"]) for _, line in _lines(run / layout.ROUNDS)), default=0)

    def by_site(values: dict[str, float]) -> list[tuple[dict[str, str], float]]:
        return [({"site": site}, value) for site, value in sorted(values.items())]

    up = {site: float(answer.get("outcome") in ("accepted", "refused")) for site, answer in last.items()}
    latest = {site: float(answer.get("seconds", 0)) for site, answer in last.items()}
    return [
        ("gauge", "fedpews_rounds_done", "Rounds in rounds.jsonl of the current run", [({}, float(rounds))]),
        ("counter", "fedpews_attempts", "Attempts at rounds", [({}, float(len(attempts)))]),
        ("gauge", "fedpews_site_up", "1 if the site answered the last time it was asked", by_site(up)),
        ("gauge", "fedpews_site_last_seconds", "Seconds of the site's last answer", by_site(latest)),
        (
            "counter",
            "fedpews_site_seconds",
            "Seconds until the site's answers, summed",
            by_site(sums["seconds"]),
        ),
        ("counter", "fedpews_site_sent_bytes", "Bytes to the site", by_site(sums["bytes_down"])),
        ("counter", "fedpews_site_received_bytes", "Bytes from the site", by_site(sums["bytes_up"])),
        (
            "counter",
            "fedpews_refused_uploads",
            "Uploads of the site that were refused",
            by_site(sums["refused"]),
        ),
        (
            "counter",
            "fedpews_failed_answers",
            "Times the site failed or did not answer",
            by_site(sums["failed"]),
        ),
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
        ("gauge", "fedpews_site_round", "The last round that this site trained", [({}, float(rounds))]),
        ("gauge", "fedpews_site_samples", "Its training samples", [({}, float(samples))]),
        ("counter", "fedpews_site_rounds_trained", "Rounds trained", [({}, float(len(trained)))]),
        ("counter", "fedpews_site_upload_bytes", "Bytes of its uploads", [({}, float(uploads))]),
        ("counter", "fedpews_site_failures", "Messages answered with a failure", [({}, float(failures))]),
        ("gauge", "fedpews_site_refused", "1 if this site cannot take part", [({}, float(refused))]),
    ]


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The whole lines of a file that may still grow, or not exist yet."""
    if path.exists():
        yield from json_lines(read_text(path, MOST_BYTES), str(path))
