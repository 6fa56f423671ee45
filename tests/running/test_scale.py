"""Many clients: who takes part, at which learning rate, and memory that does not grow with their number."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedpews
from fedpews.data import build, load
from fedpews.experiment import Experiment
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Upload
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Network
from fedpews.results import memories
from fedpews.results.memories import MemoryStore, Version, file_name
from fedpews.server import choose_cohort
from fedpews.trees import leaves
from fedpews.warmup import Learned, Warmup, with_warmup


def memory(value: float) -> dict[str, object]:
    return {"inner": {"w": torch.full((4,), float(value))}}


def held(store: MemoryStore, client: int, seed: int = 0) -> float | None:
    found = store.get(seed, client)
    return None if found is None else float(found["inner"]["w"][0])


def names(*saved: dict[str, Version]) -> set[str]:
    """The files that checkpoints with these versions need."""
    return {file_name(key, version.number) for versions in saved for key, version in versions.items()}


# learning rates


def test_the_rate_falls_after_each_milestone() -> None:
    # the study with 200 clients: ×0.1 at rounds 200 and 400, so round 200 itself still has the first rate
    experiment = Experiment(rounds=500, train={"lr": 0.1, "lr_milestones": [200, 400], "lr_decay": 0.1})
    assert [experiment.lr_at(round) for round in (1, 200)] == [0.1, 0.1]
    assert [experiment.lr_at(round) for round in (201, 400)] == pytest.approx([0.01, 0.01])
    assert experiment.lr_at(401) == pytest.approx(0.001)


def test_the_rate_reaches_the_clients() -> None:
    """One client, one sample, w·x with x = (1, 1), two classes, start at 0: the outputs stay equal and opposite.

    A step of rate η on the cross entropy moves each weight of the right class by η·(1 − p) and of the other by
    −η·(1 − p), with p the right class's probability. Round 1 (η = 1): p = 1/2, w = ±1/2. Round 2 (η = 0.5): the
    outputs are ±1, p = e/(e + 1/e) = 0.880797, 1 − p = 0.119203, w = ±(0.5 + 0.5·0.119203) = ±0.559602.
    """
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    x, y = torch.ones(1, 2), torch.tensor([1])
    result = fedpews.run(
        model=model, clients=[(x, y)], test=(x, y), method="fedavg", rounds=2,
        train={"lr": 1.0, "lr_milestones": [1], "lr_decay": 0.5}, runtime={"engine": "eager"},
        task={"classes": 2},
    )  # fmt: skip
    expected = torch.tensor([[-0.559602] * 2, [0.559602] * 2])
    torch.testing.assert_close(result.params[0]["weight"], expected, rtol=0, atol=1e-6)


# participation


@pytest.mark.parametrize(
    ("total", "participation", "expected"),
    [(200, 0.1, 20), (10_000, 0.01, 100), (3, 0.5, 2), (5, 0.1, 1), (7, 0.01, 1), (4, 1.0, 4)],
)
def test_a_cohort_has_its_share_of_the_clients_and_at_least_one(
    total: int, participation: float, expected: int
) -> None:
    # 3·0.5 = 1.5 is rounded up to 2, 5·0.1 = 0.5 up to 1, 7·0.01 = 0.07 is raised to 1
    cohort = choose_cohort(total, Experiment(participation=participation).cohort_size(total), round=3, seed=0)
    assert len(cohort.clients) == expected
    assert len(set(cohort.clients)) == expected
    assert list(cohort.clients) == sorted(cohort.clients)
    assert cohort.total == total
    assert set(cohort.clients) <= set(range(total))


def test_cohorts_depend_on_seed_and_round_and_in_time_everybody_takes_part() -> None:
    drawn = [choose_cohort(50, 5, round, seed=1).clients for round in range(1, 201)]
    assert drawn[0] == choose_cohort(50, 5, 1, seed=1).clients
    assert drawn[0] != drawn[1]
    assert drawn[0] != choose_cohort(50, 5, 1, seed=2).clients
    # 200 rounds of 5 out of 50: 20 times each on average; 4 standard deviations of 4.24 away is 3 and 37
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=50)
    assert int(counts.sum()) == 1000
    assert int(counts.min()) >= 3
    assert int(counts.max()) <= 37


def test_a_client_that_stays_away_costs_no_bytes_and_changes_nothing() -> None:
    data = load("synthetic-3.2k", partition="dirichlet", alpha=0.5, clients=20, train_per_class=40)
    common = {"clients": data, "method": "fedavg", "runtime": {"engine": "eager"}}
    some = fedpews.run(fedpews.Experiment(rounds=1, participation=0.1), **common)
    every = fedpews.run(fedpews.Experiment(rounds=1), **common)
    assert some.rounds[0]["bytes_up"] * 10 == pytest.approx(every.rounds[0]["bytes_up"], rel=0.01)
    absent = sorted(set(range(20)) - set(choose_cohort(20, 2, 1, seed=0).clients))
    x = data.x.clone()
    x[torch.cat([data.clients[client] for client in absent])] = 1e6
    other = build(x, data.y, data.clients, data.test_x, data.test_y, data.classes)
    again = fedpews.run(fedpews.Experiment(rounds=1, participation=0.1), **common | {"clients": other})
    assert again.rounds[0]["loss"] == some.rounds[0]["loss"]


# memories


def test_what_is_too_much_for_ram_goes_to_disk_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memories, "RAM_BYTES", 3 * 16)  # three memories of four numbers
    store = MemoryStore(tmp_path / "clients")
    for client in range(10):
        store.put(0, client, memory(client))
    assert len(store._recent) == 3
    assert len(list((tmp_path / "clients").iterdir())) == 7
    assert [held(store, client) for client in range(11)] == [*map(float, range(10)), None]
    assert len(store._recent) == 3


def test_files_of_the_last_checkpoint_outlive_what_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memories, "RAM_BYTES", 16)
    folder = tmp_path / "clients"
    store = MemoryStore(folder)
    for client in range(4):
        store.put(0, client, memory(client))
    saved = store.commit()
    store.keep(names(saved))
    for value in (10, 20, 30):  # spilled again and again before the next checkpoint
        for client in range(4):
            store.put(0, client, memory(value + client))
    assert len(list(folder.iterdir())) <= 8  # the checkpoint's four, and the latest of the others
    again = MemoryStore(folder)
    again.restore(saved)
    again.keep(names(saved))
    assert [held(again, client) for client in range(4)] == [0, 1, 2, 3]
    assert len(list(folder.iterdir())) == 4


def test_two_checkpoints_leave_two_files_a_client(tmp_path: Path) -> None:
    store, checkpoints = MemoryStore(tmp_path), []
    for round in range(1, 4):
        for client in range(3):
            store.put(0, client, memory(10 * round + client))
        checkpoints.append(store.commit())
        store.keep(names(*checkpoints[-2:]))
    assert len(list(tmp_path.iterdir())) == 6
    again = MemoryStore(tmp_path)
    again.restore(checkpoints[-1])
    again.keep(names(checkpoints[-1]))
    assert len(list(tmp_path.iterdir())) == 3  # nobody said that the one before is needed
    assert [held(again, client) for client in range(3)] == [30, 31, 32]


def test_an_empty_memory_is_none_at_once(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    store.put(0, 0, memory(1))
    saved = store.commit()
    store.keep(names(saved))
    store.put(0, 0, {"inner": {}})
    assert store.get(0, 0) is None
    assert len(list(tmp_path.iterdir())) == 1  # still needed by the checkpoint
    assert store.commit() == {}
    store.keep(names(saved))  # two checkpoints are kept
    assert len(list(tmp_path.iterdir())) == 1
    store.keep(names())
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_the_overflow_is_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "RAM_BYTES", 16)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = MemoryStore(None)
    store.put(0, 0, memory(5))
    assert list(tmp_path.iterdir()) == []  # nothing touches the disk before it has to
    for value in range(5):
        for client in range(4):
            store.put(0, client, memory(value + client))
    assert len(list(next(tmp_path.iterdir()).iterdir())) == 3
    assert [held(store, client) for client in range(4)] == [4, 5, 6, 7]
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["fedavg+pews", "scaffold+pews", "lotteryfl", "fedweit", "fedpm", "ditto", "moon", "feddyn+pews"]
)
def test_numbers_do_not_depend_on_how_much_ram_memories_get(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load("synthetic-3.2k", partition="dirichlet", alpha=0.5, clients=40, train_per_class=40)
    experiment = fedpews.Experiment(
        rounds=12, participation=0.1, method={"name": name}, warmup={"rounds": 8} if "pews" in name else {},
        model={"hidden": [8, 6]}, train={"steps": 2, "batch_size": 4}, runtime={"engine": "eager"},
    )  # fmt: skip
    plenty = fedpews.run(experiment, clients=data)
    monkeypatch.setattr(memories, "RAM_BYTES", 0)
    for out in (None, tmp_path / "run"):
        again = fedpews.run(experiment, clients=data, out=out)
        # every number of a record, what clients own and share too, which once followed a dict's order
        for one, other in zip(plenty.rounds, again.rounds, strict=True):
            assert one | {"seconds": 0} == other | {"seconds": 0}


def test_the_warmups_state_is_a_few_tensors_however_many_clients_there_are() -> None:
    """10,000 clients with 14 neurons each: θ 10,000·14·4 bytes, neurons 10,000·14, and a flag each: 0.71 MB."""
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)
    )
    net = Network(model, torch.zeros(1, 5))
    state = with_warmup(FedAvg(), rounds=3).init(net, net.initial(), 10_000)
    sizes = [leaf.numel() * leaf.element_size() for _, leaf in leaves(state["warmup"])]
    assert len(sizes) == 5
    # θ, the mask, whether it took part at all, whether in the last round; and: is the warmup over
    assert sum(sizes) == 10_000 * (14 * 4 + 14 + 1 + 1) + 1


def test_a_client_not_heard_of_counts_with_its_start_in_the_mean() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    net = Network(model, torch.zeros(1, 2))
    method = with_warmup(FedAvg(), 3, Learned(start=0.0, start_spread=0.0))
    assert isinstance(method, Warmup)
    state = method.init(net, net.initial(), total=4)
    neurons = torch.tensor([True, False, True])
    theta = torch.tensor([1.0, 0.0, 0.5])
    upload = Upload(2, 1, 8, 1, 1.0, net.initial(), neurons, extra={"theta": {"neurons": theta}})
    state = method.update(net, state, [upload], Average((1.0,), (None,)))
    # three of four at their start, σ(0) = 1/2, one at (1, 0, 1/2): (2.5, 1.5, 2)/4
    (sent,) = method.downloads(net, state, Cohort(2, (2,), 4, seed=0))
    torch.testing.assert_close(sent.extra["theta"]["neurons"], torch.tensor([0.625, 0.375, 0.5]))
    assert {client: owned.tolist() for client, owned in method.last_owned(state).items()} == {
        2: [True, False, True]
    }
    again = method.update(net, state, [replace(upload, round=2)], Average((1.0,), (None,)))
    (sent,) = method.downloads(net, again, Cohort(3, (2,), 4, seed=0))
    # replaced, not added
    torch.testing.assert_close(sent.extra["theta"]["neurons"], torch.tensor([0.625, 0.375, 0.5]))
