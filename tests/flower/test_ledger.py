"""A coordinator with patience: what a site with its own noise releases, it releases once and within a budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import experiment, write

from fedpews.flower.ledger import BudgetSpent
from fedpews.flower.messages import Request, SeedDownload
from fedpews.flower.site import Site
from fedpews.methods.contract import Cohort
from fedpews.methods.private import epsilon
from fedpews.methods.wire import BadMessage, encode_download

pytest.importorskip("dp_accounting")
RUN = "a" * 32


def make_site(tmp_path: Path, **settings: Any) -> Site:
    made = experiment(
        rounds=3, method={"name": "fedavg"}, privacy={"clip": 1.0, "noise": 2.0, "place": "client"}
    )
    config = write(tmp_path / "experiment.toml", made)
    return Site(config, {"site": 0, "state-dir": str(tmp_path / "state"), **settings})


def ask(site: Site, round: int = 1, seed: int = 0, factor: float = 1.0, **changes: Any) -> Request:
    state = site.method.init(site.net, {n: factor * v for n, v in site.net.initial().items()}, 2)
    download = site.method.downloads(site.net, state, Cohort(round, (0,), 2, 0))[0]
    request = Request(RUN, round, 0.1, (SeedDownload(seed, encode_download(site.net, download)),))
    return replace(request, **changes)


def ledger(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "state" / "site-0" / "ledger.json").read_text())
    return found


def test_a_round_that_is_asked_for_300_times_is_answered_with_the_same_bytes(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    first = site.train(ask(site))
    # another name of the run, and a site that was restarted
    for again in (make_site(tmp_path), *[site] * 299):
        assert again.train(ask(site, run="b" * 32)) == first
    assert len(ledger(tmp_path)) == 1
    assert site.ledger is not None
    # one release of multiplier 2: the mechanism of two changes that lie 2C apart
    assert site.ledger.epsilon() == pytest.approx(epsilon(2.0, 1, 1e-5, 1, 1, "client"))


def test_a_round_that_was_answered_is_not_answered_for_another_model(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    site.train(ask(site))
    for other in (ask(site, factor=0.0), ask(site, lr=0.2)):
        with pytest.raises(BadMessage, match="round 1, seed 0 was answered already"):
            site.train(other)
    assert len(ledger(tmp_path)) == 1


@pytest.mark.parametrize(
    ("round", "seed", "said"),
    [
        (10**6, 0, "not one of the experiment's 3"),
        (0, 0, "not one of"),
        (1, 7, "7 is no seed of the experiment"),
    ],
)
def test_rounds_and_seeds_outside_the_experiment_are_refused(
    round: int, seed: int, said: str, tmp_path: Path
) -> None:
    site = make_site(tmp_path)
    with pytest.raises(BadMessage, match=said):
        site.train(ask(site, round, seed))
    assert not (tmp_path / "state" / "site-0" / "ledger.json").exists()


def test_a_download_of_another_round_than_the_request_is_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    with pytest.raises(BadMessage, match="the download is of round 2, the request of 1"):
        site.train(replace(ask(site, 2), round=1))


def test_a_site_stops_at_its_budget_and_a_restart_does_not_forget_it(tmp_path: Path) -> None:
    budget = epsilon(2.0, 2, 1e-5, 1, 1, "client") + 0.01
    for round in (1, 2):
        site = make_site(tmp_path, epsilon=budget)
        site.train(ask(site, round))
    site = make_site(tmp_path, epsilon=budget)
    with pytest.raises(BudgetSpent, match="in 2 releases; this round would make it"):
        site.train(ask(site, 3))
    assert len(ledger(tmp_path)) == 2
    assert "2 releases so far" in (tmp_path / "state" / "site-0" / "status.log").read_text()


def test_an_upload_that_was_not_counted_was_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between training and the ledger releases nothing, and the next answer is the one that counts."""
    site = make_site(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("fedpews.flower.ledger.json.dumps", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            site.train(ask(site))
    answer = site.train(ask(site))
    assert site.train(ask(site)) == answer
    assert len(ledger(tmp_path)) == 1


def test_a_coordinator_cannot_raise_the_bound_of_a_site_that_adds_its_own_noise(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    state = site.method.init(site.net, site.net.initial(), 2)
    (download,) = site.method.downloads(site.net, state, Cohort(1, (0,), 2, 0))
    forged = replace(download, extra={"privacy": {"clip": torch.tensor([1e9])}})
    request = Request(RUN, 1, 0.1, (SeedDownload(0, encode_download(site.net, forged)),))
    from fedpews.methods.wire import decode_upload

    upload = decode_upload(site.net, site.train(request)[0])
    # noise of deviation 2·1 for each number, not 2·10⁹
    assert max(float(v.abs().max()) for v in upload.params.values()) < 100
