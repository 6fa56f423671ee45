"""A run over ranks gives the numbers of one process, for every kind of method; here the ranks are threads."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from threads import run_over

import fedpews
from command_line import fedpews as command
from fedpews.errors import ConfigError, RankLost, RunFailed
from fedpews.experiment import Experiment
from fedpews.ranks.group import device_name, meet
from fedpews.ranks.rank import Rank

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "data": {"name": "synthetic-3.2k", "partition": "dirichlet", "alpha": 0.5, "clients": 5},
    "train": {"batch_size": 16, "steps": 2},
    "warmup": {"rounds": 2},
    "runtime": {"engine": "eager", "workers": 1, "checkpoint_every": 2},
}


def tiny(method: str, **changes: Any) -> Experiment:
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in SETTINGS.items()}
    for key, value in changes.items():
        settings[key] = settings.get(key, {}) | value if isinstance(value, dict) else value
    if "pews" not in method:
        settings.pop("warmup")
    return Experiment(**settings, method={"name": method})


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) | {"seconds": 0} for line in lines]


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "fedavg+pews",
        "fedprox+pews-fixed",
        "scaffold+pews",
        "moon",
        "feddyn",
        "fedpm",
        "heterofl",
        "lotteryfl",
        "fedweit",
        "fedavg+ditto",
        "fedavg+fedrep",
    ],
)
def test_two_ranks_give_the_numbers_of_one_process(method: str, tmp_path: Path) -> None:
    experiment = tiny(method)
    alone = fedpews.run(experiment, out=tmp_path / "one")
    shared, _ = run_over(2, experiment, tmp_path / "two")
    assert records(tmp_path / "one") == records(tmp_path / "two")
    for name, value in alone.params[0].items():
        assert torch.equal(value, shared.params[0][name])


def test_three_ranks_two_seeds_and_part_of_the_clients_change_nothing(tmp_path: Path) -> None:
    experiment = tiny("scaffold+pews", seeds=[0, 1], participation=0.6)
    fedpews.run(experiment, out=tmp_path / "one")
    run_over(3, experiment, tmp_path / "three")
    assert records(tmp_path / "one") == records(tmp_path / "three")


@pytest.mark.parametrize("method", ["scaffold+pews", "fedavg+ditto"])
def test_a_run_goes_on_with_another_number_of_ranks(method: str, tmp_path: Path) -> None:
    """Two rounds on three ranks, two on two, two in one process."""
    experiment = tiny(method, rounds=6)
    fedpews.run(experiment, out=tmp_path / "one")
    run_over(3, experiment, tmp_path / "many", callbacks=[until(2)])
    run_over(2, experiment, tmp_path / "many", resume=True, callbacks=[until(4)])
    fedpews.run(experiment, out=tmp_path / "many", resume=True)
    assert records(tmp_path / "one") == records(tmp_path / "many")
    for name, value in load_file(tmp_path / "one" / "model-0.safetensors").items():
        assert torch.equal(value, load_file(tmp_path / "many" / "model-0.safetensors")[name])


def test_a_tensor_that_all_clients_get_is_sent_to_a_rank_once(tmp_path: Path) -> None:
    """Of five clients the second of two ranks trains two; of three ranks, the others train two and one."""
    _, two = run_over(2, tiny("fedavg", rounds=1), tmp_path / "two")
    _, three = run_over(3, tiny("fedavg", rounds=1), tmp_path / "three")
    sizes = [[size for source, _, kind, size in cables.kinds if kind == "train"] for cables in (two, three)]
    # each message holds the model once, so they differ by some hundred bytes of JSON
    assert max(*sizes[0], *sizes[1]) - min(*sizes[0], *sizes[1]) < 1_000


@pytest.mark.parametrize("method", ["fedavg", "scaffold+pews"])
def test_a_rank_that_dies_leaves_a_checkpoint_of_the_round_before(method: str, tmp_path: Path) -> None:
    """The first rank has all memories, so nothing is lost with another: the run goes on after round 3 of 4."""
    experiment = tiny(method, runtime={"checkpoint_every": 100})
    fedpews.run(experiment, out=tmp_path / "one")
    with pytest.raises(RankLost, match="rank 1 is gone") as lost:
        run_over(2, experiment, tmp_path / "two", dies_in=4)
    assert lost.value.exit_code == 5
    begun: list[int] = []
    watcher = fedpews.Callback(begin=lambda experiment, done, engine: begun.append(done))
    run_over(3, experiment, tmp_path / "two", resume=True, callbacks=[watcher])
    assert begun == [3]
    assert records(tmp_path / "one") == records(tmp_path / "two")


def test_an_error_at_another_rank_is_raised_at_the_first(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"lower train\.lr"):
        run_over(2, tiny("fedavg", train={"lr": 1e30, "steps": 20}), tmp_path)


def test_ranks_with_other_settings_or_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 1 has another experiment than rank 0"):
        run_over(2, lambda rank: tiny("fedavg", rounds=4 + rank), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"rank 1: .*nosuch"):
        run_over(
            2,
            lambda rank: tiny("fedavg", data={"name": "synthetic-3.2k" if rank == 0 else "nosuch"}),
            tmp_path / "b",
        )


def test_more_ranks_than_clients_in_a_round_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 ranks were started, but a round trains 2 clients, .*at most 2"):
        run_over(3, tiny("fedavg", participation=0.4), tmp_path)


def test_a_run_across_sites_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fedpews flower start"):
        run_over(2, Experiment(data={"name": "sites"}), tmp_path)


def test_every_rank_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    second = Rank(rank=3, world=4, local_rank=1, local_world=2)
    assert [device_name(wanted, second) for wanted in ("auto", "cuda", "cpu")] == ["cuda:1", "cuda:1", "cpu"]
    with pytest.raises(ConfigError, match="each needs its own"):
        device_name("cuda:0", second)
    with pytest.raises(ConfigError, match="which has 2 GPUs"):
        device_name("cuda", Rank(rank=0, world=3, local_rank=0, local_world=3))


def test_a_process_that_torchrun_did_not_start_is_alone() -> None:
    assert Rank.here({"RANK": "1", "WORLD_SIZE": "2"}) is None
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert Rank.here(told) == Rank(0, 1)
    assert not Rank(0, 1).is_shared
    assert Rank.here(told | {"WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}) == Rank(0, 2, restarts=3)
    with pytest.raises(ConfigError, match="whole numbers"):
        Rank.here(told | {"WORLD_SIZE": "two"})


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "node-1", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_other_commands_are_not_for_torchrun(second_of_two: pytest.MonkeyPatch) -> None:
    ended = command("list", "methods")
    assert ended.code == 2
    assert "run `fedpews list` without torchrun" in ended.stderr


def test_what_all_ranks_of_a_machine_find_wrong_is_said_once(second_of_two: pytest.MonkeyPatch) -> None:
    """By the first rank of each machine: the others may not have the file, so this one speaks for its own."""
    ended = command("run", "nosuch.toml")
    assert (ended.code, ended.stderr[:14]) == (2, "error: rank 1:")
    second_of_two.setenv("LOCAL_RANK", "1")
    ended = command("run", "nosuch.toml")
    assert (ended.code, ended.stderr) == (2, "")


def until(last: int) -> fedpews.Callback:
    """Ends a run after a round."""
    return fedpews.Callback(round=lambda records: records[-1]["round"] >= last)


def test_ranks_that_were_started_again_do_not_meet_the_dead() -> None:
    """The store still has what the ranks of the first attempt wrote, of whom only the second one ever came."""
    store, soon = torch.distributed.HashStore(), timedelta(seconds=20)
    store.set("came/1", "the name of somebody who is gone")
    found: dict[int, tuple[Any, bool]] = {}

    def come(rank: int) -> None:
        found[rank] = meet(store, Rank(rank, 2, restarts=1), soon)

    for _ in range(2):
        threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first, second = found[0][0], found[1][0]
        assert not first.check(["address"])
        first.set("address", "here")
        assert second.get("address") == b"here"
        assert found[0][1]
