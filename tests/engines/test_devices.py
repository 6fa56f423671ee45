"""No tensor on the wrong device: every method and every path of the eager engine on a device that is not there.

A GPU is not needed: see `other_device`. The same runs on the CPU, so the numbers must be the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from other_device import OTHER, DeviceMixed, OtherDevice
from torch import Tensor, nn

from fedpews.build import Setup
from fedpews.compose import METHODS, find_class
from fedpews.compose import method as make
from fedpews.data.federation import Federation, build
from fedpews.engines.compiled.engine import fill
from fedpews.engines.compiled.program import Looped, Sheet, Step, check_padding, load_looped, trace_step
from fedpews.engines.eager import EagerEngine, start
from fedpews.engines.engine import Job, Schedule
from fedpews.errors import Interrupted
from fedpews.experiment import Experiment
from fedpews.methods import subnetwork
from fedpews.methods.contract import Cohort, Download, Method
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fedbn import Local
from fedpews.methods.wire import decode_download, decode_upload, encode_download, encode_upload
from fedpews.neurons.network import Network
from fedpews.results import memories
from fedpews.results.memories import MemoryStore
from fedpews.server import Server
from fedpews.trees import Tree, flatten, leaves, unflatten
from fedpews.warmup import Auto, Fixed, Learned, with_warmup

WARM = [name for name in METHODS if find_class("method", name).takes_warmup]


class Inline:
    """Instead of the engine's threads: a device that is not there exists in one thread only."""

    def map(self, function: Callable[..., Any], *values: Iterable[Any]) -> Iterable[Any]:
        return iter(list(map(function, *values)))

    def shutdown(self, **_: Any) -> None:
        pass


def network(kind: str = "mlp") -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    # flattened channels: the positions that the last layer reads are no run of neurons
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 4, 5), nn.ReLU(), nn.Linear(5, 3))


def federation(shape: tuple[int, ...]) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(36, *shape, generator=generator), torch.arange(36) % 3
    return build(x[:30], y[:30], torch.arange(30).split([11, 10, 9]), x[30:], y[30:], 3)


def play(make_method: Callable[[], Method], kind: str, there: bool, rounds: int = 3) -> list[Tree]:
    """The global model after each round, on the CPU or on the other device."""
    shape = (8,) if kind == "mlp" else (2, 2, 2)
    data, module = federation(shape), network(kind)
    if there:
        data, module = data.to(OTHER), module.to(OTHER)
    net, method = Network(module, data.x[:1]), make_method()
    engine = EagerEngine(net, data, Schedule(4), 1)
    engine._pool = Inline()  # type: ignore[assignment]
    state = method.init(net, net.initial(), len(data))
    experiment = Experiment(participation=0.67, train={"lr": 0.1})
    setup = Setup(experiment, data, net, {}, method)
    server = Server(setup, engine, MemoryStore(None), {0: state})
    models = []
    for round in range(1, rounds + 1):
        server.run(round)
        models.append(server.models()[0])
    return models


def assert_same_there(make_method: Callable[[], Method], kind: str = "mlp") -> None:
    expected = play(make_method, kind, there=False)
    with OtherDevice() as device:
        found = play(make_method, kind, there=True)
    for round, (here, there) in enumerate(zip(expected, found, strict=True), 1):
        for name, value in there.items():
            assert device.is_there(value), f"{name} is back on the CPU after round {round}"
            assert torch.equal(value, here[name]), f"{name} has other numbers after round {round}"


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_stays_on_its_device(name: str, kind: str) -> None:
    assert_same_there(lambda: make(name), kind)


@pytest.mark.parametrize("masks", [Learned(), Learned(upload="masks"), Fixed(), Auto()], ids=str)
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("name", WARM)
def test_every_warmup_and_the_round_after_it_stay_on_their_device(
    name: str, kind: str, masks: Learned | Fixed
) -> None:
    assert_same_there(lambda: with_warmup(make(name), 2, masks), kind)


@pytest.mark.parametrize("server", ["fedavgm", "fedadagrad", "fedyogi", "fedadam"])
def test_every_server_optimiser_stays_on_its_device(server: str) -> None:
    assert_same_there(lambda: with_warmup(make(f"fedavg+{server}"), 2))


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_parameters_that_stay_at_the_client_stay_on_its_device(name: str) -> None:
    assert_same_there(lambda: Local(with_warmup(make(name), 2)), "cnn")


def test_momentum_weight_decay_and_distillation_stay_on_their_device() -> None:
    assert_same_there(lambda: make("fedavg", momentum=0.9, weight_decay=0.01))
    assert_same_there(lambda: make("fjord", distill=0.5))


@pytest.mark.parametrize("name", METHODS)
def test_a_step_never_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait in every step would cost more than a small step itself; those of a round's start and end do not count.

    Nor does what is found out once, in the very first step: where a network can be gated.
    """
    monkeypatch.setattr(subnetwork, "CUT_FROM", 0)  # large models must not wait either
    halves = [make(name)] + [
        with_warmup(make(name), 2, masks) for masks in (Learned(), Fixed()) if name in WARM
    ]
    with OtherDevice() as device:
        for method in halves:
            half = method.client("warmup" if method is not halves[0] else "train")
            step, waited = type(half).step, []

            def watched(*given: Any, step: Any = step, waited: list[list[str]] = waited) -> Any:
                before = len(device.waits)
                result = step(*given)
                waited.append(device.waits[before:])
                return result

            monkeypatch.setattr(type(half), "step", watched)
            play(lambda method=method: method, "mlp", there=True, rounds=2)
            monkeypatch.setattr(type(half), "step", step)
            assert len(waited) > 4
            assert not any(waited[1:]), f"{type(half).__name__} waits in its step: {waited[1:]}"


def test_messages_come_back_to_the_networks_device() -> None:
    with OtherDevice() as device:
        data, module = federation((8,)).to(OTHER), network().to(OTHER)
        net, method = Network(module, data.x[:1]), with_warmup(make("scaffold"), 2)
        engine = EagerEngine(net, data, Schedule(4), 1)
        engine._pool = Inline()  # type: ignore[assignment]
        sent: list[Any] = []
        train = engine.train

        def record(jobs: Any) -> Any:
            done = train([replace(job, download=_through(net, job.download)) for job in jobs])
            sent.extend(decode_upload(net, encode_upload(net, one.upload)) for one in done)
            return done

        engine.train = record  # type: ignore[method-assign]
        state = method.init(net, net.initial(), len(data))
        setup = Setup(Experiment(train={"lr": 0.1}), data, net, {}, method)
        Server(setup, engine, MemoryStore(None), {0: state}).run(1)
        for upload in sent:
            assert device.is_there(upload.neurons)
            assert all(device.is_there(value) for value in upload.params.values())


def _through(net: Network, download: Any) -> Any:
    return decode_download(net, encode_download(net, download))


def test_memories_that_were_spilled_come_back_to_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memories, "RAM_BYTES", 0)
    with OtherDevice() as device:
        store = MemoryStore(tmp_path, OTHER)
        for client in range(3):
            store.put(0, client, {"inner": {"w": torch.ones(4, device=OTHER)}})
        for client in range(3):
            found = store.get(0, client)
            assert found is not None
            assert all(device.is_there(leaf) for _, leaf in leaves(found))


@pytest.mark.parametrize("name", ["scaffold+pews", "fedweit", "lotteryfl", "fedavg+fedadam"])
def test_a_resumed_run_goes_on_where_its_tensors_were(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fedpews
    from fedpews import build as building

    monkeypatch.setattr(building, "find_device", lambda _: OTHER)
    monkeypatch.setattr(EagerEngine, "__init__", _with_inline_pool(EagerEngine.__init__))
    common: dict[str, Any] = {
        "clients": federation((8,)), "method": name, "rounds": 4, "model": {"hidden": [6, 5]},
        "train": {"lr": 0.1, "batch_size": 4}, "runtime": {"engine": "eager", "checkpoint_every": 1},
    }  # fmt: skip
    if "pews" in name:
        common["warmup"] = {"rounds": 3}
    with OtherDevice():
        whole = fedpews.run(**common)

        def stop(records: Any) -> None:
            if records[0]["round"] == 2:
                raise KeyboardInterrupt

        with pytest.raises(Interrupted):
            fedpews.run(**common, out=tmp_path / "run", callbacks=[fedpews.Callback(round=stop)])
        resumed = fedpews.run(**common, out=tmp_path / "run", resume=True)
    assert resumed.rounds.column("loss") == whole.rounds.column("loss")


def _with_inline_pool(init: Callable[..., None]) -> Callable[..., None]:
    def inlined(self: EagerEngine, *given: Any) -> None:
        init(self, *given)
        self._pool = Inline()  # type: ignore[assignment]

    return inlined


def _short(given: object) -> str:
    return given if isinstance(given, str) else "bare" if given is None else type(given).__name__


HALVES = [
    *((name, None) for name in METHODS),
    *((name, masks) for name in WARM for masks in (Learned(), Fixed())),
]


@pytest.mark.parametrize(("name", "masks"), HALVES, ids=_short)
def test_a_compiled_step_has_everything_on_its_device(name: str, masks: Learned | Fixed | None) -> None:
    """On torch's own device without memory, which refuses to mix, from a client's state to that after two steps."""
    method = make(name) if masks is None else with_warmup(make(name), 2, masks)
    data = federation((8,))
    net = Network(network(), data.x[:1])
    cohort = Cohort(1, (0, 1, 2), 3, 0)
    (download, *_) = method.downloads(net, method.init(net, net.initial(), 3), cohort)
    half = method.client(download.phase)
    job = Job(0, 0, half, download, None, 0.1)
    started = start(net, data, Schedule(4), job)
    leaves_here, layout = flatten(started.local)

    there = torch.device("meta")
    x, y = data.x.to(there), data.y.to(there)
    far = Network(network().to(there), x[:1], graph=net.graph)
    # found out once, by numbers, before the first step
    batch = data.x[started.order[:4]], data.y[started.order[:4]]
    check_padding(net, half, started.local, *batch, started.noise[0], 0.1)
    far.__dict__["_fed"] = net._fed
    local = unflatten(iter([leaf.to(there) for leaf in leaves_here]), layout)
    program = trace_step(far, half, local, 2, 4, x, y)
    sheet = Sheet.blank(2, 2, 4, started.noise.shape[1], there)
    state = [torch.stack([leaf.to(there)] * 2) for leaf in leaves_here]
    assert all(constant.device == there for constant in program.constants)

    Looped(Step(program), 1, len(state)).run(2, sheet, [x, y, *state, *program.constants])


def test_a_lane_is_filled_where_the_sheet_is() -> None:
    data = federation((8,))
    net = Network(network(), data.x[:1])
    method = FedAvg()
    (download, *_) = method.downloads(net, method.init(net, net.initial(), 3), Cohort(1, (0, 1, 2), 3, 0))
    job = Job(0, 0, method.client(download.phase), download, None, 0.1)
    with OtherDevice() as device:
        far = data.to(OTHER)
        started = start(Network(network().to(OTHER), far.x[:1]), far, Schedule(4), replace_tensors(job))
        # eleven samples in batches of four: the last batch is padded
        sheet = Sheet.blank(3, 2, 4, started.noise.shape[1], OTHER)
        fill(sheet, [started])
        # FedAvg needs no random numbers, so there are none to be anywhere
        assert all(device.is_there(value) for value in (sheet.rows, sheet.weight, sheet.losses, sheet.lr))


def replace_tensors(job: Job) -> Job:
    params = {name: value.to(OTHER) for name, value in job.download.params.items()}
    return replace(job, download=replace(job.download, params=params))


def test_a_device_without_a_code_generator_steps_what_was_traced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_nothing(step: nn.Module, **_: Any) -> Callable[..., object]:
        def fail(*_: object) -> object:
            raise RuntimeError("Cannot find a working triton installation")

        return fail

    monkeypatch.setattr(torch, "compile", compile_nothing)
    data = federation((8,))
    net = Network(network(), data.x[:1])
    local = FedAvg().start(net, Download(1, "train", 3, net.initial()), None)
    program = trace_step(net, FedAvg().client("train"), local, 2, 4, data.x, data.y)
    state = [torch.stack([leaf] * 2) for leaf in flatten(local)[0]]
    sheet = Sheet.blank(1, 2, 4, 0)
    sheet.weight.fill_(1)
    sheet.lr.fill_(0.1)

    code = load_looped(program, data.x, data.y)
    before = [leaf.clone() for leaf in state]
    code.run(1, sheet, [data.x, data.y, *state, *program.constants])

    assert "steps run as they were traced: RuntimeError: Cannot find a working triton" in caplog.text
    assert not any(map(torch.equal, before, state))


@pytest.mark.slow
def test_torchs_code_generator_takes_a_step_of_a_warmup() -> None:
    """What a GPU would run, for the processor: the kernels differ, the way to them does not."""
    data = federation((8,))
    net = Network(network(), data.x[:1])
    method = with_warmup(make("scaffold"), 2)
    (download, *_) = method.downloads(net, method.init(net, net.initial(), 3), Cohort(1, (0, 1, 2), 3, 0))
    half = method.client(download.phase)
    started = start(net, data, Schedule(4), Job(0, 0, half, download, None, 0.1))
    batch = data.x[started.order[:4]], data.y[started.order[:4]]
    check_padding(net, half, started.local, *batch, started.noise[0], 0.1)
    program = trace_step(net, half, started.local, 2, 4, data.x, data.y)
    outcomes = []
    for make_code in (load_looped, lambda *_: Looped(Step(program), 1, len(program.changes))):
        state = [torch.stack([leaf] * 2) for leaf in flatten(started.local)[0]]
        sheet = Sheet.blank(len(started.sizes), 2, 4, started.noise.shape[1])
        fill(sheet, [started])
        code = make_code(program, data.x, data.y)
        code.run(len(started.sizes), sheet, [data.x, data.y, *state, *program.constants])
        outcomes.append(state)
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# the device that is not there must itself find mistakes


@pytest.mark.parametrize(
    "mistake",
    [
        lambda there, here: there + here,
        lambda there, here: torch.stack([there, here]),
        lambda there, here: torch.where(here > 0, there, 0.0),
        lambda there, here: here[(there > 0).nonzero().squeeze(1)],
        lambda there, here: there[torch.tensor([0, 1])],
        lambda there, here: there.numpy(),
        lambda there, here: torch.rand(3, generator=torch.Generator(), device=OTHER),
        lambda there, here: nn.functional.linear(there, torch.ones(2, 3)),
    ],
)
def test_a_mixture_of_devices_is_found(mistake: Callable[[Tensor, Tensor], object]) -> None:
    here = torch.ones(3)
    with OtherDevice() as device:
        there = here.to(OTHER)
        assert there.device == OTHER
        assert here.device.type == "cpu"
        assert device.is_there((there * 2.0).sum())
        assert not device.is_there(there.cpu())
        with pytest.raises(DeviceMixed):
            mistake(there, here)


@pytest.mark.parametrize(
    "name", ["fedavg+fedper", "fedavg+fedrep", "fedavg+ditto", "fedavg+local", "fedavg+pews-random"]
)
def test_models_of_clients_own_and_random_masks_stay_on_their_device(name: str) -> None:
    warmup = {"rounds": 2} if "pews" in name else None
    assert_same_there(lambda: make(name, warmup=warmup))
