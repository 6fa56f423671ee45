"""The compiled engine: the eager engine's numbers, whatever the method, the batches, the lanes and the workers.

Compiling takes seconds a program, so every method is held to the graph that would be compiled, run by the
interpreter; machine code itself is held to the eager engine for a few, and for all of them in the slow tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedpews.build import Setup
from fedpews.compose import METHODS, find_class
from fedpews.compose import method as make
from fedpews.data.federation import Federation, build
from fedpews.engines.choose import choose_engine, lanes_for
from fedpews.engines.compiled import engine as compiled
from fedpews.engines.compiled import native
from fedpews.engines.compiled.engine import CompiledEngine
from fedpews.engines.compiled.program import CannotCompile
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Done, Engine, Job, Schedule
from fedpews.errors import CheckpointError, RunFailed
from fedpews.experiment import Experiment
from fedpews.methods.contract import Cohort, Method
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Network
from fedpews.server import Server
from fedpews.trees import Nest, Tree, leaves
from fedpews.warmup import Fixed, Learned, with_warmup

TOLERANCE = 1e-5
"""On every parameter after two rounds (whose values are below 1); float32 rounds at 6e-8."""

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


class Memories(dict[tuple[int, int], Nest]):
    def get(self, seed: int, client: int) -> Nest | None:  # type: ignore[override]
        return super().get((seed, client))

    def put(self, seed: int, client: int, memory: Nest) -> None:
        self[seed, client] = memory


def federation(*sizes: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    total = sum(sizes)
    x = torch.randn(total + 20, 5, generator=generator)
    y = torch.randint(0, 4, (total + 20,), generator=generator)
    return build(x[:total], y[:total], torch.arange(total).split(list(sizes)), x[total:], y[total:], 4)


def network(module: nn.Module | None = None) -> Network:
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return Network(module, torch.zeros(1, 5))


def network_for(name: str) -> Network:
    """FedDecorr and FedUV divide by a feature's deviation or by distances between features.

    Rounding grows where a ReLU is almost dead, so their network has none.
    """
    torch.manual_seed(0)
    smooth = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return network(smooth if name in ("feddecorr", "feduv") else None)


def run(
    engine: Engine, net: Network, method: Method, data: Federation, rounds: int = 2, lr: float = 0.1
) -> tuple[list[Tree], list[dict[str, Any]]]:
    """The models of two seeds after some rounds, and every record."""
    states = {seed: method.init(net, net.initial(), len(data)) for seed in (0, 1)}
    experiment = Experiment(train={"lr": lr, "lr_milestones": [1]})
    runner = Server(Setup(experiment, data, net, {}, method), engine, Memories(), states)
    with closing(engine):
        records = [record for round in range(1, rounds + 1) for record in runner.run(round)]
    return [method.params(state) for state in runner.states.values()], records


def assert_close(ours: Sequence[Tree], theirs: Sequence[Tree]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(
                a[name], b[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_same(ours: Sequence[Tree], theirs: Sequence[Tree]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


def assert_agree(method: Method, data: Federation, schedule: Schedule, net: Network | None = None) -> None:
    net = net or network()
    expected, records = run(EagerEngine(net, data, schedule, 1), net, method, data)
    found, others = run(CompiledEngine(net, data, schedule, 1, lanes=3), net, method, data)
    assert_close(found, expected)
    for ours, theirs in zip(others, records, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-5)
        for key in ("phase", "density", "bytes_up"):
            assert ours[key] == theirs[key]


WITH_WARMUP = [name for name in METHODS if find_class("method", name).takes_warmup]

RAGGED = (16, 9, 5)
"""Client sizes: with batches of 4, one client has only full batches, two end on a batch of one sample."""


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_eager_engines_numbers(name: str) -> None:
    assert_agree(make(name), federation(*RAGGED), Schedule(4), network_for(name))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "masks",
    [
        Learned(2.0, start=-1.0, start_spread=1.0, gradient="open"),
        Learned(2.0, gradient="gate", start_spread=0.0, upload_mask="thresholded", draw="round"),
        Fixed(),
    ],
    ids=["learned", "other readings", "fixed"],
)
@pytest.mark.parametrize("name", WITH_WARMUP)
def test_every_warmup_and_the_round_after_it_give_the_eager_engines_numbers(
    name: str, masks: Learned | Fixed
) -> None:
    assert_agree(with_warmup(make(name), 1, masks), federation(*RAGGED), Schedule(4), network_for(name))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("schedule", [Schedule(4, epochs=2), Schedule(4, None, 7), Schedule(64), Schedule(1)])
def test_momentum_weight_decay_and_any_schedule_give_the_eager_engines_numbers(schedule: Schedule) -> None:
    assert_agree(FedAvg(momentum=0.9, weight_decay=0.01), federation(16, 9, 5, 1), schedule)


@needs_compiler
def test_machine_code_of_a_warmup_and_the_round_after_it_gives_the_eager_engines_numbers() -> None:
    # with four hidden layers torch's first attempt to compile the round after the warmup ends in a KeyError
    widths = (5, 32, 64, 128, 32)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    net = network(nn.Sequential(*layers, nn.Linear(widths[-1], 4)))
    method = with_warmup(FedAvg(momentum=0.9, clip_norm=0.5), 1, Learned())
    assert_agree(method, federation(*RAGGED), Schedule(4), net)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", METHODS)
def test_machine_code_of_every_method_gives_the_eager_engines_numbers(name: str) -> None:
    assert_agree(make(name), federation(*RAGGED), Schedule(4), network_for(name))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("masks", [Learned(), Fixed()], ids=["learned", "fixed"])
@pytest.mark.parametrize("name", WITH_WARMUP)
def test_machine_code_of_every_warmup_gives_the_eager_engines_numbers(
    name: str, masks: Learned | Fixed
) -> None:
    assert_agree(with_warmup(make(name), 1, masks), federation(*RAGGED), Schedule(4), network_for(name))


@needs_compiler
def test_workers_repeats_and_neighbours_do_not_change_a_bit() -> None:
    net, method, data = network(), with_warmup(FedAvg(momentum=0.9), 1, Learned()), federation(*RAGGED)
    engines = [CompiledEngine(net, data, Schedule(4), workers, lanes=3) for workers in (1, 2, 2)]
    first, *others = [run(engine, net, method, data)[0] for engine in engines]
    for other in others:
        assert_same(other, first)
    # with one seed alone, another number of lanes is idle
    state = {0: method.init(net, net.initial(), len(data))}
    with closing(CompiledEngine(net, data, Schedule(4), 1, lanes=3)) as engine:
        experiment = Experiment(train={"lr": 0.1, "lr_milestones": [1]})
        runner = Server(Setup(experiment, data, net, {}, method), engine, Memories(), state)
        for round in (1, 2):
            runner.run(round)
    assert_same([method.params(runner.states[0])], first[:1])


@needs_compiler
def test_a_program_is_compiled_once_and_a_damaged_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPEWS_CACHE", str(tmp_path))
    net, data = network(nn.Linear(5, 4)), federation(8, 8)
    compiled_now: list[int] = []
    compile_really = native._compile
    monkeypatch.setattr(native, "_compile", lambda *given: compiled_now.append(1) or compile_really(*given))

    def train() -> list[Tree]:
        return run(CompiledEngine(net, data, Schedule(4), 1), net, FedAvg(), data)[0]

    first = train()
    assert_same(train(), first)
    assert len(compiled_now) == 1
    (program,) = (path for path in (tmp_path / "compiled").glob("*.so") if "loop" not in path.name)
    damaged = program.with_suffix(".tmp")  # a new file: this process still runs the old one
    damaged.write_bytes(program.read_bytes()[:100_000])
    damaged.replace(program)
    assert_same(train(), first)
    assert len(compiled_now) == 2
    assert [path.name for path in (tmp_path / "compiled").iterdir() if path.is_dir()] == ["torch"]
    assert (tmp_path / "compiled").stat().st_mode & 0o077 == 0


def test_another_learning_rate_is_the_same_program_and_another_method_is_not() -> None:
    net, data = network(), federation(8, 8)
    local = FedAvg().start(
        net, FedAvg().downloads(net, FedAvg().init(net, net.initial(), 2), _cohort())[0], None
    )

    def fingerprint(method: FedAvg, batch_size: int) -> str:
        return compiled.trace_step(net, method, local, 2, batch_size, data.x, data.y).fingerprint()

    assert fingerprint(FedAvg(), 4) == fingerprint(FedAvg(), 4)
    assert fingerprint(FedAvg(), 4) != fingerprint(FedAvg(), 8)
    assert fingerprint(FedAvg(), 4) != fingerprint(FedAvg(weight_decay=0.1), 4)


def _cohort() -> Any:
    from fedpews.methods.contract import Cohort

    return Cohort(1, (0, 1), 2, 0)


class Centred(nn.Module):
    """Mixes the samples of a batch, and yet runs on a single one."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def test_a_model_that_mixes_samples_runs_eagerly_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    net = network(nn.Sequential(nn.Linear(5, 6), Centred(), nn.ReLU(), nn.Linear(6, 4)))
    data = federation(8, 8)
    expected, _ = run(EagerEngine(net, data, Schedule(4), 1), net, FedAvg(), data)
    instead = EagerEngine(net, data, Schedule(4), 1)
    found, _ = run(CompiledEngine(net, data, Schedule(4), 1, instead=instead), net, FedAvg(), data)
    assert_same(found, expected)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "FedAvg runs on the eager engine: samples of a batch influence each"
    )


def test_without_an_eager_engine_what_cannot_be_compiled_is_an_error() -> None:
    net, data = network(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))), federation(8, 8)
    with pytest.raises(CannotCompile, match="BatchNorm"):
        run(CompiledEngine(net, data, Schedule(4), 1), net, FedAvg(), data)


def test_dropout_cannot_be_compiled() -> None:
    net = network(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 4)))
    with pytest.raises(CannotCompile, match="dropout"):
        CompiledEngine(net, federation(8), Schedule(4), 1)


def test_a_model_that_branches_on_its_values_runs_eagerly() -> None:
    class Branching(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out if out.sum() > 0 else 2 * out

    net, data = network(Branching(nn.Linear(5, 4))), federation(8, 8)
    with pytest.raises(CannotCompile, match="traced"):
        run(CompiledEngine(net, data, Schedule(4), 1), net, FedAvg(), data)


@pytest.mark.usefixtures("interpreted")
def test_a_loss_that_is_no_longer_finite_ends_the_run() -> None:
    net, data = network(), federation(8, 8)
    with pytest.raises(RunFailed, match=r"client 0 diverges in round .*finite.*lower train.lr"):
        run(CompiledEngine(net, data, Schedule(4), 1), net, FedAvg(), data, rounds=5, lr=1e20)


def test_a_run_that_goes_on_keeps_each_kind_of_client_on_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is gone, or a cache that cannot be written, must not change the numbers behind a user's back."""

    def broken(*_: Any) -> Any:
        raise CannotCompile("the cache cannot be written")

    net, data = network(), federation(8, 8)
    monkeypatch.setattr(compiled, "load", broken)
    eager = EagerEngine(net, data, Schedule(4), 1)
    with closing(CompiledEngine(net, data, Schedule(4), 1, instead=eager)) as engine:
        engine.go_on({"compiled": "FedAvg"}, may_change=False)
        with pytest.raises(
            CheckpointError, match=r"FedAvg were compiled .*cannot be written.*runtime\.resume=changed"
        ):
            run(engine, net, FedAvg(), data, rounds=1)
    eager = EagerEngine(net, data, Schedule(4), 1)
    with closing(CompiledEngine(net, data, Schedule(4), 1, instead=eager)) as engine:
        engine.go_on({"compiled": "FedAvg"}, may_change=True)
        run(engine, net, FedAvg(), data, rounds=1)
        assert engine.made_with()["eager"] == "FedAvg"


@pytest.mark.usefixtures("interpreted")
def test_what_was_trained_eagerly_stays_so_when_the_run_goes_on() -> None:
    net, data = network(), federation(8, 8)
    eager = EagerEngine(net, data, Schedule(4), 1)
    with closing(CompiledEngine(net, data, Schedule(4), 1, instead=eager)) as engine:
        engine.go_on({"eager": "FedAvg"}, may_change=False)
        run(engine, net, FedAvg(), data, rounds=1)
        assert engine.made_with()["compiled"] == ""
        assert engine.made_with()["eager"] == "FedAvg"


def test_without_a_compiler_the_eager_engine_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    engine, reason = choose_engine("compiled", network(), federation(8), Schedule(4), 1, rounds=1, jobs=1)
    engine.close()
    assert engine.name == "eager"
    assert "no C++ compiler" in reason
    assert "no C++ compiler" in caplog.text


def test_a_group_is_never_a_single_lane() -> None:
    assert all(2 <= lanes_for(jobs) <= 8 for jobs in range(1, 200))


@pytest.mark.usefixtures("interpreted")
def test_what_a_client_keeps_does_not_hold_on_to_the_others() -> None:
    net, data, method = network(), federation(8, 8, 8), with_warmup(FedAvg(), 2)
    memories = Memories()
    engine = CompiledEngine(net, data, Schedule(4), 1, lanes=2)
    with closing(engine):
        setup = Setup(Experiment(train={"lr": 0.1}), data, net, {}, method)
        Server(setup, engine, memories, {0: method.init(net, net.initial(), 3)}).run(1)
    kept = [leaf for memory in memories.values() for _, leaf in leaves(memory)]
    assert len(memories) == 3
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in kept)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 8, 8, 5)], ids=["one", "several"])
def test_clients_of_one_size_and_of_several_take_the_eager_engines_steps(sizes: tuple[int, ...]) -> None:
    """Full batches, equally many, are laid out in one go; beside a shorter client, one by one."""
    net, method, data = network(), with_warmup(FedAvg(), 1), federation(*sizes)
    downloads = method.downloads(
        net, method.init(net, net.initial(), 4), Cohort(1, tuple(range(len(sizes))), 4, 0)
    )
    half = method.client(downloads[0].phase)
    jobs = [Job(0, i, half, download, None, 0.1) for i, download in enumerate(downloads)]
    found = []
    for engine in (
        CompiledEngine(net, data, Schedule(4), 1, lanes=2),
        EagerEngine(net, data, Schedule(4), 1),
    ):
        with closing(engine):
            found.append([one.upload.params for one in engine.train(jobs) if isinstance(one, Done)])
    assert len(found[0]) == len(sizes)
    assert_close(*found)
