"""GET /metrics at a coordinator and at a site: what a run among sites really did."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from memory_grid import MemoryGrid, site_handler
from test_engine import experiment, write

from fedpews.errors import ConfigError
from fedpews.flower.app import serve
from fedpews.flower.deploy.metrics import CURRENT, Metric, coordinator_metrics, serve_metrics, site_metrics
from fedpews.flower.site import Site


def values(metrics: list[Metric]) -> dict[str, Any]:
    return {name: {site or None: value for site, value in rows.items()} for _, name, _, rows in metrics}


@pytest.fixture
def coordinator(tmp_path: Path, grid: MemoryGrid) -> Path:
    """The folder of a coordinator whose last run had two rounds and a site that raised in the second."""
    made = experiment(rounds=2, method={"name": "fedavg"}, flower={"min_sites": 1})
    config = write(tmp_path / "experiment.toml", made)
    grid.nodes = {site: site_handler(config, tmp_path / "state", site) for site in (0, 1)}
    healthy, asked = grid.nodes[1], []

    def falls_ill(message: Message) -> Message | None:
        asked.append(message.metadata.message_type == "train")
        if sum(asked) == 2:
            raise RuntimeError("the disk is full")
        return healthy(message)

    grid.nodes[1] = falls_ill
    serve(config, grid, {"out": str(tmp_path / "run")})
    (tmp_path / CURRENT).write_text(str(tmp_path / "run"))
    return tmp_path


def test_the_coordinator_counts_rounds_bytes_and_failures_of_each_site(coordinator: Path) -> None:
    found = values(coordinator_metrics(coordinator))
    assert found["fedpews_rounds_done"] == {None: 2}
    assert found["fedpews_attempts"] == {None: 2}
    assert found["fedpews_site_up"] == {"0": 1, "1": 0}
    assert found["fedpews_failed_answers"] == {"0": 0, "1": 1}
    assert found["fedpews_refused_uploads"] == {"0": 0, "1": 0}
    sent, received = found["fedpews_site_sent_bytes"], found["fedpews_site_received_bytes"]
    # the same models, and numbers of more or fewer digits around them
    assert sent["0"] == pytest.approx(sent["1"], rel=0.01)
    # the second answer of site 1 is missing
    assert received["0"] == pytest.approx(2 * received["1"], rel=0.01)


def test_a_refused_upload_is_counted_and_its_site_is_up(tmp_path: Path) -> None:
    line = (
        '{"round": 1, "attempt": 1, "sites": {"0": {"outcome": "refused", "seconds": 1.5, "bytes_up": 7}}}\n'
    )
    (tmp_path / "sites.jsonl").write_text(line + '{"round": 2, "att')  # the last line is being written
    found = values(coordinator_metrics(tmp_path))
    assert (found["fedpews_refused_uploads"], found["fedpews_site_up"]) == ({"0": 1}, {"0": 1})
    assert found["fedpews_site_last_seconds"] == {"0": 1.5}


def test_a_site_counts_its_own_rounds_and_uploads(coordinator: Path) -> None:
    found = values(site_metrics(coordinator / "state" / "site-1"))
    config = coordinator / "experiment.toml"
    samples = Site(config, {"site": 1, "state-dir": str(coordinator / "state")}).facts().samples
    assert found["fedpews_site_rounds_trained"] == {None: 1}
    assert found["fedpews_site_round"] == {None: 1}
    assert found["fedpews_site_samples"] == {None: samples}
    assert found["fedpews_site_upload_bytes"][None] > 10_000
    assert found["fedpews_site_refused"] == {None: 0}


def test_before_the_first_run_there_are_zeros_and_no_error(tmp_path: Path) -> None:
    assert values(coordinator_metrics(tmp_path))["fedpews_rounds_done"] == {None: 0}
    assert values(site_metrics(tmp_path))["fedpews_site_rounds_trained"] == {None: 0}


def test_prometheus_can_read_them(coordinator: Path) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'fedpews[prometheus]'")
    from prometheus_client.parser import text_string_to_metric_families

    port = serve_metrics("0", lambda: coordinator_metrics(coordinator))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    samples = {
        (sample.name, sample.labels.get("site")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["fedpews_site_up", "1"] == 0
    assert samples["fedpews_failed_answers_total", "1"] == 1
    with pytest.raises(ConfigError, match="--metrics 'here': give a port or address:port"):
        serve_metrics("here", list)
    with pytest.raises(ConfigError, match=f"--metrics {port}: .*in use"):
        serve_metrics(str(port), list)
