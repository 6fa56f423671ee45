"""FedAvg, FedProx, SCAFFOLD, FedNova and MOON: two clients, two steps, every number by hand.

Everywhere w starts at 1, η = 0.1, client 0 pulls to 0 and client 1 to 4, with the gradient w − label.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedpews.errors import ConfigError
from fedpews.methods.contract import Cohort, Method
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fednova import FedNova
from fedpews.methods.fedprox import FedProx
from fedpews.methods.representations import Moon
from fedpews.methods.scaffold import Scaffold
from fedpews.neurons.network import Batch, Network
from fedpews.testing import Playground
from tiny import chain, half_square, point, targets


def play(method: Method, rounds: int, steps: tuple[int, int] = (2, 2), **options: object) -> list[float]:
    clients = [targets(0, steps=steps[0])[0], targets(4, steps=steps[1])[0]]
    ground = Playground(method, point(), clients, lr=0.1, batch_size=1)
    return [params["weight"].item() for params in replace(ground, **options).play(rounds).params]


def test_fedavg_is_the_mean_of_local_descents() -> None:
    # client 0: 1 − .1·1 = .9, .9 − .1·.9 = .81;  client 1: 1 + .3 = 1.3, 1.3 + .27 = 1.57;  mean 1.19
    assert play(FedAvg(), 1) == pytest.approx([1.19])


def test_weights_of_clients_weigh_their_models() -> None:
    # (1·.81 + 3·1.57) / 4
    assert play(FedAvg(), 1, weights=(1.0, 3.0)) == pytest.approx([1.38])


def test_local_momentum_and_weight_decay_enter_the_gradient() -> None:
    # client 0, ρ = .5, decay .1: g = 1 + .1, w = .89; v = (.89 + .089) + .5·1.1 = 1.529, w = .7371
    # client 1: g = −3 + .1 = −2.9, w = 1.29; v = (−2.71 + .129) − 1.45 = −4.031, w = 1.6931
    assert play(FedAvg(momentum=0.5, weight_decay=0.1), 1) == pytest.approx([(0.7371 + 1.6931) / 2])


def test_fedprox_is_held_back_by_the_global_model() -> None:
    # μ = 1, client 0: .9; gradient .9 + (.9 − 1) = .8, so .82;  client 1: 1.3; −2.7 + .3 = −2.4, so 1.54
    assert play(FedProx(mu=1.0), 1) == pytest.approx([1.18])


def test_scaffold_corrects_the_second_round_by_the_drift_of_the_first() -> None:
    # round 1 is FedAvg: .81, 1.57, mean 1.19; c_0 = (1 − .81)/(2·.1) = .95, c_1 = −2.85, c = −.95
    # round 2, client 0: 1.19 − .95 − .95 = −.71, w = 1.261; 1.261 − 1.9 = −.639, w = 1.3249
    #          client 1: −2.81 + 2.85 − .95 = −.91, w = 1.281; −2.719 + 1.9 = −.819, w = 1.3629
    assert play(Scaffold(), 2) == pytest.approx([1.19, (1.3249 + 1.3629) / 2])


def test_scaffold_moves_the_server_control_by_the_part_of_clients_that_came() -> None:
    ground = Playground(Scaffold(), point(), targets(0, 4), lr=0.1, batch_size=1)
    played = ground.play(1, cohorts=lambda round: (1,))
    # only client 1 of two: c_1 = −2.85 and c = (1/2)·(−2.85)
    assert played.memories[1]["control"]["weight"].item() == pytest.approx(-2.85)
    sent = Scaffold().broadcast(played.state, Cohort(2, (0, 1), 2, seed=0))
    assert sent.extra["control"]["weight"].item() == pytest.approx(-1.425)


def test_scaffold_refuses_momentum() -> None:
    with pytest.raises(ConfigError, match="plain SGD"):
        Scaffold(momentum=0.9)


def test_fednova_divides_progress_by_the_steps_behind_it() -> None:
    # client 0, two steps: d = (1 − .81)/2 = .095;  client 1, one step: d = (1 − 1.3)/1 = −.3
    # mean d = −.1025, τ_eff = 1.5: 1 + 1.5·.1025
    assert play(FedNova(), 1, steps=(2, 1)) == pytest.approx([1.15375])


@pytest.mark.parametrize(
    ("method", "gradients"),
    [
        (FedNova(momentum=0.5), lambda k, lr: sum((1 - 0.5 ** (k - j)) / 0.5 for j in range(k))),
        (FedNova(mu=2.0), lambda k, lr: sum((1 - lr * 2.0) ** j for j in range(k))),
        (FedNova(), lambda k, lr: k),
    ],
)
def test_fednova_counts_how_often_each_gradient_enters(method: FedNova, gradients: object) -> None:
    # by unrolling: with momentum the gradient of step j comes back (1 − ρ^(K−j))/(1 − ρ) times in all;
    # with the proximal term it shrinks by 1 − ημ in each later step
    for steps in (1, 2, 5):
        assert method.work(steps, lr=0.1) == pytest.approx(gradients(steps, 0.1))  # type: ignore[operator]


def moon_network() -> Network:
    """z = W·x with W = identity, and a classifier of zeros, so that only the contrast has a gradient."""
    body, head = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    nn.init.eye_(body.weight)
    nn.init.zeros_(head.weight)
    return Network(nn.Sequential(body, head), torch.ones(1, 2), sample_loss=half_square)


def test_moon_moves_away_from_the_last_model_in_two_steps() -> None:
    net, moon = moon_network(), Moon(mu=1.0, temperature=0.5)
    method_download = moon.broadcast(moon.init(net, net.initial(), 1), cohort=_cohort())
    # on x = (1, 0): z = z_glob = (1, 0); the last model had z_prev = (0, 1)
    previous = net.initial() | {"0.weight": torch.tensor([[0.0, 0.0], [1.0, 0.0]])}
    local = moon.start(net, method_download, {"previous": previous})
    batch = Batch(torch.tensor([[1.0, 0.0]]), torch.zeros(1, dtype=torch.long))
    # step 1 at z = (1, 0): ∂near/∂z = 0, ∂far/∂z = (0, 1), so the slope is σ((0 − 1)/T)/T · (0, 1)
    b = -0.1 * 2 / (1 + math.exp(2))
    local, loss = moon.step(net, local, batch, torch.zeros(0), 0.1)
    assert loss.item() == 0  # the loss told is the task's
    assert local["params"]["0.weight"][:, 0].tolist() == pytest.approx([1.0, b])
    # step 2 at z = (1, b), n = |z|: near = 1/n, far = b/n;
    # ∂near/∂z = ((1, 0) − near·z/n)/n = (b², −b)/n³ and ∂far/∂z = ((0, 1) − far·z/n)/n = (−b, 1)/n³
    n = math.hypot(1, b)
    push = 2 / (1 + math.exp(-2 * (b - 1) / n)) / n**3
    local, _ = moon.step(net, local, batch, torch.zeros(0), 0.1)
    expected = [1 - 0.1 * push * (-b - b**2), b - 0.1 * push * (1 + b)]
    assert local["params"]["0.weight"][:, 0].tolist() == pytest.approx(expected, rel=1e-5)


def test_moon_is_fedavg_in_a_clients_first_round_and_not_in_its_second() -> None:
    net = chain([1.0, 0.5], [0.2, -0.3])
    clients = targets(0, 4)
    bare, moon = (Playground(m, net, clients, batch_size=1).play(2).params for m in (FedAvg(), Moon()))
    assert torch.equal(bare[0]["0.weight"], moon[0]["0.weight"])
    assert not torch.allclose(bare[1]["0.weight"], moon[1]["0.weight"], atol=1e-4)


def test_moon_reads_nothing_of_a_closed_neuron() -> None:
    net = chain([1.0, 0.5], [0.2, -0.3])
    features, _, _ = net.gated(torch.tensor([1.0, 0.0])).features(net.initial(), torch.ones(1, 1))
    assert features.tolist() == [[1.0, 0.0]]


def _cohort() -> Cohort:
    return Cohort(round=2, clients=(0,), total=1, seed=0)
