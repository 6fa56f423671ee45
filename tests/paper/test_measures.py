"""What is read off a run, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedpews.paper.activations import activation_overlap, layer_sums
from fedpews.paper.measures import MEASURES, spread
from fedpews.tasks.names import Goal


def records(accuracies: list[float], warm: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "seed": 0,
            "round": t,
            "accuracy": accuracy,
            "seconds": 3.0 if t <= warm else 2.0,
            "phase": "warmup" if t <= warm else "train",
            "density": 0.4,
            "bytes_up": 50 if t <= warm else 100,
            "bytes_down": 200,
        }
        for t, accuracy in enumerate(accuracies, 1)
    ]


def test_measures_of_a_run() -> None:
    run = records([0.2, 0.5, 0.9, 0.8, 0.7], warm=2)

    read = {
        name: measure.read(run, Goal(value=0.75))
        for name, measure in MEASURES.items()
        if name not in ("activation_overlap", "coverage")
    }

    assert read["final"] == pytest.approx(70)
    assert read["late"] == pytest.approx(70)  # a tenth of five rounds is the last one
    assert MEASURES["late"].read(records([0.0] * 18 + [0.4, 0.6]), Goal(value=0.75)) == pytest.approx(50)
    assert read["rounds"] == 3
    assert read["seconds"] == 8  # 3 + 3 + 2
    assert read["omega"] == 1.5  # 3 / 2
    assert read["density"] == pytest.approx(0.4)
    assert read["upload"] == 0.5
    assert read["kilobytes"] == pytest.approx(0.28)  # (2 · 250 + 3 · 300) / 5 bytes
    assert MEASURES["rounds"].read(run, Goal(value=0.95)) == math.inf
    assert math.isnan(MEASURES["omega"].read(records([0.1], warm=0), Goal(value=0.5)))


def test_a_spread_counts_the_seeds_that_did_not_arrive() -> None:
    assert spread([100.0, 120.0, math.inf], 1) == "110.0 ± 14.1 (2 of 3 seeds)"  # √(2·10²/1) = 14.14


def test_layer_sums_are_what_the_next_layer_reads() -> None:
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
    params = {name: value.detach() for name, value in model.named_parameters()}
    params["0.weight"] = torch.tensor([[1.0], [-1.0]])

    (sums,) = layer_sums(model, params, torch.tensor([[2.0], [3.0], [-1.0]]))

    assert sums.tolist() == [5.0, 1.0]  # relu(x), relu(−x) summed over 2, 3, −1


def test_a_closed_part_neither_fires_nor_feeds_the_next_layer() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(2, 2, bias=False), nn.ReLU())))
    ones = {name: torch.ones(2, 2) for name, _ in model.named_parameters()}

    first, second = layer_sums(
        model, ones, torch.tensor([[1.0, 2.0]]), masks=[torch.tensor([True, False])] * 2
    )

    assert first.tolist() == [3.0, 0.0]
    assert second.tolist() == [3.0, 0.0]  # 3 + 0, not 3 + 3


def test_activation_overlap_is_what_two_clients_neurons_have_in_common() -> None:
    first, second = [torch.tensor([3.0, 1.0])], [torch.tensor([1.0, 1.0])]

    assert activation_overlap([first, second]) == pytest.approx(0.75)  # min(¾, ½) + min(¼, ½)
    assert activation_overlap([first, first]) == pytest.approx(1)


def test_activation_overlap_sees_that_interleaved_neurons_are_disjoint() -> None:
    even, odd = torch.tensor([2.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 5.0])

    assert activation_overlap([[even, even], [odd, even]]) == pytest.approx(
        0.5
    )  # 0 in one layer, 1 in the other


def test_a_run_that_never_arrives_counts_with_all_its_rounds_and_seconds() -> None:
    run = records([0.2, 0.5, 0.6], warm=1)
    assert MEASURES["rounds"].restricted(run, Goal(value=0.9)) == 3
    assert MEASURES["seconds"].restricted(run, Goal(value=0.9)) == 7  # 3 + 2 + 2
    assert MEASURES["rounds"].restricted(run, Goal(value=0.5)) == 2


def test_a_measure_of_any_metric_is_made_of_its_name() -> None:
    run = [
        {"metrics": {"mae": 3.0}, "validation": {"mae": 1.0}},
        {"metrics": {"mae": 2.0}, "validation": {"mae": 1.5}},
    ]

    assert MEASURES["final:mae"].read(run, Goal()) == 2.0
    assert MEASURES["validation:mae"].read(run, Goal()) == 1.5
    assert not MEASURES["final:mae"].higher_is_better
    assert MEASURES["final:auroc"].higher_is_better
    assert math.isnan(MEASURES["validation:mae"].read([{"metrics": {"mae": 3.0}}], Goal()))


def test_late_validation_is_the_mean_over_the_last_tenth_of_the_rounds_that_were_evaluated() -> None:
    run = [{"validation": {"accuracy": number / 20}} if number % 2 else {} for number in range(40)]
    # twenty rounds have a number; the last two are 37/20 and 39/20
    assert MEASURES["late_validation"].read(run, Goal()) == pytest.approx(190)
    assert math.isnan(MEASURES["late_validation"].read([{"accuracy": 1.0}], Goal()))
