"""Differential privacy: what is cut, what is added, and what it is worth."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedpews.compose import method as make
from fedpews.engines.engine import Job
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Method, Upload, Work
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fedprox import FedProx
from fedpews.methods.private import NoisyAverage, Private, epsilon, gaussian
from fedpews.neurons.network import Batch, Network
from fedpews.testing import check_method
from fedpews.warmup import Fixed, with_warmup

NET = Network(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4)), torch.zeros(1, 3))


def uploads_of(
    method: Method, clients: int = 2, lr: float = 50.0
) -> tuple[dict[str, object], list[Upload], list[Job]]:
    """One step of each client with a huge rate, so that every change is far too long."""
    state = method.init(NET, NET.initial(), clients)
    cohort = Cohort(1, tuple(range(clients)), clients, 0)
    half, found, jobs = method.client(method.phase(state, 1)), [], []
    for client, download in enumerate(method.downloads(NET, state, cohort)):
        random = torch.Generator().manual_seed(client)
        batch = Batch(torch.randn(8, 3, generator=random), torch.arange(8) % 4)
        noise = torch.rand(half.noise_size(NET), generator=random)
        local, loss = half.step(NET, half.start(NET, download, None), batch, noise, lr)
        work = Work(client, 8, 1, lr, float(loss), noise)
        found.append(half.finish(NET, download, local, work)[1])
        jobs.append(Job(0, client, half, download, None, lr))
    return state, found, jobs


def length(upload: Upload, job: Job) -> float:
    owned = upload.ownership(NET) or {}
    total = 0.0
    for name, value in upload.params.items():
        change = (value - job.download.params[name]).double()
        change = torch.where(owned[name].bool(), change, 0.0) if name in owned else change
        total += float(change.pow(2).sum())
    return math.sqrt(total)


@pytest.mark.parametrize("warm", [False, True])
def test_a_change_is_cut_to_the_length_c_and_the_loss_is_not_told(warm: bool) -> None:
    inner = with_warmup(make("fedavg"), 5, Fixed()) if warm else make("fedavg")
    _, found, jobs = uploads_of(Private(inner, clip=0.5, noise=1.0))
    for upload, job in zip(found, jobs, strict=True):
        assert length(upload, job) == pytest.approx(0.5, rel=1e-4)
        assert upload.loss == 0.0


def test_a_short_change_is_left_alone() -> None:
    _, plain, _ = uploads_of(make("fedavg"), lr=1e-3)
    _, private, _ = uploads_of(Private(make("fedavg"), clip=100.0, noise=1.0), lr=1e-3)
    for one, other in zip(plain, private, strict=True):
        assert all(torch.allclose(one.params[n], other.params[n], atol=1e-7) for n in one.params)


def test_without_noise_and_with_room_it_is_the_method_itself() -> None:
    inner = with_warmup(make("fedavg"), 5, Fixed())
    method = Private(inner, clip=1e6, noise=0.0)
    state, found, _ = uploads_of(method, lr=0.1)
    masks = tuple(upload.ownership(NET) for upload in found)
    after = method.update(NET, state, found, Average((1.0, 1.0), masks))
    plain_state, plain, _ = uploads_of(inner, lr=0.1)
    expected = inner.update(NET, plain_state, plain, Average((1.0, 1.0), masks))
    for name, value in inner.params(expected).items():
        assert torch.allclose(method.params(after)[name], value, atol=1e-6)


def test_the_noise_of_a_sum_is_divided_by_the_number_of_owners() -> None:
    masks = ({"w": torch.tensor([True, False, False])}, {"w": torch.tensor([True, True, False])})
    old = {"w": torch.zeros(3)}
    average = NoisyAverage((1.0, 1.0), masks, deviation=2.0, seeds=iter([3]))
    out = average([{"w": torch.zeros(3)}, {"w": torch.zeros(3)}], old)["w"]
    plain = NoisyAverage((1.0, 1.0), (None, None), deviation=2.0, seeds=iter([3]))
    drawn = plain([{"w": torch.zeros(3)}, {"w": torch.zeros(3)}], old)["w"] * 2
    # two owners, one owner, nobody: there the old value stays and nothing is added
    assert out.tolist() == pytest.approx([float(drawn[0]) / 2, float(drawn[1]), 0.0])
    with pytest.raises(ConfigError, match="several averages"):
        average([old, old], old)


def test_the_noise_has_the_deviation_asked_for_and_comes_from_the_operating_system() -> None:
    drawn = gaussian((100_000,), 3.0, None)
    assert float(drawn.std()) == pytest.approx(3.0, rel=0.02)  # 3/√(2·10⁵) = 0.007
    assert not torch.equal(gaussian((10,), 1.0, None), gaussian((10,), 1.0, None))
    assert torch.equal(gaussian((10,), 1.0, 5), gaussian((10,), 1.0, 5))


def test_local_noise_is_on_what_is_sent() -> None:
    _, noisy, jobs = uploads_of(Private(make("fedavg"), clip=0.5, noise=4.0, place="client"))
    count = sum(value.numel() for value in noisy[0].params.values())
    # a sum of `count` squares of deviation z·C = 2, and the change itself
    assert length(noisy[0], jobs[0]) == pytest.approx(2.0 * math.sqrt(count), rel=0.5)


def test_the_clip_follows_the_clients_lengths() -> None:
    method = Private(make("fedavg"), clip=1e-3, noise=0.1, adaptive=True, bit_noise=1e-1, noise_seed=0)
    state, found, _ = uploads_of(method)
    assert [float(up.extra["privacy"]["within"]) for up in found] == [0.0, 0.0]
    after = method.update(NET, state, found, Average((1.0, 1.0), (None, None)))
    # nobody was within, so it grows: exp(0.2·(0.5 − noise/2))
    assert 1e-3 * math.exp(0.2 * (0.5 - 0.3)) < float(after["privacy"]["clip"]) < 1e-3 * math.exp(0.2 * 0.8)
    assert isinstance(method, Private)
    assert method.change_noise**-2 + (2 * 0.1) ** -2 == pytest.approx(0.1**-2)


@pytest.mark.parametrize("name", ["scaffold", "fedavg+pews", "fedpm"])
def test_what_no_noise_protects_is_refused(name: str) -> None:
    inner = make(name, warmup={"rounds": 3}) if "pews" in name else make(name)
    with pytest.raises(ConfigError, match=r"no noise protects|learned masks"):
        uploads_of(Private(inner, clip=1.0, noise=1.0), lr=0.1)


def test_clients_must_count_alike() -> None:
    method = Private(make("fedavg"), clip=1.0, noise=1.0)
    state, found, _ = uploads_of(method)
    with pytest.raises(ConfigError, match="uniform"):
        method.update(NET, state, found, Average((1.0, 2.0), (None, None)))
    assert replace(found[0], loss=0.0) == found[0]


def test_the_epsilon_reported_is_the_accountants() -> None:
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(1.5), 30)
    assert epsilon(1.5, 30, 1e-5, 10, 10) == pytest.approx(accountant.get_epsilon(1e-5))
    sampled = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, dp_accounting.GaussianDpEvent(0.75))
    sampled.compose(event, 30)
    assert epsilon(1.5, 30, 1e-5, 100, 10) == pytest.approx(sampled.get_epsilon(1e-5))
    local = rdp.RdpAccountant()
    local.compose(dp_accounting.GaussianDpEvent(0.75), 30)
    assert epsilon(1.5, 30, 1e-5, 100, 10, "client") == pytest.approx(local.get_epsilon(1e-5))
    assert epsilon(0.0, 1, 1e-5, 10, 10) == math.inf


@pytest.mark.parametrize("method", ["fedavg", "fedprox+fedadam+pews-fixed"])
def test_a_run_reports_what_it_spent(method: str) -> None:
    pytest.importorskip("dp_accounting")
    from fedpews import run

    x, y = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    found = run(
        clients=[(x[i::4], y[i::4]) for i in range(4)],
        test=(x, y),
        rounds=3,
        method=method,
        warmup={"rounds": 1} if "pews" in method else {},
        privacy={"clip": 1.0, "noise": 2.0},
        runtime={"engine": "eager"},
    )
    assert found.summary["privacy"]["epsilon"] == pytest.approx(epsilon(2.0, 3, 1e-5, 4, 4))
    assert [record["train_loss"] for record in found.rounds] == [0.0] * 3


def test_an_experiment_whose_clients_do_not_count_alike_is_refused() -> None:
    with pytest.raises(ConfigError, match="uniform"):
        Experiment(privacy={"clip": 1.0}, train={"weighting": "samples"})


@pytest.mark.parametrize(
    "method",
    [
        Private(FedAvg(), clip=0.5, noise=1.0, noise_seed=3),
        Private(FedAvg(), clip=0.5, noise=1.0, place="client", noise_seed=3),
        Private(FedAvg(), clip=0.5, noise=0.5, adaptive=True, noise_seed=3),
        Private(with_warmup(FedProx(), 2, Fixed()), clip=0.5, noise=0.1, noise_seed=3),
    ],
    ids=["server", "client", "adaptive", "fixed masks"],
)
def test_private_methods_obey_the_laws_of_every_method(method: Method) -> None:
    check_method(method)


@pytest.mark.parametrize("count", [1, 2, 100_001])
def test_noise_of_the_operating_system_is_normal_and_never_the_same(count: int) -> None:
    drawn, again = gaussian((count,), 2.0, None), gaussian((count,), 2.0, None)
    assert drawn.shape == (count,)
    assert not torch.equal(drawn, again)
    assert bool(torch.isfinite(drawn).all())
    if count > 1000:
        from scipy import stats

        # 1e-9: it fails once in a billion runs by chance, and at once with a wrong deviation
        assert stats.kstest(drawn.numpy() / 2.0, "norm").pvalue > 1e-9
        first, second = drawn[: count // 2], drawn[count // 2 : 2 * (count // 2)]
        assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.03
