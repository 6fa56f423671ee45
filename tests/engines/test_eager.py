"""The eager engine's short cuts change the time, not the numbers."""

from __future__ import annotations

import gc
import platform
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedpews.compose import METHODS, find_class
from fedpews.compose import method as make
from fedpews.data.federation import Federation, build
from fedpews.engines import eager
from fedpews.engines.eager import EagerEngine, Streams
from fedpews.engines.engine import Done, Job, Schedule
from fedpews.engines.hardware import MUCH, keep_freed_memory, return_freed_memory, settled
from fedpews.methods import subnetwork
from fedpews.methods.contract import Cohort, Method
from fedpews.models import build as build_model
from fedpews.neurons import Hidden, NeuronGraph
from fedpews.neurons.network import Network
from fedpews.warmup import Fixed, Learned, with_warmup


def network() -> Network:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU()]
    return Network(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 3)), torch.zeros(1, 2, 6, 6))


def federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 2, 6, 6, generator=generator), torch.randint(0, 3, (30,), generator=generator)
    return build(x[:24], y[:24], torch.arange(24).split([14, 10]), x[24:], y[24:], 3)


def train(net: Network, method: Method, data: Federation, workers: int = 1) -> list[Done]:
    state = method.init(net, net.initial(), 2)
    downloads = method.downloads(net, state, Cohort(1, (0, 1), 2, 0))
    half = method.client(method.phase(state, 1))
    jobs = [Job(0, client, half, downloads[client], None, 0.1) for client in (0, 1)]
    with closing(EagerEngine(net, data, Schedule(4), workers)) as engine:
        return engine.train(jobs)


def assert_close(ours: list[Done], theirs: list[Done]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        for name, value in a.upload.params.items():
            torch.testing.assert_close(value, b.upload.params[name], rtol=1e-4, atol=1e-5)


WITH_WARMUP = [name for name in METHODS if find_class("method", name).takes_warmup]


@pytest.mark.parametrize("masks", [Learned(), Fixed()], ids=["learned", "fixed"])
@pytest.mark.parametrize("name", WITH_WARMUP)
def test_a_step_of_the_cut_network_is_the_masked_step(
    name: str, masks: Learned | Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, data, method = network(), federation(), with_warmup(make(name), 1, masks)
    monkeypatch.setattr(subnetwork, "CUT_FROM", float("inf"))
    masked = train(net, method, data)
    cuts = []
    step_cut = subnetwork._step_cut
    monkeypatch.setattr(subnetwork, "CUT_FROM", 0)
    monkeypatch.setattr(subnetwork, "_step_cut", lambda *given: cuts.append(1) or step_cut(*given))
    cut = train(net, method, data)
    assert_close(cut, masked)
    assert cuts, "no step was cut, so this compared nothing"


def test_a_network_with_group_norms_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU()]
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 3))
    net, data, method = Network(module, torch.zeros(1, 2, 6, 6)), federation(), with_warmup(make("fedavg"), 1)
    assert net.can_be_cut
    monkeypatch.setattr(subnetwork, "CUT_FROM", float("inf"))
    masked = train(net, method, data)
    monkeypatch.setattr(subnetwork, "CUT_FROM", 0)
    assert_close(train(net, method, data), masked)


@pytest.mark.parametrize("masks", [Learned(), Fixed()], ids=["learned", "fixed"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "moon"])
def test_attention_is_cut_too_when_a_step_has_no_head_of_a_block(
    name: str, masks: Learned | Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"patch": 3, "width": 8, "depth": 3, "heads": 2, "hidden": 6}
    torch.manual_seed(0)
    net = Network(build_model("vit", (2, 6, 6), 3, sizes), torch.zeros(1, 2, 6, 6))
    data, method = federation(), with_warmup(make(name), 1, masks)
    monkeypatch.setattr(subnetwork, "CUT_FROM", float("inf"))
    masked = train(net, method, data)
    monkeypatch.setattr(subnetwork, "CUT_FROM", 0)
    heads, step_cut = [], subnetwork._step_cut

    def watched(*given: Any) -> Any:
        heads.extend(int(given[-1][layer.neurons].sum()) for layer in net.graph.layers if layer.size == 2)
        return step_cut(*given)

    monkeypatch.setattr(subnetwork, "_step_cut", watched)
    assert_close(train(net, method, data), masked)
    # client 0 takes four steps and client 1 three, with three blocks
    assert len(heads) == 3 * (4 + 3)
    assert masks == Fixed() or 0 in heads


def test_the_order_of_channels_in_memory_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data, method = network(), federation(), make("fedavg", momentum=0.9)
    last = train(net, method, data)
    assert all(value.is_contiguous() for done in last for value in done.upload.params.values())
    monkeypatch.setattr(eager, "channels_last", lambda tensor: tensor)
    assert_close(last, train(net, method, data))


def test_any_number_of_workers_gives_the_same_bits() -> None:
    net, data, method = network(), federation(), with_warmup(make("fedavg"), 1)
    for one, two in zip(train(net, method, data), train(net, method, data, workers=2), strict=True):
        assert all(torch.equal(one.upload.params[name], two.upload.params[name]) for name in net.names)


def test_a_model_with_fixed_sizes_is_not_cut() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 4, 3), nn.Linear(4 * 16, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).relu().reshape(-1, 64))
            return out

    graph = NeuronGraph.by_hand(Fixed(), [Hidden("first", read_by=["second"])])
    assert not Network(Fixed(), torch.zeros(1, 2, 6, 6), graph=graph).can_be_cut
    assert network().can_be_cut


def test_keeping_freed_memory_is_arranged_where_the_c_library_is_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_other_systems_keep_their_own_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: object) -> None:
        raise TypeError("Windows has no library without a name")

    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert not keep_freed_memory()
    return_freed_memory()


def test_a_large_amount_of_freed_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    class Heap:
        def __init__(self, free: int) -> None:
            self.free = free

    class Library:
        gnu_get_libc_version = None

        def __init__(self, free: int) -> None:
            self.trimmed: list[int] = []
            self.mallinfo2 = lambda: Heap(free)
            self.malloc_trim = self.trimmed.append

    monkeypatch.setattr("sys.platform", "linux")
    little, much = Library(MUCH), Library(MUCH + 1)
    for library in (little, much):
        monkeypatch.setattr("ctypes.CDLL", lambda name, library=library: library)
        return_freed_memory()
    assert (little.trimmed, much.trimmed) == ([], [0])


def test_the_collector_leaves_what_is_there_alone_for_as_long_as_a_run_lasts() -> None:
    gc.unfreeze()
    with settled():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


class Notes:
    """CUDA streams that write down what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "server")
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: self)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    def wait_stream(self, other: str) -> None:
        self.taken.append(f"waits for {other}")

    def synchronize(self) -> None:
        self.taken.append("done")

    @contextmanager
    def stream(self, stream: Notes) -> Iterator[None]:
        assert stream is self
        self.taken.append("enters")
        yield
        self.taken.append("leaves")


def test_a_client_on_a_gpu_waits_for_the_server_and_the_server_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = Notes(monkeypatch)
    streams = Streams(torch.device("cuda"))
    for client in (0, 1):
        with streams.behind(torch.cuda.current_stream(torch.device("cuda"))):
            notes.taken.append(f"trains {client}")
    one = ["waits for server", "enters", "trains {}", "leaves", "done"]
    assert notes.taken == [line.format(client) for client in (0, 1) for line in one]


@pytest.mark.parametrize(("channels", "expected"), [(1, False), (3, True), (None, False)])
def test_channels_are_laid_out_last_where_that_is_faster(channels: int | None, expected: bool) -> None:
    reads = nn.Linear(4, 8) if channels is None else nn.Conv2d(channels, 8, 3)
    assert eager.prefers_channels_last(nn.Sequential(reads, nn.ReLU())) is expected
