"""Random masks: dealt out or drawn, once or anew in every round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.methods.contract import Cohort
from fedpews.methods.fedavg import FedAvg
from fedpews.testing import Playground, small_clients, small_network
from fedpews.warmup import Random, with_warmup


def masks(random: Random, rounds: int = 3, count: int = 3) -> list[list[Tensor]]:
    """Each round's masks, one for each client."""
    method = with_warmup(FedAvg(), rounds, random)
    played = Playground(method, small_network(), small_clients(count)).play(rounds)
    return [
        [upload.neurons for upload in uploads if upload.neurons is not None] for uploads in played.uploads
    ]


def test_every_layer_is_dealt_out_and_no_neuron_twice() -> None:
    for drawn in masks(Random()):
        assert torch.stack(drawn).sum(0).tolist() == [1] * 8
        # four neurons a layer for three clients: 2, 1, 1
        assert [int(mask[:4].sum()) for mask in drawn] == [2, 1, 1]


def test_masks_stay_unless_they_are_redrawn() -> None:
    first, second, third = masks(Random())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    first, second, third = masks(Random(redraw=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(second, third, strict=True))


def test_with_a_density_each_client_draws_for_itself() -> None:
    (drawn,) = masks(Random(density=0.5), rounds=1)
    assert [int(mask[:4].sum()) for mask in drawn] == [2, 2, 2]
    assert not (torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[1], drawn[2]))


def test_another_seed_draws_other_masks() -> None:
    graph, cohort = small_network().graph, Cohort(1, (0,), 2, 0, run_seed=0)
    drawn = [Random().assign(graph, 0, replace(cohort, run_seed=seed)) for seed in range(5)]
    assert not all(torch.equal(drawn[0], other) for other in drawn)


def test_too_many_clients_for_a_layer_are_told_so() -> None:
    with pytest.raises(ConfigError, match=r"too few for 5 clients; set warmup\.density"):
        masks(Random(), rounds=1, count=5)
