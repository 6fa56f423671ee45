"""BatchNorm's corners: a batch of one sample, a layer without momentum, passes that must not train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedpews
from fedpews.data.federation import Federation, build
from fedpews.errors import ConfigError
from fedpews.methods.representations import Moon
from fedpews.neurons.network import Batch, Network


def model(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU(), nn.Linear(6, 4))


def data(*sizes: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    total = sum(sizes)
    x, y = torch.randn(total + 8, 5, generator=generator), torch.arange(total + 8) % 4
    return build(x[:total], y[:total], torch.arange(total).split(list(sizes)), x[total:], y[total:], 4)


def run(
    clients: Federation, batch_size: int = 4, engine: str = "eager", **settings: object
) -> fedpews.Result:
    return fedpews.run(
        model=model,
        clients=clients,
        rounds=2,
        method="fedavg",
        train={"lr": 0.1, "batch_size": batch_size},
        runtime={"engine": engine, "workers": 1},
        **settings,
    )


def test_a_last_batch_of_one_sample_joins_the_one_before_it_on_every_engine() -> None:
    eager = run(data(9, 5))  # in batches of 4: 4 and 5, and 5
    compiled = run(data(9, 5), engine="compiled")
    for name, value in eager.params[0].items():
        assert bool(torch.isfinite(value).all())
        torch.testing.assert_close(compiled.params[0][name], value)


@pytest.mark.parametrize(
    ("sizes", "batch_size", "message"),
    [((9, 1), 4, "client 1 has one"), ((9, 5), 1, "train.batch_size is 1")],
)
def test_what_cannot_be_trained_is_said_in_a_sentence(
    sizes: tuple[int, ...], batch_size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"BatchNorm cannot train on a single sample, and {message}"):
        run(data(*sizes), batch_size)


def test_a_network_without_such_a_layer_takes_a_batch_of_one() -> None:
    plain = Network(nn.Sequential(nn.Linear(5, 4)), torch.zeros(1, 5))
    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4))
    assert (plain.least_batch, Network(model(), torch.zeros(1, 5)).least_batch) == (1, 2)
    assert Network(images, torch.zeros(1, 1, 4, 4)).least_batch == 1  # four values of a channel in one sample


def test_without_momentum_the_statistics_are_the_mean_over_all_batches() -> None:
    net = Network(model(momentum=None), torch.zeros(1, 5))
    reference, params = model(momentum=None).train(), net.initial()
    assert params["1.num_batches_tracked"].item() == 0
    generator = torch.Generator().manual_seed(1)
    for count in range(1, 4):
        x = torch.randn(8, 5, generator=generator) + count
        reference(x)
        _, _, buffers = net.gradients(params, Batch(x, torch.arange(8) % 4))
        params = params | buffers
        assert params["1.num_batches_tracked"].item() == count
        torch.testing.assert_close(params["1.running_mean"], reference[1].running_mean)
        torch.testing.assert_close(params["1.running_var"], reference[1].running_var)
    assert net.module(params)[1].num_batches_tracked.dtype == torch.int64  # type: ignore[index, union-attr]
    assert "1.num_batches_tracked" not in Network(model(), torch.zeros(1, 5)).names


def test_moon_takes_its_two_fixed_representations_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4)
    net = Network(nn.Sequential(*layers), torch.zeros(1, 5))
    params = net.initial()
    params["1.running_mean"] = torch.full((16,), 0.3)
    seen = []
    plain = net.features

    def watched(*given: object, training: bool = True) -> object:
        seen.append(training)
        return plain(*given, training=training)  # type: ignore[arg-type]

    net.features = watched  # type: ignore[method-assign, assignment]
    local = {"params": params, "global": params, "previous": params, "strength": {"mu": torch.tensor(1.0)}}
    Moon().gradient(net, local, Batch(torch.randn(6, 5), torch.arange(6) % 4))
    assert seen == [False, False, True]
    # in evaluation mode two passes agree although there is dropout, and the running mean is used
    x = torch.randn(6, 5)
    first, second = (plain(params, x, training=False)[0] for _ in range(2))
    assert torch.equal(first, second)
    expected = net.module(params)[:3](x)  # type: ignore[index]
    torch.testing.assert_close(first, expected)
