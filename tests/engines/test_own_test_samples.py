"""A client is evaluated on its own test samples if it is known which they are."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import nn

import fedpews
from fedpews.data import Federation, from_clients
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Schedule, Score
from fedpews.errors import ConfigError
from fedpews.neurons.network import Network


def shifted() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Two clients with the same classes whose inputs differ: the second one's labels are turned."""
    y = torch.arange(8) % 2
    x = torch.where(y[:, None] == 1, 1.0, -1.0)
    return [(x, y), (x, y)], [(x, y), (-x[:4], y[:4])]


def sign() -> nn.Module:
    """Says 1 where the input is positive."""
    layer = nn.Linear(1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        layer.bias.zero_()
    return layer


def score(net: Network, data: Federation) -> Score:
    with closing(EagerEngine(net, data, Schedule(batch_size=1), workers=1)) as engine:
        return engine.evaluate([net.initial()], [0])[0]


def test_clients_that_differ_in_inputs_are_evaluated_on_their_own_test_samples() -> None:
    clients, tests = shifted()
    data = from_clients(clients, tests)
    net = Network(sign(), torch.zeros(1, 1))
    found = score(net, data)
    # 8 of the first client's 8 are right, none of the second's 4
    assert data.task.measure(found.sums) == {"accuracy": pytest.approx(8 / 12)}
    assert found.client_accuracy(data.counts()) == [1.0, 0.0]
    # one test set for all knows only classes: of each class 4 of 6 are right
    common = from_clients(clients, (data.test_x, data.test_y))
    found = score(net, common)
    assert found.client_accuracy(common.counts()) == pytest.approx([4 / 6, 4 / 6])


def test_the_summary_says_once_on_which_data_clients_are_evaluated() -> None:
    clients, tests = shifted()
    result = fedpews.run(
        model=sign, clients=clients, test=tests, rounds=1, method="fedavg", train={"lr": 1e-9}
    )
    assert result.rounds[-1]["client_accuracy"] == [1.0, 0.0]
    assert result.summary["measured_on"]["clients"] == "each client's own test data"
    assert "clients_judged_on" not in result.summary


def test_a_number_of_test_sets_that_fits_nobody_is_refused() -> None:
    clients, tests = shifted()
    with pytest.raises(ConfigError, match="3 test sets for 2 clients"):
        from_clients(clients, [*tests, tests[0]])
