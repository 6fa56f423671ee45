"""The pooling functions in C give torch's numbers, and step aside where they do not fit."""

from __future__ import annotations

from contextlib import closing
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from fedpews.data.federation import Federation, build
from fedpews.engines import pooling
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Done, Job, Schedule, score_chunk
from fedpews.methods.contract import Cohort, Method
from fedpews.methods.fedavg import FedAvg
from fedpews.models.networks import CNN
from fedpews.neurons.network import Network
from fedpews.warmup import Learned, with_warmup

LAYOUTS = (torch.contiguous_format, torch.channels_last)

needs_library = pytest.mark.skipif(pooling._library() is None, reason="no C compiler")


def images(shape: tuple[int, ...], layout: torch.memory_format) -> Tensor:
    """Images with ties, zeros of both signs, infinities and a few NaN."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(4).round() / 4
    flat = x.view(-1)
    for number, special in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
        flat[number::97] = special
    return x.contiguous(memory_format=layout).requires_grad_()


def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled images and a gradient by them."""
    out = max_pool2d(x, 2)
    slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (slope,) = torch.autograd.grad(out, x, slopes)
    return out.detach(), slope


@needs_library
@pytest.mark.parametrize(
    ("channels", "height", "width"),
    # channels and widths above, at and below each vector's length, with a rest, and odd sizes
    [*product((1, 3, 4, 7, 8, 15, 16, 37), (8,), (8,)), *product((5,), (9, 2), (2, 6, 9, 17, 33, 70))],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pooling_is_torchs_to_the_bit(
    channels: int, height: int, width: int, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "WORTH", 0)
    x = images((3, channels, height, width), layout)
    expected = pooled(x)
    with pooling._FastPooling():
        assert (pooling.fits(x, 2)) == (
            layout is torch.contiguous_format or x.is_contiguous() or channels > 3
        )
        actual = pooled(x)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "change",
    [
        {"size": 3},
        {"stride": 1},
        {"padding": 1},
        {"dilation": 2},
        {"ceil_mode": True},
        {"return_indices": True},
        {"x": torch.zeros(64, 1, 33, 32)[:, :, 1:]},
        {"x": torch.zeros(64, 8, 32, 32, dtype=torch.float64)},
        {"x": torch.zeros(8, 32, 32)},
        {"x": torch.zeros(1, 8, 2, 2)},
        {"x": torch.zeros(64, 2, 32, 32).contiguous(memory_format=torch.channels_last)},
    ],
)
def test_other_calls_stay_with_torch(change: dict[str, object]) -> None:
    call: dict[str, object] = {"x": torch.zeros(64, 8, 32, 32), "size": 2}
    assert pooling.fits(**call)
    assert not pooling.fits(**(call | change))


def test_under_vmap_torch_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "WORTH", 0)
    x = torch.randn(3, 2, 4, 8, 8)
    with pooling._FastPooling():
        assert torch.equal(torch.vmap(lambda one: max_pool2d(one, 2))(x)[1], max_pool2d(x[1], 2))


@needs_library
@pytest.mark.parametrize("masks", [None, Learned()], ids=["plain", "warmup"])
@pytest.mark.parametrize("channels", [1, 3])
def test_training_and_evaluation_give_the_same_bytes_without_a_compiler(
    channels: int, masks: Learned | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "WORTH", 0)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, channels, 8, 8, generator=generator), torch.arange(40) % 2
    data = build(x[:30], y[:30], torch.arange(30).split([16, 14]), x[30:], y[30:], 2)
    torch.manual_seed(0)
    net = Network(CNN(channels, 8, hidden=(8, 16, 16), classes=2, pools=2), x[:1])
    method = FedAvg() if masks is None else with_warmup(FedAvg(), 1, masks)
    used, run = [], pooling._run

    def counted(*given: Any, **options: Any) -> None:
        used.append(given[0])
        run(*given, **options)

    monkeypatch.setattr(pooling, "_run", counted)
    results = [both(net, method, data)]
    assert {"forward", "backward"} <= set(used), "nothing was pooled in C, so this compared nothing"
    monkeypatch.setattr(pooling, "_library", lambda: None)
    results.append(both(net, method, data))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def both(net: Network, method: Method, data: Federation) -> list[Any]:
    """One round of two clients, and an evaluation of the first one's model."""
    state = method.init(net, net.initial(), 2)
    downloads = method.downloads(net, state, Cohort(1, (0, 1), 2, 0))
    half = method.client(method.phase(state, 1))
    jobs = [Job(0, client, half, downloads[client], None, 0.1) for client in (0, 1)]
    with closing(EagerEngine(net, data, Schedule(4), 1)) as engine:
        uploads = [done.upload.params for done in engine.train(jobs) if isinstance(done, Done)]
    return [*uploads, score_chunk(net, uploads[0], data, "test", torch.arange(10))]
