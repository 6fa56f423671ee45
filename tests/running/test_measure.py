"""What is kept of every round: masks bit by bit, θ's spread, and whether updates agree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedpews.callbacks import Callback
from fedpews.errors import Interrupted
from fedpews.experiment import Experiment
from fedpews.measure import COMPARED_CLIENTS, observe_neurons, update_cosine
from fedpews.methods.contract import Download, Upload
from fedpews.neurons.network import Network
from fedpews.results.masks import BINS, Ownership, read_federation, read_neurons
from fedpews.running import run

NET = Network(
    nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), torch.zeros(4, 2)
)


def upload(client: int, step: Tensor, neurons: Tensor | None = None, theta: Tensor | None = None) -> Upload:
    params = {name: value.clone() for name, value in NET.initial().items()}
    params["0.weight"] = params["0.weight"] + step
    extra = {} if theta is None else {"theta": {"neurons": theta}}
    return Upload(client, 1, 10, 1, 0.5, params, neurons, extra=extra)


def cosine(uploads: list[Upload]) -> float | None:
    start = Download(1, "train", len(uploads), NET.initial())
    return update_cosine(NET, uploads, [start] * len(uploads), [up.ownership(NET) for up in uploads])


def test_updates_that_pull_apart_have_a_cosine_of_minus_one() -> None:
    step = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])

    assert cosine([upload(0, step), upload(1, -3 * step)]) == pytest.approx(-1, abs=1e-5)


def test_the_cosine_looks_only_at_what_both_own() -> None:
    # neuron 0 (a row of 0.weight) is common: there they agree; on neuron 1, owned by one each, they would not
    a = upload(0, torch.tensor([[1.0, 0.0], [5.0, 5.0], [0.0, 0.0]]), torch.tensor([1, 1, 0, 1, 1]).bool())
    b = upload(1, torch.tensor([[2.0, 0.0], [-9.0, 0.0], [0.0, 0.0]]), torch.tensor([1, 0, 1, 1, 1]).bool())

    assert cosine([a, b]) == pytest.approx(1, abs=1e-5)


def test_the_cosine_of_three_is_the_mean_over_pairs() -> None:
    steps = [torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)]
    steps[0][0, 0], steps[1][0, 1], steps[2][0, 0] = 1.0, 1.0, -1.0

    # pairs: at right angles 0, opposite -1, at right angles 0
    assert cosine([upload(i, step) for i, step in enumerate(steps)]) == pytest.approx(-1 / 3, abs=1e-5)


def test_clients_with_nothing_in_common_have_no_cosine() -> None:
    a = upload(0, torch.ones(3, 2), torch.tensor([1, 0, 0, 1, 0]).bool())
    b = upload(1, torch.ones(3, 2), torch.tensor([0, 1, 1, 0, 1]).bool())

    assert cosine([a, b]) is None
    assert cosine([a]) is None


def test_of_a_large_cohort_clients_from_all_over_it_are_compared() -> None:
    sign = [1.0] * 2 * COMPARED_CLIENTS + [-1.0] * 2 * COMPARED_CLIENTS

    found = cosine([upload(i, s * torch.ones(3, 2)) for i, s in enumerate(sign)])

    # 4 of each sign: 2 · 6 pairs agree, 16 do not
    assert found == pytest.approx((12 - 16) / 28, abs=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_of_a_large_tensor_evenly_spread_elements_are_compared(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of the six elements of 0.weight every third is left, and of larger ones as many; the first row moves apart, the
    # others together
    steps = [
        torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]),
        torch.tensor([[-1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]),
    ]
    owned = torch.ones(5).bool() if masked else None
    sent = [upload(i, step, owned) for i, step in enumerate(steps)]
    assert cosine(sent) == pytest.approx(4 / 6, abs=1e-5)
    monkeypatch.setattr("fedpews.measure.COMPARED_ELEMENTS", 2)
    # elements 0 and 3 of 0.weight: (1, 1) and (-1, 1)
    assert cosine(sent) == pytest.approx(0, abs=1e-5)


def test_masks_are_kept_bit_by_bit() -> None:
    masks = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]]).bool()

    found = observe_neurons(NET, 7, 3, [upload(i, torch.zeros(3, 2), m) for i, m in enumerate(masks)], 2)

    assert found is not None
    again = Ownership(**json.loads(json.dumps(found.record())))
    assert again.masks().tolist() == masks.tolist()
    assert again.shares().tolist() == [0.5, 0.5, 1.0, 0.5, 0.5]
    assert len(found.owned or "") == 4  # 10 bits are 2 bytes


def test_of_many_clients_only_the_owners_are_counted() -> None:
    masks = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1]]).bool()

    found = observe_neurons(NET, 0, 1, [upload(i, torch.zeros(3, 2), m) for i, m in enumerate(masks)], 201)

    assert found is not None
    assert found.owned is None
    assert found.clients == ()
    assert found.shares() == pytest.approx([0.5, 0, 1, 0.5, 0.5], abs=1 / 255)


def test_the_histogram_of_theta_has_a_row_for_each_layer() -> None:
    theta = torch.tensor([0.0, 0.5, 1.0, 0.99, 0.02])

    found = observe_neurons(NET, 0, 1, [upload(0, torch.zeros(3, 2), theta > 0.5, theta)], 1)

    assert found is not None
    assert found.theta is not None
    first, second = np.array(found.theta)
    assert first.nonzero()[0].tolist() == [0, BINS // 2, BINS - 1]
    assert second.nonzero()[0].tolist() == [0, BINS - 1]


def test_without_masks_nothing_is_kept() -> None:
    assert observe_neurons(NET, 0, 1, [upload(0, torch.zeros(3, 2))], 1) is None


def test_late_rounds_are_kept_every_tenth() -> None:
    sent = [upload(0, torch.zeros(3, 2), torch.ones(5).bool())]

    kept = [round for round in range(95, 131) if observe_neurons(NET, 0, round, sent, 1) is not None]

    assert kept == [95, 96, 97, 98, 99, 100, 110, 120, 130]


def tiny(**changes: object) -> Experiment:
    return Experiment(
        rounds=6,
        seeds=[0, 1],
        method={"name": "fedavg+pews"},
        warmup={"rounds": 4},
        train={"steps": 1},
        data={"train_per_class": 4, "test_per_class": 2},
        model={"hidden": [4, 4]},
        runtime={"engine": "eager", "checkpoint_every": 2},
        **changes,
    )


def test_a_run_keeps_masks_of_every_warmup_round_and_says_who_takes_part(tmp_path: Path) -> None:
    result = run(tiny(), out=tmp_path)

    kept = read_neurons(tmp_path)
    assert [(one.seed, one.round) for one in kept] == [(s, t) for t in (1, 2, 3, 4) for s in (0, 1)]
    last = {one.seed: one for one in kept}
    for seed in (0, 1):
        for client, mask in result.neurons[seed].items():
            assert last[seed].masks()[client].tolist() == mask.tolist()
    about = read_federation(tmp_path)
    assert [layer["size"] for layer in about["layers"]] == [4, 4]
    assert np.sum(about["counts"]) == 4 * 4
    assert all(-1 <= record["update_cosine"] <= 1 for record in result.rounds)


def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    def stop(records: object) -> None:
        if records[0]["round"] == 3:  # type: ignore[index]
            raise Interrupted("killed after a round that is not a checkpoint")

    run(tiny(), out=tmp_path / "straight")
    with pytest.raises(Interrupted):
        run(tiny(), out=tmp_path / "stopped", callbacks=[Callback(round=stop)])
    run(tiny(), out=tmp_path / "stopped", resume=True)

    for name in ("neurons.jsonl", "federation.json"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
