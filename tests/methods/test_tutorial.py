"""The tutorial's example is run as it stands."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from fedpews.compose import METHODS
from fedpews.testing import Playground, check_method, small_clients, small_network

PAGE = Path(__file__).parent.parent.parent / "docs" / "write-your-own-method.md"


@pytest.fixture
def tutorial(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The page's code, run from top to bottom."""
    module = types.ModuleType("tutorial")
    monkeypatch.setitem(sys.modules, "tutorial", module)
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, vars(module))
    METHODS.pop("feddyn")
    return module


def test_the_example_runs_and_is_under_forty_lines(tutorial: types.ModuleType) -> None:
    first = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert first is not None
    assert len(first[1].splitlines()) < 40
    assert tutorial.FedDyn(alpha=0.5).alpha == 0.5


def test_the_example_breaks_the_law_the_page_says_it_breaks(tutorial: types.ModuleType) -> None:
    with pytest.raises(AssertionError, match="where nobody owns it") as caught:
        check_method(tutorial.FedDyn())
    assert str(caught.value) in PAGE.read_text().replace("\n", " ")


def test_the_example_reaches_the_optimum_that_fedavg_misses(tutorial: types.ModuleType) -> None:
    from fedpews.methods.fedavg import FedAvg
    from fedpews.neurons.network import Batch

    net, clients = small_network(), small_clients()

    def slope(params: dict[str, object]) -> float:
        """The size of the mean gradient: zero at an optimum."""
        grads = [net.gradients(params, Batch(x, y))[1] for x, y in clients]  # type: ignore[arg-type]
        return sum((sum(g[n] for g in grads) / 3).pow(2).sum().item() for n in net.trainable)

    ends = [
        slope(Playground(method, net, clients, lr=0.2, batch_size=20).play(20).params[-1])  # type: ignore[arg-type]
        for method in (FedAvg(), tutorial.FedDyn(alpha=1.0))
    ]
    assert ends[1] < ends[0]
