"""A module seen as pure functions gives what the module itself gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fedpews.neurons.network import Batch, Network


class Tied(nn.Module):
    """The same weight reads the input and the hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).relu())
        return out


def test_a_weight_with_two_names_gets_the_gradient_of_both_uses() -> None:
    torch.manual_seed(0)
    model = Tied()
    x, y = torch.randn(8, 4), torch.arange(8) % 4
    net = Network(model, x[:1])

    loss, grads, _ = net.gradients(net.initial(), Batch(x, y))

    wanted = F.cross_entropy(model(x), y)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    assert set(grads) == {"first.weight", "first.bias", "second.bias"}
    torch.testing.assert_close(grads["first.weight"], model.first.weight.grad)


def test_values_given_for_a_weight_with_two_names_are_used_in_both_places() -> None:
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    x = torch.randn(3, 4)
    net = Network(model, x[:1])

    torch.testing.assert_close(net.predict(Network(other, x[:1]).initial(), x), other(x).detach())
