"""What the server makes of Δ = x_g − aggregate: two rounds by hand, and every method with every optimiser."""

from __future__ import annotations

import math

import pytest
import torch

from fedpews.compose import METHODS, SERVERS, method_fields
from fedpews.compose import method as make
from fedpews.methods.average import Average
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.server_optimizers import (
    SGD,
    Adagrad,
    Adam,
    Momentum,
    ServerOptimizer,
    Yogi,
)
from fedpews.testing import Playground, check_finite, small_clients, small_network
from tiny import chain, point, targets


def two_steps(server: ServerOptimizer) -> list[float]:
    """x = 1 with aggregates 0.5 and then x − 0.25: Δ is 0.5 and 0.25."""
    x, slots = torch.tensor(1.0), server.start(torch.tensor(1.0))
    seen = []
    for delta in (0.5, 0.25):
        x, slots = server.approach(x, x - delta, slots)
        seen.append(x.item())
    return seen


def test_a_server_rate_scales_the_step() -> None:
    assert two_steps(SGD(lr=0.1)) == pytest.approx([0.95, 0.925])


def test_fedavgm_remembers_its_direction() -> None:
    # v = .5, then .9·.5 + .25 = .7
    assert two_steps(Momentum(lr=0.1)) == pytest.approx([0.95, 0.88])


@pytest.mark.parametrize(
    ("server", "seconds"),
    [
        # v starts at τ² = 1e-6
        (Adam(), [0.99 * 1e-6 + 0.01 * 0.25, 0.99 * (0.99 * 1e-6 + 0.01 * 0.25) + 0.01 * 0.0625]),
        # sign(1e-6 − .25) = −1: v grows by .01·.25; then sign(.0025 − .0625) = −1 again
        (Yogi(), [1e-6 + 0.01 * 0.25, 1e-6 + 0.01 * 0.25 + 0.01 * 0.0625]),
    ],
)
def test_adam_and_yogi_divide_by_the_root_of_their_second_moment(
    server: ServerOptimizer, seconds: list[float]
) -> None:
    first = [0.1 * 0.5, 0.9 * 0.05 + 0.1 * 0.25]  # m with β₁ = .9
    x, expected = 1.0, []
    for m, v in zip(first, seconds, strict=True):
        x -= 0.1 * m / (math.sqrt(v) + 1e-3)
        expected.append(x)
    assert two_steps(server) == pytest.approx(expected)


def test_adagrad_adds_up_squares_and_has_no_first_moment() -> None:
    a = 1 - 0.1 * 0.5 / (math.sqrt(1e-6 + 0.25) + 1e-3)
    b = a - 0.1 * 0.25 / (math.sqrt(1e-6 + 0.25 + 0.0625) + 1e-3)
    assert two_steps(Adagrad()) == pytest.approx([a, b])


def test_an_element_nobody_owns_keeps_value_and_slots_whatever_momentum_it_has() -> None:
    net = chain([1.0, 2.0], [3.0, 4.0])
    old = net.initial()
    state = Momentum().init(net, old)
    for tree in state["server"].values():
        tree["velocity"] += 5.0
    half = Average((1.0,), (net.graph.expand(torch.tensor([True, False])),))
    moved = Momentum().move(net, state, {n: v - 1 for n, v in old.items()}, [], half)
    new, kept = moved["params"], moved["server"]
    # owned: v = .9·5 + 1 = 5.5
    assert new["0.weight"].flatten().tolist() == pytest.approx([1.0 - 5.5, 2.0])
    assert kept["0.weight"]["velocity"].flatten().tolist() == pytest.approx([5.5, 5.0])


def test_fedavg_with_a_server_rate_goes_part_of_the_way() -> None:
    # the mean of the clients is 1.19 (see test_base_methods), so half way from 1 is 1.095
    played = Playground(FedAvg(server=SGD(lr=0.5)), point(), targets(0, 4), batch_size=1).play(1)
    assert played.params[0]["weight"].item() == pytest.approx(1.095)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", [name for name in METHODS if "server" in method_fields(name)])
def test_every_method_that_averages_takes_every_server_optimiser(name: str, server: str) -> None:
    method = make(f"{name}+{server}", server={"lr": 0.01})
    net = small_network()
    played = Playground(method, net, small_clients()).partly(2)
    check_finite(played)
    plain = Playground(make(name), net, small_clients()).partly(2)
    assert any(not torch.equal(plain.params[1][n], played.params[1][n]) for n in net.names)
