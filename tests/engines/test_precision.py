"""``train.precision = "bfloat16"``: training passes in mixed precision, everything else in single precision."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import fedpews
from fedpews.models.networks import CNN
from fedpews.neurons.network import Batch, Network

METHODS = ("fedavg", "scaffold", "moon", "fedavg+pews", "fedavg+pews-fixed", "feduv+pews")


def network(precision: str) -> Network:
    torch.manual_seed(0)
    return Network(CNN(size=8, hidden=(8, 16), classes=4), torch.zeros(1, 3, 8, 8), precision=precision)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(torch.randn(32, 3, 8, 8, generator=generator), torch.arange(32) % 4)


def test_gradients_are_single_precision_and_near_those_of_single_precision() -> None:
    exact, mixed = (net.gradients(net.initial(), batch()) for net in map(network, ("float32", "bfloat16")))
    assert all(value.dtype == torch.float32 for value in mixed[1].values())
    for name, value in exact[1].items():
        nearness = cosine_similarity(mixed[1][name].flatten(), value.flatten(), dim=0)
        # bfloat16 has 8 bits, and a pooling may choose another pixel; in single precision it would be 1 - 1e-6
        assert 0.99 < nearness < 1 - 1e-6, name


def test_evaluation_is_in_single_precision() -> None:
    exact, mixed = map(network, ("float32", "bfloat16"))
    assert torch.equal(exact.predict(exact.initial(), batch().x), mixed.predict(mixed.initial(), batch().x))


class Records(nn.Module):
    """Remembers the precision that its layer computes in."""

    seen: set[torch.dtype] = set()  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.classifier = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if self.training:
            Records.seen.add(hidden.dtype)
        out: Tensor = self.classifier(hidden.relu())
        return out


@pytest.mark.parametrize("method", METHODS)
def test_methods_train_in_mixed_precision_and_keep_single_precision_weights(method: str) -> None:
    Records.seen.clear()
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    result = fedpews.run(
        model=Records,
        clients=[(x[:16], y[:16]), (x[16:32], y[16:32])],
        test=(x[32:], y[32:]),
        method=method,
        rounds=3,
        train={"lr": 0.1, "batch_size": 8, "precision": "bfloat16"},
    )
    assert Records.seen == {torch.bfloat16}
    assert all(value.dtype == torch.float32 for value in result.model().state_dict().values())


def test_the_compiled_engine_hands_over_to_the_eager_one_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"rounds": 1, "method": "fedavg", "data": {"train_per_class": 20, "test_per_class": 10}}
    with caplog.at_level(logging.WARNING, "fedpews"):
        fedpews.run(
            "synthetic-3.2k", **settings, train={"precision": "bfloat16"}, runtime={"engine": "compiled"}
        )
    assert "the eager engine runs this: train.precision is bfloat16" in caplog.text
