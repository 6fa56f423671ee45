"""Weights that no client owns in a warmup round: what the server does with them, and how the model is evaluated."""

from __future__ import annotations

import pytest
import torch

import fedpews
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.feddyn import FedDyn
from fedpews.methods.fednova import FedNova
from fedpews.methods.scaffold import Scaffold
from fedpews.methods.server_optimizers import SGD, Adagrad, Adam, Momentum, ServerOptimizer, Yogi
from fedpews.testing import Playground, small_clients, small_network
from fedpews.testing.playground import Played
from fedpews.trees import Tree
from fedpews.warmup import Fixed, Learned, with_warmup


def play(method: fedpews.Method, rounds: int, *cohorts: tuple[int, ...]) -> tuple[Playground, Played]:
    ground = Playground(method, small_network(), small_clients(2), lr=0.1)
    return ground, ground.play(rounds, (lambda round: cohorts[round - 1]) if cohorts else None)


def crossing(params: Tree) -> torch.Tensor:
    """The weights between the two clients' halves of the hidden layers of four: nobody's with fixed masks."""
    weight = params["2.weight"]
    return torch.cat([weight[:2, 2:], weight[2:, :2]])


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_zero_takes_the_servers_rate_of_a_weight_that_nobody_owns(rate: float) -> None:
    method = with_warmup(FedAvg(server=SGD(lr=rate)), 3, Fixed(unowned="zero"))
    ground, played = play(method, 4)
    first = crossing(ground.net.initial())
    for round in (1, 2, 3):
        # x_g − η_g·x_g
        torch.testing.assert_close(crossing(played.params[round - 1]), first * (1 - rate) ** round)
    assert not torch.equal(
        crossing(played.params[3]), crossing(played.params[2])
    )  # all train after the warmup


@pytest.mark.parametrize(
    "server", [Momentum(), Adagrad(), Yogi(), Adam()], ids=lambda one: type(one).__name__
)
def test_zero_is_what_any_server_optimiser_moves_to(server: ServerOptimizer) -> None:
    ground, played = play(with_warmup(FedAvg(server=server), 2, Fixed(unowned="zero")), 2)
    value = crossing(ground.net.initial())
    slots = server.start(value)
    for params in played.params:
        value, slots = server.approach(value, torch.zeros_like(value), slots)
        torch.testing.assert_close(crossing(params), value)


@pytest.mark.parametrize("unowned", ["keep", "zero"])
@pytest.mark.parametrize(
    "base", [FedAvg(), Scaffold(), FedNova(), FedDyn()], ids=lambda one: type(one).__name__
)
def test_every_base_method_keeps_or_zeroes_and_trains_what_is_owned_alike(base: FedAvg, unowned: str) -> None:
    masks = Fixed(unowned=unowned)  # type: ignore[arg-type]
    ground, played = play(with_warmup(base, 2, masks), 2)
    _, kept = play(with_warmup(base, 2, Fixed()), 2)
    expected = crossing(ground.net.initial())
    if unowned == "zero":
        expected = torch.zeros_like(expected)
    assert torch.equal(crossing(played.params[-1]), expected)
    # a client's own half never reads what is nobody's
    torch.testing.assert_close(played.params[-1]["2.weight"][:2, :2], kept.params[-1]["2.weight"][:2, :2])


def test_the_warmup_is_evaluated_with_what_a_client_of_the_round_owned() -> None:
    method = with_warmup(FedAvg(), 2, Fixed())
    ground, played = play(method, 2, (0, 1), (0,))
    params, seen = method.params(played.state), method.evaluated_params(ground.net, played.state)
    assert torch.equal(seen["2.weight"][:2, :2], params["2.weight"][:2, :2])
    assert not seen["2.weight"][2:].any()  # client 1 was not there
    assert not crossing(seen).any()
    assert torch.equal(seen["4.bias"], params["4.bias"])  # outputs belong to every client
    assert crossing(params).all()  # it is still there
    _, after = play(method, 3)
    assert method.evaluated_params(ground.net, after.state) is method.params(after.state)
    whole = with_warmup(FedAvg(), 2, Fixed(evaluate="all"))
    _, played = play(whole, 2)
    assert whole.evaluated_params(ground.net, played.state) is whole.params(played.state)


def test_with_zero_the_curve_of_the_warmup_is_that_of_keep_evaluated_by_the_owned() -> None:
    ground, kept = play(method := with_warmup(FedAvg(), 3, Fixed()), 3)
    _, zeroed = play(with_warmup(FedAvg(), 3, Fixed(unowned="zero")), 3)
    for name, value in method.evaluated_params(ground.net, kept.state).items():
        torch.testing.assert_close(value, zeroed.params[-1][name])


def test_a_neuron_that_nobody_owned_is_counted_as_dead_and_stays_so() -> None:
    method = with_warmup(FedAvg(), 1, Fixed(unowned="zero"))
    ground, played = play(method, 3, (0,), (0, 1), (0, 1))
    # two of the four neurons of both layers are client 1's
    assert method.measure(ground.net, played.state) == {"dead": 4}
    assert method.evaluated_params(ground.net, played.state) is method.params(played.state)
    _, kept = play(method := with_warmup(FedAvg(), 1, Fixed()), 1, (0,))
    assert method.measure(ground.net, kept.state) == {}


def test_a_run_records_dead_neurons_and_evaluates_by_the_owned() -> None:
    settings = {
        "rounds": 2,
        "seeds": [0],
        "train": {"server_lr": 1.0},
        "data": {"train_per_class": 20, "test_per_class": 10},
    }
    found = {
        (unowned, evaluate): fedpews.run(
            "synthetic-3.2k",
            method="fedavg+pews-fixed",
            warmup={"rounds": 1, "unowned": unowned, "evaluate": evaluate},
            **settings,
        ).rounds
        for unowned, evaluate in (("keep", "owned"), ("keep", "all"), ("zero", "all"))
    }
    kept, whole, zero = found.values()
    assert [record.get("dead") for record in zero] == [0, 0]
    assert "dead" not in kept[0]
    assert kept[0]["loss"] == pytest.approx(zero[0]["loss"]) != whole[0]["loss"]
    assert kept[1]["loss"] == pytest.approx(whole[1]["loss"]) != zero[1]["loss"]


def test_learned_masks_zero_and_evaluate_by_the_masks_that_were_uploaded() -> None:
    method = with_warmup(FedAvg(), 2, Learned(unowned="zero"))
    ground, played = play(method, 2)
    owned = ground.net.graph.covered(torch.stack([up.neurons for up in played.uploads[-1]]))  # type: ignore[misc]
    for name, mask in owned.items():
        assert not played.params[-1][name][~mask.expand_as(played.params[-1][name])].any()
