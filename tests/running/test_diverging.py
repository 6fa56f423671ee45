"""A client whose numbers break down: found in its round, named, and stopped at or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpews
from fedpews.engines.engine import LIMIT, Done, sort_out
from fedpews.errors import RunFailed
from fedpews.methods.contract import Upload
from fedpews.results.checkpoint import newest
from fedpews.results.records import read_rounds
from fedpews.testing import small_network

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))


def with_norms() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def run(scale: float, out: Path | None = None, **more: Any) -> fedpews.Result:
    """Three clients; one of them has inputs of another scale."""
    clients = [(X[:20], Y[:20]), (X[20:40] * scale, Y[20:40]), (X[40:], Y[40:])]
    given: dict[str, Any] = {"model": model, "method": "fedavg", "rounds": 4, "train": {"batch_size": 10}}
    return fedpews.run(clients=clients, test=(X, Y), out=out, runtime={"engine": "eager"}, **given | more)


@pytest.mark.parametrize("scale", [1e19, 1e25, 1e30])
@pytest.mark.parametrize("method", ["fedavg", "scaffold+pews"])
def test_a_client_that_diverges_is_named_in_its_round_with_its_seed(scale: float, method: str) -> None:
    with pytest.raises(RunFailed, match="client 1 diverges in round 1 of seed 0: "):
        run(scale, method=method)


@pytest.mark.parametrize("method", ["fedavg", "fedavg+fedbn"])
def test_norm_layers_do_not_hide_it_not_even_those_that_stay_at_the_client(method: str) -> None:
    with pytest.raises(RunFailed, match="client 1 diverges in round 1 of seed 0: "):
        run(1e19, method=method, model=with_norms)


def test_clients_that_are_well_are_not_blamed() -> None:
    assert len(run(100.0).rounds) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10 * LIMIT])
def test_what_a_client_sends_is_looked_at_and_what_it_keeps_too(value: float) -> None:
    net = small_network()
    fine, wrong = net.initial(), net.initial()
    wrong["0.bias"] = torch.full_like(wrong["0.bias"], value)
    sent = [Upload(i, 1, 8, 2, 0.5, params) for i, params in enumerate((fine, wrong, fine))]
    # what is kept may hold squares, so only there the limit is larger
    kept = (
        {"controls": {"w": torch.tensor([value])}}
        if value != 10 * LIMIT
        else {"w": torch.tensor([LIMIT**2.1])}
    )
    good, bad = sort_out(net, [Done(0, 0, {}, sent[0]), Done(0, 1, {}, sent[1]), Done(0, 2, kept, sent[2])])
    assert [done.client for done in good] == [0]
    assert [done.client for done in bad] == [1, 2]
    assert "0.bias" in bad[0].reason


def test_large_but_finite_numbers_of_several_clients_are_no_divergence() -> None:
    # each is within the limit, their length taken together is not, so everybody is looked at alone
    net = small_network()
    params = net.initial() | {"0.bias": torch.full_like(net.initial()["0.bias"], 0.9 * LIMIT)}
    sent = [Done(0, i, {}, Upload(i, 1, 8, 2, 0.5, params)) for i in range(3)]
    good, bad = sort_out(net, sent)
    assert (len(good), bad) == (3, [])


def test_leaving_it_out_goes_on_with_the_others_and_is_counted() -> None:
    result = run(1e25, train={"batch_size": 10, "diverged": "leave-out"})
    assert [record["left_out"] for record in result.rounds] == [[1]] * 4
    alone = fedpews.run(
        clients=[(X[:20], Y[:20]), (X[40:], Y[40:])], test=(X, Y), model=model, method="fedavg", rounds=1,
        train={"batch_size": 10}, runtime={"engine": "eager"},
    )  # fmt: skip
    # the third client is another number there, and so draws other batches: its first is the same
    assert result.rounds[0]["bytes_up"] == alone.rounds[0]["bytes_up"]


def test_a_round_in_which_everybody_diverges_stops_whatever_was_asked() -> None:
    with pytest.raises(RunFailed, match=r"diverges in round 1 .*and 2 more"):
        run(1.0, train={"lr": 1e30, "batch_size": 10, "diverged": "leave-out"})


def test_it_stops_with_a_checkpoint_of_the_last_good_round_and_a_lower_rate_goes_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "fedavg", "rounds": 4}
    # a milestone that makes the rate grow, where others make it fall
    growing = {"batch_size": 10, "lr": 0.01, "lr_milestones": [3], "lr_decay": 1e25}
    with pytest.raises(RunFailed, match=r"diverges in round 4 .*saved as of round 3.*--resume"):
        run(1.0, tmp_path, train=growing, **settings)
    found = newest(tmp_path)
    assert found is not None
    assert found.round == 3
    lower = growing | {"lr": 1e-27}
    result = fedpews.run(
        clients=[(X[:20], Y[:20]), (X[20:40], Y[20:40]), (X[40:], Y[40:])], test=(X, Y), model=model,
        out=tmp_path, resume=True, train=lower, runtime={"engine": "eager", "resume": "changed"}, **settings,
    )  # fmt: skip
    assert [record["round"] for record in read_rounds(tmp_path)] == [1, 2, 3, 4]
    assert result.summary["went_on"] == ["after round 3: train.lr was 0.01 and is 1e-27"]
