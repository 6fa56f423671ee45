"""Averages that stand bad clients, with every element's owners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpews import run
from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import Upload
from fedpews.methods.robust import RobustAverage, choose_krum, clip, make_robust


def upload(client: int, value: float | torch.Tensor) -> Upload:
    tensor = value if isinstance(value, torch.Tensor) else torch.full((4,), value)
    return Upload(client, 1, 10, 1, 0.5, {"w": tensor})


@given(seed=st.integers(0, 10**6), clients=st.integers(1, 7), trim=st.sampled_from([0.0, 0.1, 0.2, 0.4]))
@settings(max_examples=100, deadline=None)
def test_median_and_trimmed_mean_are_those_of_each_elements_owners(
    seed: int, clients: int, trim: float
) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=(clients, 3, 2))
    masks = random.random((clients, 3, 2)) < 0.6
    old = random.normal(size=(3, 2))
    trees = [{"w": torch.from_numpy(value)} for value in values]
    owned = tuple({"w": torch.from_numpy(mask)} for mask in masks)
    kept = {"w": torch.from_numpy(old)}
    median = RobustAverage((1.0,) * clients, owned, rule="median")(trees, kept)["w"]
    trimmed = RobustAverage((1.0,) * clients, owned, rule="trimmed", trim=trim)(trees, kept)["w"]
    for place in np.ndindex(3, 2):
        mine = np.sort(values[(slice(None), *place)][masks[(slice(None), *place)]])
        drop = min(int(trim * len(mine)), max(len(mine) - 1, 0) // 2)
        expected = np.median(mine) if len(mine) else old[place]
        inner = mine[drop : len(mine) - drop].mean() if len(mine) else old[place]
        assert float(median[place]) == pytest.approx(expected, abs=1e-12)
        assert float(trimmed[place]) == pytest.approx(inner, abs=1e-12)


@pytest.mark.parametrize("rule", ["median", "trimmed", "krum", "clipped"])
@pytest.mark.parametrize("bad", [1e30, -50.0])
def test_one_bad_client_of_five_does_not_move_the_average_far(rule: Any, bad: float) -> None:
    uploads = [upload(i, 1.0 + 0.1 * i) for i in range(4)] + [upload(4, bad)]
    plain = Average((1.0,) * 5, (None,) * 5)
    old, values = {"w": torch.zeros(4)}, [u.params for u in uploads]
    robust = make_robust(plain, uploads, rule, byzantine=1)(values, old)["w"]
    # the honest are in 1.0 to 1.3; a clipped one still has one vote of five, of the median's length
    low, high = (0.6, 1.3) if rule == "clipped" else (1.0, 1.3)
    assert bool(((robust >= low) & (robust <= high)).all()), robust
    assert not bool(((plain(values, old)["w"] >= 0.6) & (plain(values, old)["w"] <= 1.3)).all())


def test_what_a_client_does_not_own_is_never_looked_at() -> None:
    garbage = torch.tensor([float("nan"), 1.0])
    masks = ({"w": torch.tensor([False, True])}, None)
    average = RobustAverage((1.0, 1.0), masks, rule="median")
    out = average([{"w": garbage}, {"w": torch.tensor([5.0, 3.0])}], {"w": torch.zeros(2)})
    assert out["w"].tolist() == [5.0, 2.0]
    clipped = clip([{"w": garbage}, {"w": torch.tensor([5.0, 3.0])}], masks, {"w": torch.zeros(2)})
    assert torch.isfinite(clipped[1]["w"]).all()


def test_krum_keeps_those_who_lie_together() -> None:
    uploads = [upload(i, float(v)) for i, v in enumerate((1.0, 1.1, 9.0, 0.9, 1.05, -7.0, 1.0))]
    assert choose_krum(uploads, (None,) * 7) == [0, 1, 3, 4, 6]  # f = (7 − 3)/2 = 2
    with pytest.raises(ConfigError, match="at least 7"):
        choose_krum(uploads[:6], (None,) * 6, byzantine=2)


def test_krum_compares_only_what_both_own() -> None:
    left, right = torch.tensor([True, True, False, False]), torch.tensor([True, True, True, True])
    values = [torch.tensor([1.0, 1.0, 1e30, 1e30]), torch.ones(4), torch.full((4,), 3.0)]
    masks = ({"w": left}, {"w": right}, {"w": right})
    assert choose_krum([upload(i, v) for i, v in enumerate(values)], masks, byzantine=0) == [0, 1, 2]


@pytest.mark.parametrize("aggregate", ["median", "trimmed", "krum", "clipped"])
@pytest.mark.parametrize("method", ["fedavg+pews", "scaffold+pews", "fednova", "fedprox+fedadam+pews-fixed"])
def test_every_rule_goes_with_methods_and_warmups(aggregate: str, method: str) -> None:
    x, y = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    clients = [(x[i::4], y[i::4]) for i in range(4)]
    warmup = {"rounds": 1} if "pews" in method else {}
    found = run(
        clients=clients,
        test=(x, y),
        rounds=2,
        method=method,
        warmup=warmup,
        train={"aggregate": aggregate},
    )
    assert len(found.rounds) == 2
    assert all(bool(torch.isfinite(value).all()) for value in found.params[0].values())
