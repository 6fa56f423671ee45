"""A module as a function of its tensors: torch's own functional call, for whatever a module may hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from fedpews.neurons.modules import PureModule


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        return found


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.again = self.layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.again(self.layer(x))
        return found


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
    "one layer": lambda: nn.Linear(4, 4),
    "buffers": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))),
    "tied": Tied,
    "one layer under two names": Twice,
}


@pytest.mark.parametrize("kind", MODULES)
def test_it_gives_what_a_functional_call_gives(kind: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[kind](), torch.randn(8, 4)
    own = dict(module.named_parameters())
    values = {name: torch.randn_like(value) for name, value in module.named_parameters()}
    values |= {n: torch.rand_like(v) for n, v in module.named_buffers() if v.is_floating_point()}
    kept = {name: value.clone() for name, value in module.state_dict().items()}

    ours = {name: value.clone() for name, value in values.items()}
    found = PureModule(module)(ours, (x,), {})
    assert all(value is own[name] for name, value in module.named_parameters())
    module.load_state_dict(kept)  # BatchNorm counted a batch
    theirs = {name: value.clone() for name, value in values.items()}
    expected = functional_call(module, dict(theirs), (x,))

    assert torch.equal(found, expected)
    # statistics that the call wrote are in the tensors it was given
    assert all(torch.equal(ours[name], theirs[name]) for name in values)


def test_the_modules_own_tensors_are_back_after_an_error() -> None:
    module = nn.Linear(4, 4)
    own = module.weight

    with pytest.raises(RuntimeError):
        PureModule(module)({"weight": torch.zeros(4, 4)}, (torch.zeros(8, 5),), {})

    assert module.weight is own


def test_gradients_reach_the_tensors_it_was_given() -> None:
    module, weight = nn.Linear(4, 4), torch.zeros(4, 4, requires_grad=True)

    PureModule(module)({"weight": weight}, (torch.ones(8, 4),), {}).sum().backward()

    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0
    assert module.weight.grad is None


@pytest.mark.parametrize("kind", ["norm", "depthwise", "transposed"])
def test_tensors_of_a_smaller_network_take_their_groups_along(kind: str) -> None:
    torch.manual_seed(0)
    module: nn.Module = {
        "norm": lambda: nn.GroupNorm(4, 8),
        "depthwise": lambda: nn.Conv1d(8, 8, 1, groups=8),
        "transposed": lambda: nn.ConvTranspose1d(8, 8, 1, groups=8),
    }[kind]()
    smaller: nn.Module = {
        "norm": lambda: nn.GroupNorm(2, 4),
        "depthwise": lambda: nn.Conv1d(4, 4, 1, groups=4),
        "transposed": lambda: nn.ConvTranspose1d(4, 4, 1, groups=4),
    }[kind]()
    values = {name: torch.randn_like(value) for name, value in smaller.named_parameters()}
    whole = {name: torch.randn_like(value) for name, value in module.named_parameters()}
    x = torch.randn(3, 8, 5)
    pure = PureModule(module)
    before = pure(whole, (x,), {})

    found = pure(values, (x[:, :4],), {})

    assert torch.equal(found, functional_call(smaller, values, (x[:, :4],)))
    # and the whole network is as it was
    assert torch.equal(pure(whole, (x,), {}), before)
