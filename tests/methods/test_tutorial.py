"""The tutorial's example is run as it stands."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpews.compose import METHODS
from fedpews.methods.fedavg import FedAvg
from fedpews.testing import Playground, check_method, small_clients, small_network

PAGE = Path(__file__).parent.parent.parent / "docs" / "write-your-own-method.md"


@pytest.fixture
def tutorial(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The page's code, run from top to bottom."""
    module = types.ModuleType("tutorial")
    monkeypatch.setitem(sys.modules, "tutorial", module)
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, vars(module))
    METHODS.pop("fedcm")
    return module


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
