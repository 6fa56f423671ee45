"""FedSelect and FedALA: steps by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.methods.contract import Cohort, Download
from fedpews.methods.fedala import FedALA
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.personal_masks import FedSelect
from fedpews.neurons.network import Batch, Network
from fedpews.testing import Playground, check_same, small_clients, small_network
from fedpews.trees import Nest
from tiny import chain, point


def download(method: FedSelect | FedALA, net: Network) -> Download:
    return method.broadcast(method.init(net, net.initial(), 1), Cohort(2, (0,), 1, seed=0))


def steps(method: FedSelect | FedALA, net: Network, local: Nest, label: int, count: int) -> list[Tensor]:
    """All weights after each of so many steps of one sample (1, label), η = 0.1."""
    seen, batch = [], Batch(torch.ones(1, 1), torch.tensor([label]))
    for _ in range(count):
        local, _ = method.step(net, local, batch, torch.zeros(0), 0.1)
        seen.append(torch.cat([local["params"][name].flatten() for name in net.names]))
    return seen


def test_the_weights_that_moved_most_become_the_clients_own() -> None:
    own, moved = torch.tensor([[False, False], [True, False]]), torch.tensor([[0.1, 0.5], [9.0, 0.3]])
    # of three others, three less round(.66·3) = 2: one, that moved by .5
    assert FedSelect(grow=0.34).grown(own, moved).tolist() == [[False, True], [True, False]]
    assert FedSelect(grow=1.0).grown(own, moved).all()
    # a quarter is more than a fifth
    assert torch.equal(FedSelect(grow=1.0, limit=0.2).grown(own, moved), own)


def test_first_the_clients_own_weights_move_then_the_common_ones() -> None:
    net, method = chain([1.0, 2.0], [0.5, -1.0]), FedSelect()
    first = {"0.weight": torch.tensor([[True], [False]]), "1.weight": torch.tensor([[True, False]])}
    memory = {
        "own": first,
        "params": net.initial(),
        "before": net.initial(),
        "rounds": torch.tensor(1),
        "steps": torch.tensor(2),
    }
    seen = steps(method, net, method.start(net, download(method, net), memory), label=0, count=2)
    # output .5 − 2 = −1.5: u₀ = 1 + .1·1.5·.5, v₀ = .5 + .1·1.5·1
    assert seen[0].tolist() == pytest.approx([1.075, 2.0, 0.65, -1.0])
    # output 1.075·.65 − 2 = −1.30125: u₁ = 2 − .1·1.30125·1, v₁ = −1 + .1·1.30125·2
    assert seen[1].tolist() == pytest.approx([1.075, 1.869875, 0.65, -0.73975])


def test_masks_grow_after_three_rounds_and_what_is_a_clients_own_is_neither_sent_nor_averaged() -> None:
    net = small_network()
    played = Playground(FedSelect(), net, small_clients()).play(6)
    for round, uploads in enumerate(played.uploads, 1):
        for upload in uploads:
            assert upload.mask is not None
            # a quarter of the sixteen weights, from the fifth round on
            assert int((~upload.mask["2.weight"]).sum()) == (4 if round > 4 else 0)
    last = played.uploads[-1]
    masks = [upload.mask["2.weight"] for upload in last]  # type: ignore[index]
    assert not all(torch.equal(mask, masks[0]) for mask in masks[1:])
    for index in range(16):
        owners = [u for u, mask in zip(last, masks, strict=True) if mask.flatten()[index]]
        expected = [u.params["2.weight"].flatten()[index] for u in owners]
        before = played.params[-2]["2.weight"].flatten()[index]
        torch.testing.assert_close(
            played.params[-1]["2.weight"].flatten()[index],
            sum(expected) / len(expected) if owners else before,
        )
    # a client's model has its own weights, whatever the server's are
    method, memory = FedSelect(), played.memories[0]
    personal = method.personal(net, download(method, net), memory)["2.weight"]
    own = memory["own"]["2.weight"]
    assert torch.equal(personal[own], memory["params"]["2.weight"][own])
    assert torch.equal(personal[~own], net.initial()["2.weight"][~own])


def test_fedselect_is_fedavg_as_long_as_masks_are_empty() -> None:
    net, clients = small_network(), small_clients()
    plain = Playground(FedAvg(), net, clients).play(1)
    check_same(Playground(FedSelect(), net, clients).play(1), plain, "it differs", deep=False)


def test_fedselect_refuses_momentum() -> None:
    with pytest.raises(ConfigError, match="fedselect needs plain SGD"):
        FedSelect(momentum=0.9)


def test_fedala_first_learns_how_far_to_follow_and_then_the_model() -> None:
    net, method = point(1.0), FedALA(names="all", weight_lr=0.05, weight_steps=2)
    memory = {"params": {"weight": torch.tensor([[3.0]])}, "weights": {"weight": torch.tensor([[1.0]])}}
    local = method.start(net, download(method, net), memory)
    assert local["params"]["weight"].item() == 1.0  # 3 + (1 − 3)·1
    seen = steps(method, net, local, label=4, count=3)
    # W = 1 − .05·(−3)·(−2) = .7, so 3 − 1.4; W = .7 − .05·(−2.4)·(−2) = .46, so 3 − .92; then 2.08 + .1·1.92
    assert torch.cat(seen).tolist() == pytest.approx([1.6, 2.08, 2.272])


def test_fedala_keeps_its_weights_between_zero_and_one_and_takes_lower_layers_as_they_come() -> None:
    net = small_network()
    played = Playground(FedALA(weight_lr=50.0, weight_steps=1), net, small_clients()).play(3)
    kept = [value for memory in played.memories.values() for value in memory["weights"].values()]
    assert {name for memory in played.memories.values() for name in memory["weights"]} == {
        "4.weight",
        "4.bias",
    }
    assert all(bool(((value >= 0) & (value <= 1)).all()) for value in kept)
    assert any(bool((value < 1).any()) for value in kept)


def test_fedala_is_fedavg_in_a_clients_first_round_and_with_the_global_model_throughout() -> None:
    net, clients = small_network(), small_clients()
    plain = Playground(FedAvg(), net, clients).play(3)
    without = Playground(FedALA(weight_steps=0), net, clients).play(3)
    for a, b in zip(without.params, plain.params, strict=True):
        assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in net.names)
    mixing = Playground(FedALA(weight_steps=1), net, clients).play(2)
    assert torch.equal(mixing.params[0]["4.weight"], plain.params[0]["4.weight"])
    assert not torch.allclose(mixing.params[1]["4.weight"], plain.params[1]["4.weight"], atol=1e-5)
