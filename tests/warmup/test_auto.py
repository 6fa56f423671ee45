"""FedPeWS-Auto: a warmup only where updates conflict, ended by the training loss."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpews
from fedpews import Auto, with_warmup
from fedpews.callbacks import Callback
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.scaffold import Scaffold
from fedpews.testing import Playground
from fedpews.trees import mean_cosine
from tiny import chain, targets

U, V = [1.0, 2.0], [0.5, -1.0]


def test_agreement_is_the_mean_cosine_of_all_pairs_of_updates() -> None:
    generator = torch.Generator().manual_seed(0)
    start = {"a": torch.randn(3, 2, generator=generator), "b": torch.randn(4, generator=generator)}
    ends = [{k: v + torch.randn(v.shape, generator=generator) for k, v in start.items()} for _ in range(4)]
    flat = [torch.cat([(end[k] - start[k]).flatten() for k in start]) for end in ends]
    cosines = [torch.cosine_similarity(u, v, dim=0) for u, v in itertools.combinations(flat, 2)]

    found = mean_cosine([start] * 4, ends)
    assert found == pytest.approx(float(torch.stack(cosines).mean()), abs=1e-6)
    assert mean_cosine([start] * 5, [*ends, start]) == found  # one that did not move


def test_nobody_can_disagree_with_nobody() -> None:
    start = {"a": torch.zeros(2)}
    assert mean_cosine([start], [{"a": torch.ones(2)}]) is None
    assert mean_cosine([start] * 2, [start, start]) is None


@pytest.mark.parametrize(
    ("agree_at", "phases"), [(1.0, ["train", "warmup", "warmup"]), (-1.0, ["train"] * 3)]
)
def test_the_first_updates_decide_whether_there_is_a_warmup(agree_at: float, phases: list[str]) -> None:
    method = with_warmup(FedAvg(), 3, Auto(agree_at=agree_at))
    played = Playground(method, chain(U, V), targets(0, 4, steps=4), lr=0.1, batch_size=1).play(3)
    assert [downloads[0].phase for downloads in played.downloads] == phases


def test_without_a_warmup_it_is_the_bare_method() -> None:
    auto, bare = (
        Playground(method, chain(U, V), targets(0, 4, steps=4), lr=0.1, batch_size=1).play(3)
        for method in (with_warmup(FedAvg(), 3, Auto(agree_at=-1.0)), FedAvg())
    )
    for name, value in bare.params[-1].items():
        assert torch.equal(auto.params[-1][name], value)


@pytest.mark.parametrize(
    ("losses", "flat"),
    [
        ([1.0, 0.5, 0.3, 0.2, 0.1], False),  # too early to tell
        ([3.0 * 0.9**t for t in range(40)], False),  # falls as steeply as ever
        ([2.0] * 20 + [1.0] * 8, False),  # falls
        ([2.0] * 20 + [1.0] * 20, True),
        ([2.0] * 20 + [0.0] * 20, True),
        ([2.0 + 0.01 * (t % 2) for t in range(60)], False),  # nothing was learnt yet
        ([2.0] * 30 + [1.9, 1.7, 1.4, 1.0, 0.8], False),  # slow to begin with
    ],
)
def test_a_warmup_is_over_when_the_loss_has_fallen_and_falls_no_more(losses: list[float], flat: bool) -> None:
    assert Auto().is_flat(losses) is flat


def test_a_warmup_that_ends_by_itself_goes_on_after_a_stop_to_the_same_numbers(tmp_path: Path) -> None:
    def go_on(out: Path, **more: Any) -> fedpews.Result:
        method = with_warmup(Scaffold(), 30, Auto(flat_at=1.0, learnt_at=0.01))
        return fedpews.run(
            data={"name": "synthetic-3.2k", "partition": "parity"},
            rounds=32,
            train={"lr": 0.05},
            method=method,
            runtime={"engine": "eager"},
            out=out,
            **more,
        )

    whole = go_on(tmp_path / "whole")
    go_on(tmp_path / "parts", callbacks=[Callback(round=lambda records: records[0]["round"] == 17)])
    parts = go_on(tmp_path / "parts", resume=True)

    phases = [record["phase"] for record in whole.rounds]
    assert phases[:2] == ["train", "warmup"]
    assert 20 <= phases.count("warmup") < 29  # it ended before its limit
    first, second = (
        [{key: value for key, value in record.items() if key != "seconds"} for record in run.rounds]
        for run in (whole, parts)
    )
    assert first == second
