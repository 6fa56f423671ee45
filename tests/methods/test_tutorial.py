"""The tutorial's examples are run as they stand."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpews import trees
from fedpews.compose import METHODS
from fedpews.methods.fedavg import FedAvg
from fedpews.testing import Playground, check_method, small_clients, small_network
from fedpews.warmup import Fixed, with_warmup
from tiny import point, targets

PAGE = Path(__file__).parent.parent.parent / "docs" / "write-your-own-method.md"


@pytest.fixture(scope="module")
def tutorial() -> Iterator[types.ModuleType]:
    """The page's code, run once from top to bottom."""
    module = types.ModuleType("tutorial")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tutorial", module)
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(block, vars(module))
        METHODS.pop("fedcm")
        yield module


def test_the_example_runs_and_is_under_forty_lines(tutorial: types.ModuleType) -> None:
    first = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert first is not None
    assert len(first[1].splitlines()) < 40
    assert tutorial.FedCM(alpha=0.5).alpha == 0.5


def test_what_the_page_says_of_a_broken_law_is_what_is_said(tutorial: types.ModuleType) -> None:
    class Restless(tutorial.FedCM):  # type: ignore[name-defined,misc]
        def update(self, net: Any, state: Any, uploads: Any, average: Any) -> Any:
            new = super().update(net, state, uploads, average)
            return new | {"params": {name: value + 1 for name, value in new["params"].items()}}

    with pytest.raises(AssertionError) as caught:
        check_method(Restless())
    assert str(caught.value) in PAGE.read_text()


def test_without_the_common_direction_the_example_is_fedavg(tutorial: types.ModuleType) -> None:
    net, clients = small_network(), small_clients()
    ends = [Playground(m, net, clients).play(2).params[-1] for m in (tutorial.FedCM(alpha=1.0), FedAvg())]
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def test_fedexp_extrapolates_where_clients_differ(tutorial: types.ModuleType) -> None:
    net, clients = small_network(), small_clients()
    played = Playground(tutorial.FedExP(eps=0.1), net, clients).play(1)
    old = torch.cat([value.flatten() for value in net.initial().values()])
    changes = torch.stack(
        [torch.cat([u.params[name].flatten() for name in net.names]) - old for u in played.uploads[0]]
    )
    mean = changes.mean(0)
    rate = max(1.0, float((changes**2).sum() / (2 * len(clients) * ((mean**2).sum() + 0.1))))
    new = torch.cat([played.params[0][name].flatten() for name in net.names])
    torch.testing.assert_close(new, old + rate * mean)


def test_fedexp_takes_a_longer_step_than_fedavg_where_clients_pull_apart(tutorial: types.ModuleType) -> None:
    net = point()
    ends = [
        Playground(method, net, targets(-8, 9), batch_size=1).play(1).params[0]["weight"].item()
        for method in (tutorial.FedExP(eps=0.0), FedAvg())
    ]
    # w = 1, two steps of 0.1: Δ = 0.19·(label − 1), so −1.71 and 1.52, their mean −0.095;
    # η_g = (1.71² + 1.52²)/(4·0.095²) = 145
    assert ends == [pytest.approx(1 - 145 * 0.095), pytest.approx(1 - 0.095)]


def test_what_a_client_changed_is_zero_where_it_owns_nothing() -> None:
    net = small_network()
    ground = Playground(with_warmup(FedAvg(), 1, Fixed()), net, small_clients())
    old = net.initial()
    for upload in ground.play(1).uploads[0]:
        change, owned = upload.change(net, old), upload.ownership(net)
        assert owned is not None
        assert "4.bias" not in owned  # every client owns the outputs' bias
        assert change.keys() == old.keys()
        for name, value in change.items():
            moved = upload.params[name] - old[name]
            assert torch.allclose(value, moved * owned[name] if name in owned else moved)


def test_a_norm_does_not_depend_on_the_order_of_a_dict() -> None:
    tree = {str(i): torch.tensor([10.0 ** (i / 3)]) for i in range(-12, 13)}
    orders = [torch.randperm(len(tree), generator=torch.Generator().manual_seed(s)) for s in range(20)]
    names = list(tree)
    assert len({trees.norm({names[i]: tree[names[i]] for i in order}).item() for order in orders}) == 1
