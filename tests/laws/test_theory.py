"""Where theory says who must win: convex problems whose optimum is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedpews.methods.contract import Method
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fednova import FedNova
from fedpews.methods.fedprox import FedProx
from fedpews.methods.scaffold import Scaffold
from fedpews.neurons.network import Batch, Network
from fedpews.testing import Playground, Samples


def half_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * (outputs[:, 0] - labels) ** 2


def quadratic(curvatures: tuple[float, float], steps: tuple[int, int], method: Method, rounds: int) -> float:
    """How far from the optimum of ½a₀w² + ½a₁(w − 4)² the method ends.

    A sample (x, y) has the loss ½(wx − y)², so x = √a and y = 4√a; a is a square, to keep the labels whole.
    """
    roots = [a**0.5 for a in curvatures]
    clients = [
        (torch.full((steps[0], 1), roots[0]), torch.zeros(steps[0], dtype=torch.long)),
        (torch.full((steps[1], 1), roots[1]), torch.full((steps[1],), round(4 * roots[1]))),
    ]
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    net = Network(layer, torch.ones(1, 1), sample_loss=half_square)
    played = Playground(method, net, clients, lr=0.05, batch_size=1).play(rounds)
    optimum = 4 * curvatures[1] / sum(curvatures)
    return abs(played.params[-1]["weight"].item() - optimum)


def test_scaffold_reaches_the_optimum_where_client_drift_keeps_fedavg_away() -> None:
    # curvatures 4 and 1 with ten local steps: FedAvg's fixed point weighs client i by 1 − (1 − ηa)^10, which is
    # .893 for a = 4 and .401 for a = 1, so w = 4·.401/(.893 + .401) = 1.24 instead of 4·1/5 = .8
    drift = quadratic((4.0, 1.0), (10, 10), FedAvg(), rounds=60)
    assert drift == pytest.approx(4 * 0.40126 / (0.89263 + 0.40126) - 0.8, abs=1e-3)
    assert quadratic((4.0, 1.0), (10, 10), FedProx(mu=0.1), rounds=60) > 0.1
    assert quadratic((4.0, 1.0), (10, 10), Scaffold(), rounds=60) < 1e-4


def test_fednova_removes_the_bias_of_unequal_steps() -> None:
    # equal curvatures, 20 steps against 2: FedAvg weighs the clients by 1 − .95^K, .642 against .098
    biased = quadratic((1.0, 1.0), (20, 2), FedAvg(), rounds=40)
    assert biased == pytest.approx(2 - 4 * 0.0975 / (0.64151 + 0.0975), abs=1e-3)
    # FedNova weighs them by (1 − .95^K)/K, .0321 against .0488: what is left is drift, of order η
    left = 4 * 0.04875 / (0.0320757 + 0.04875) - 2
    assert quadratic((1.0, 1.0), (20, 2), FedNova(), rounds=40) == pytest.approx(left, abs=1e-3)
    assert left < biased / 3


def logistic(seed: int = 0) -> list[Samples]:
    """Two clients with other inputs, other slopes and 5 % of the labels flipped, so the optimum is finite."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for slope, shift, scale in (
        (torch.tensor([2.0, -1.0]), 1.0, 2.0),
        (torch.tensor([-1.0, 2.0]), -1.0, 0.5),
    ):
        x = scale * torch.randn(60, 2, generator=generator) + shift
        flipped = torch.rand(60, generator=generator) < 0.05
        clients.append((x, ((x @ slope > 0) ^ flipped).long()))
    return clients


def test_scaffold_is_closer_to_the_optimum_of_a_logistic_problem_than_fedavg() -> None:
    clients = logistic()
    net = Network(nn.Linear(2, 2), torch.zeros(1, 2))

    def loss(params: dict[str, Tensor]) -> float:
        return sum(net.loss(params, Batch(x, y))[0].item() for x, y in clients) / 2

    best = net.initial()
    for _ in range(1500):  # gradient descent on the mean of both: convex, so this is the optimum
        slopes = [net.gradients(best, Batch(x, y))[1] for x, y in clients]
        best = {n: v - 0.25 * (slopes[0][n] + slopes[1][n]) for n, v in best.items()}
    ends = {}
    for method in (FedAvg(), Scaffold()):
        played = Playground(
            method, net, [(x.repeat(5, 1), y.repeat(5)) for x, y in clients], lr=0.3, batch_size=60
        )
        ends[type(method)] = loss(played.play(40).params[-1]) - loss(best)
    assert ends[FedAvg] > 1e-3
    assert 0 <= ends[Scaffold] + 1e-6 < ends[FedAvg] / 50
