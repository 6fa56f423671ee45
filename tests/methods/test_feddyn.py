"""FedDyn, two rounds by hand, and where it ends."""

from __future__ import annotations

import pytest
import torch

from fedpews.methods.fedavg import FedAvg
from fedpews.methods.feddyn import FedDyn
from fedpews.neurons.network import Batch
from fedpews.testing import Playground, small_clients, small_network
from fedpews.trees import Tree
from fedpews.warmup import Fixed, with_warmup
from tiny import chain, point, targets


def test_two_rounds_by_hand() -> None:
    """One weight from 1, one step of η = 0.1 a round, clients at 0 and 4, α = 0.5."""
    played = Playground(FedDyn(alpha=0.5), point(1.0), targets(0, 4, steps=1), batch_size=1).play(2)
    # y = .9 and 1.3, mean 1.1; h = −.5·(1.1 − 1) = −.05; x = 1.1 + .05/.5 = 1.2
    assert played.params[0]["weight"].item() == pytest.approx(1.2)
    # h_0 = −.5(.9 − 1) = .05, h_1 = −.5(1.3 − 1) = −.15; gradients from 1.2: 1.2 − .05 and −2.8 + .15
    # y = 1.2 − .115 = 1.085 and 1.2 + .265 = 1.465, mean 1.275; h = −.05 − .5·.075 = −.0875; x = 1.275 + .175
    assert played.params[1]["weight"].item() == pytest.approx(1.45)
    assert played.memories[0]["slope"]["weight"].item() == pytest.approx(0.05 - 0.5 * (1.085 - 1.2))


def test_it_ends_where_the_mean_gradient_is_smaller_than_where_fedavg_ends() -> None:
    net, clients = small_network(), small_clients()

    def slope(params: Tree) -> float:
        """The size of the mean gradient: zero at an optimum."""
        grads = [net.gradients(params, Batch(x, y))[1] for x, y in clients]
        means = [torch.stack([g[n] for g in grads]).mean(0) for n in net.trainable]
        return float(torch.stack([mean.pow(2).sum() for mean in means]).sum())

    ends = [
        slope(Playground(method, net, clients, lr=0.2, batch_size=20).play(20).params[-1])
        for method in (FedAvg(), FedDyn(alpha=1.0))
    ]
    assert ends[1] < ends[0]


def test_in_a_warmup_an_element_with_one_owner_moves_as_if_its_owner_were_alone() -> None:
    """Two neurons, one for each client: each is a federation of one."""
    net = chain([1.0, 2.0], [3.0, 4.0])
    both = Playground(with_warmup(FedDyn(alpha=0.5), 2, Fixed()), net, targets(0, 4), lr=0.01).play(2)
    alone = [
        Playground(FedDyn(alpha=0.5), chain([u], [v]), targets(label), lr=0.01).play(2)
        for u, v, label in ((1.0, 3.0, 0), (2.0, 4.0, 4))
    ]
    for i, one in enumerate(alone):
        assert both.params[-1]["0.weight"][i].item() == pytest.approx(one.params[-1]["0.weight"].item())
        assert both.params[-1]["1.weight"][0, i].item() == pytest.approx(one.params[-1]["1.weight"].item())
