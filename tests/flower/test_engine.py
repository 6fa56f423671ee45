"""Rounds among sites: the same numbers as in one process, and what happens when sites fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from memory_grid import MemoryGrid, site_handler
from safetensors.torch import load

from fedpews.config import FlowerTable
from fedpews.errors import CheckpointError, Interrupted
from fedpews.experiment import Experiment
from fedpews.flower.app import serve
from fedpews.flower.messages import pack, unpack
from fedpews.flower.roster import TooFewSites, is_enough
from fedpews.results.records import read_rounds
from fedpews.running import run

METHODS = [
    "fedavg",
    "fedavg+pews",
    "fedprox+fedadam+pews-fixed",
    "scaffold+pews",
    "fednova+pews",
    "moon+pews-auto",
    "ist",
    "fedpm",
    "heterofl",
    "lotteryfl",
    "fedweit",
]


def experiment(**changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "rounds": 3,
        "seeds": [0],
        "data": {
            "name": "synthetic-3.2k",
            "partition": "parity",
            "train_per_class": 30,
            "test_per_class": 20,
        },
        "train": {"batch_size": 16},
        "warmup": {},
        "runtime": {"engine": "eager"},
        "flower": {"join_seconds": 0.2, "wait_seconds": 0.2, "round_seconds": 0.3},
    }
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(values.get(key), dict) else value
    return Experiment(**values)


def write(path: Path, made: Experiment) -> Path:
    path.write_text(made.to_toml())
    return path


def without_seconds(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in read_rounds(folder)]


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sites.jsonl").read_text().splitlines()]


def outcomes(folder: Path) -> list[dict[str, str]]:
    return [{site: answer["outcome"] for site, answer in line["sites"].items()} for line in journal(folder)]


@pytest.mark.parametrize("method", METHODS)
def test_sites_give_the_same_rounds_as_one_process(method: str, tmp_path: Path, grid: MemoryGrid) -> None:
    warmup = {"rounds": 2} if "pews" in method else {}
    made = experiment(method={"name": method}, warmup=warmup, seeds=[0, 1])
    config = write(tmp_path / "experiment.toml", made)
    grid.nodes = {100 + i: site_handler(config, tmp_path / "state", i) for i in (1, 0)}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    run(made, out=tmp_path / "process")
    assert without_seconds(tmp_path / "sites") == without_seconds(tmp_path / "process")


def test_a_part_of_the_sites_in_each_round_is_the_same_too(tmp_path: Path, grid: MemoryGrid) -> None:
    made = experiment(
        method={"name": "scaffold+pews"},
        warmup={"rounds": 2},
        participation=0.5,
        data={"partition": "iid", "clients": 4},
    )
    config = write(tmp_path / "experiment.toml", made)
    grid.nodes = {i + 7: site_handler(config, tmp_path / "state", i) for i in range(4)}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    run(made, out=tmp_path / "process")
    assert without_seconds(tmp_path / "sites") == without_seconds(tmp_path / "process")


def test_a_server_that_stopped_goes_on_with_the_sites_memories(tmp_path: Path, grid: MemoryGrid) -> None:
    made = experiment(method={"name": "scaffold+pews"}, warmup={"rounds": 2}, rounds=4)
    config = write(tmp_path / "experiment.toml", made)
    honest = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    trains = 0

    def dies_in_round_3(message: Message) -> Message:
        nonlocal trains
        trains += message.metadata.message_type == MessageType.TRAIN
        answer = honest[1](message)  # its memory moves on...
        if trains == 3:
            raise KeyboardInterrupt  # ...but the server goes down before it hears of it
        return answer

    grid.nodes = {5: honest[0], 6: dies_in_round_3}
    with pytest.raises(Interrupted):
        serve(config, grid, {"out": str(tmp_path / "sites")})
    assert len(read_rounds(tmp_path / "sites")) == 2
    again = MemoryGrid()
    again.nodes = {55: honest[1], 66: honest[0]}  # other node numbers, the same sites
    serve(config, again, {"out": str(tmp_path / "sites"), "resume": True})
    run(made, out=tmp_path / "process")
    assert without_seconds(tmp_path / "sites") == without_seconds(tmp_path / "process")


def test_a_resume_with_another_experiment_is_refused(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(rounds=1))
    grid.nodes = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    write(config, experiment(rounds=1, train={"lr": 0.5}))
    with pytest.raises(CheckpointError, match=r"train\.lr"):
        serve(config, grid, {"out": str(tmp_path / "sites"), "resume": True})
    assert json.loads((tmp_path / "sites" / "flower-error.json").read_text())["exit_code"] == 4


def test_a_run_across_sites_can_be_made_longer(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(rounds=1))
    grid.nodes = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    write(config, experiment(rounds=2))
    serve(config, grid, {"out": str(tmp_path / "sites"), "resume": True})
    run(experiment(rounds=2), out=tmp_path / "process")
    assert without_seconds(tmp_path / "sites") == without_seconds(tmp_path / "process")


def test_each_site_has_its_own_seconds(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(rounds=1, flower={"round_seconds": 60}))
    grid.nodes = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    polls, pull = 0, grid.pull_messages

    def second_answers_later(message_ids: list[str]) -> list[Message]:
        nonlocal polls
        polls += 1
        # the hello has two messages, training two: the last is ready at the next poll
        return [] if polls == 4 else pull(message_ids)

    grid.pull_messages = second_answers_later  # type: ignore[method-assign, assignment]
    serve(config, grid, {"out": str(tmp_path / "sites")})
    first, second = (answer["seconds"] for answer in journal(tmp_path / "sites")[0]["sites"].values())
    assert first < second


def test_a_site_that_raises_is_left_out_and_comes_back(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(flower={"min_sites": 1}))
    honest = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    trains = 0

    def raises_in_round_2(message: Message) -> Message:
        nonlocal trains
        trains += message.metadata.message_type == MessageType.TRAIN
        if trains == 2 and message.metadata.message_type == MessageType.TRAIN:
            raise ValueError("the disk is full")
        return honest[1](message)

    grid.nodes = {1: honest[0], 2: raises_in_round_2}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    assert outcomes(tmp_path / "sites") == [
        {"0": "accepted", "1": "accepted"},
        {"0": "accepted", "1": "failed"},
        {"0": "accepted", "1": "accepted"},
    ]
    assert "the disk is full" in journal(tmp_path / "sites")[1]["sites"]["1"]["why"]


def test_a_failed_site_is_asked_again_when_no_failure_is_tolerated(tmp_path: Path, grid: MemoryGrid) -> None:
    made = experiment(
        method={"name": "fedavg+pews"}, warmup={"rounds": 2}, flower={"min_sites": 1, "max_failures": 0}
    )
    config = write(tmp_path / "experiment.toml", made)
    honest = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    trains = 0

    def loses_its_second_answer(message: Message) -> Message | None:
        nonlocal trains
        trains += message.metadata.message_type == MessageType.TRAIN
        answer = honest[1](message)
        return None if trains == 2 else answer

    grid.nodes = {1: honest[0], 2: loses_its_second_answer}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    assert [(line["round"], line["attempt"]) for line in journal(tmp_path / "sites")] == [
        (1, 1),
        (2, 1),
        (2, 2),
        (3, 1),
    ]
    run(made, out=tmp_path / "process")  # the second answer starts from the same memory as the lost one
    assert without_seconds(tmp_path / "sites") == without_seconds(tmp_path / "process")


def test_a_site_that_never_answers_is_left_out_when_the_time_is_up(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(rounds=1, flower={"min_sites": 1}))
    honest = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}

    def silent(message: Message) -> Message | None:
        return None if message.metadata.message_type == MessageType.TRAIN else honest[1](message)

    grid.nodes = {1: honest[0], 2: silent}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    assert outcomes(tmp_path / "sites") == [{"0": "accepted", "1": "no answer"}]
    assert "0.3 s" in journal(tmp_path / "sites")[0]["sites"]["1"]["why"]


def test_too_few_sites_stop_the_run_with_their_count_and_a_checkpoint(
    tmp_path: Path, grid: MemoryGrid
) -> None:
    config = write(tmp_path / "experiment.toml", experiment())
    grid.nodes = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    trains = 0
    last = grid.nodes[1]

    def leaves(message: Message) -> Message:
        nonlocal trains
        answer = last(message)
        trains += message.metadata.message_type == MessageType.TRAIN
        if trains == 1:
            del grid.nodes[1]
        return answer

    grid.nodes[1] = leaves
    with pytest.raises(TooFewSites, match=r"needs at least 2 sites.*only 1 of 2 came within 0\.2 s"):
        serve(config, grid, {"out": str(tmp_path / "sites")})
    assert len(read_rounds(tmp_path / "sites")) == 1
    told = json.loads((tmp_path / "sites" / "flower-error.json").read_text())
    assert told["exit_code"] == 5
    assert "--resume" in told["message"]


def test_a_round_that_keeps_failing_stops_the_run(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(flower={"attempts": 2}))
    honest = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}

    def broken(message: Message) -> Message:
        if message.metadata.message_type == MessageType.TRAIN:
            raise RuntimeError("no GPU")
        return honest[1](message)

    grid.nodes = {1: honest[0], 2: broken}
    with pytest.raises(TooFewSites, match=r"1 good uploads of 2 asked for in 2 attempts.*no GPU"):
        serve(config, grid, {"out": str(tmp_path / "sites")})


def test_a_refused_upload_is_counted_and_the_round_goes_on(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(rounds=2, flower={"min_sites": 1}))
    honest = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}

    def lies(message: Message) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest[1](message)
        return Message(RecordDict({"seed-0": pack(b"not an upload")}), reply_to=message)

    grid.nodes = {1: honest[0], 2: lies}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    assert outcomes(tmp_path / "sites") == [{"0": "accepted", "1": "refused"}] * 2
    assert journal(tmp_path / "sites")[-1]["refused_so_far"] == {"1": 2}
    assert len(read_rounds(tmp_path / "sites")) == 2


@pytest.mark.parametrize("content", [RecordDict(), RecordDict({"seed-0": ArrayRecord()})])
def test_an_answer_of_another_kind_is_refused(content: RecordDict, tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(rounds=1, flower={"min_sites": 1}))
    honest = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}

    def odd(message: Message) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest[1](message)
        return Message(content, reply_to=message)

    grid.nodes = {1: honest[0], 2: odd}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    assert outcomes(tmp_path / "sites") == [{"0": "accepted", "1": "refused"}]


def test_two_nodes_cannot_be_the_same_site(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(rounds=1))
    handlers = [site_handler(config, tmp_path / "state", i) for i in (0, 1, 1, 9)]
    grid.nodes = dict(enumerate(handlers))
    serve(config, grid, {"out": str(tmp_path / "sites")})
    asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == MessageType.TRAIN]
    assert sorted(asked) == [0, 1]


@pytest.mark.parametrize(("policy", "outcome"), [("refuse", "failed"), ("restart", "accepted")])
def test_a_site_without_its_memory_refuses_or_starts_anew(
    policy: str, outcome: str, tmp_path: Path, grid: MemoryGrid
) -> None:
    made = experiment(
        method={"name": "fedavg+pews"},
        warmup={"rounds": 2},
        rounds=2,
        flower={"min_sites": 1, "lost_memory": policy},
    )
    config = write(tmp_path / "experiment.toml", made)
    honest = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    trains = 0

    def loses_its_disk(message: Message) -> Message:
        nonlocal trains
        trains += message.metadata.message_type == MessageType.TRAIN
        if trains == 2 and message.metadata.message_type == MessageType.TRAIN:
            shutil.rmtree(tmp_path / "state" / "site-1")
        answer: Message = honest[1](message)
        return answer

    grid.nodes = {1: honest[0], 2: loses_its_disk}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    assert outcomes(tmp_path / "sites")[1]["1"] == outcome


def test_sites_with_their_own_data_train_and_evaluate_without_showing_it(
    tmp_path: Path, grid: MemoryGrid
) -> None:
    made = experiment(
        data={
            "name": "sites",
            "partition": None,
            "train_per_class": None,
            "test_per_class": None,
            "clients": 2,
        },
        flower={"input_shape": [5], "classes": 4},
        method={"name": "fedavg+pews"},
        warmup={"rounds": 1},
    )
    config = write(tmp_path / "experiment.toml", made)
    for site in (0, 1):
        (tmp_path / f"clinic{site}.py").write_text(
            "import torch\n"
            "def load():\n"
            f"    x = torch.randn(20, 5, generator=torch.Generator().manual_seed({site}))\n"
            f"    y = torch.arange(20) % 2 + {2 * site}\n"
            "    return [(x, y)], (x[:10], y[:10])\n"
        )
    grid.nodes = {
        i: site_handler(config, tmp_path / "state", i, data=f"{tmp_path}/clinic{i}.py:load") for i in (0, 1)
    }
    serve(config, grid, {"out": str(tmp_path / "sites")})
    records = read_rounds(tmp_path / "sites")
    assert [record["round"] for record in records] == [1, 2, 3]
    assert all(record["accuracy"] == pytest.approx(sum(record["client_accuracy"]) / 2) for record in records)
    # of the test samples only totals leave a site: nobody learns how many it has of each class
    scores = [
        load(unpack(answer.content, name))
        for answer in grid.answered
        for name in answer.content
        if name.startswith("test-")
    ]
    assert scores
    assert all(score["seen"].numel() == score["correct"].numel() == 1 for score in scores)


def own_data(
    tmp_path: Path,
    method: str = "fedavg+pews",
    data: dict[str, Any] | None = None,
    flower: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Path, dict[int, Any]]:
    """Two sites, each with its own data and test samples; the server has none."""
    nothing = {"partition": None, "train_per_class": None, "test_per_class": None}
    made = experiment(
        data={"name": "sites", "clients": 2, **nothing, **(data or {})},
        flower={"input_shape": [5], "classes": 4, **(flower or {})},
        method={"name": method},
        warmup={"rounds": 1} if "pews" in method else {},
        rounds=4,
        **changes,
    )
    config = write(tmp_path / "experiment.toml", made)
    for site in (0, 1):
        (tmp_path / f"clinic{site}.py").write_text(
            "import torch\n"
            "def load():\n"
            f"    x = torch.randn(20, 5, generator=torch.Generator().manual_seed({site}))\n"
            f"    y = torch.arange(20) % 2 + {2 * site}\n"
            f"    return [(x, y)], (x[:{10 + site}], y[:{10 + site}])\n"
        )
    handlers = {
        i: site_handler(config, tmp_path / "state", i, data=f"{tmp_path}/clinic{i}.py:load") for i in (0, 1)
    }
    return config, handlers


def test_sites_evaluate_each_round_and_each_score_is_recorded(tmp_path: Path, grid: MemoryGrid) -> None:
    config, grid.nodes = own_data(tmp_path)
    serve(config, grid, {"out": str(tmp_path / "one")})
    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds.count(MessageType.TRAIN) == kinds.count(MessageType.EVALUATE) == 8
    records = read_rounds(tmp_path / "one")
    assert [record["round"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert {name: found["samples"] for name, found in record["sites"].items()} == {
            "site-0": 10,
            "site-1": 11,
        }
        mean = sum(found["accuracy"] * found["samples"] for found in record["sites"].values()) / 21
        assert record["accuracy"] == pytest.approx(mean)


def test_a_server_without_a_test_set_goes_on_to_the_same_numbers(tmp_path: Path, grid: MemoryGrid) -> None:
    config, honest = own_data(tmp_path)
    trains = 0

    def dies_in_round_3(message: Message) -> Message:
        nonlocal trains
        trains += message.metadata.message_type == MessageType.TRAIN
        if trains == 3:
            raise KeyboardInterrupt
        answer: Message = honest[1](message)
        return answer

    grid.nodes = {0: honest[0], 1: dies_in_round_3}
    with pytest.raises(Interrupted):
        serve(config, grid, {"out": str(tmp_path / "sites")})
    assert len(read_rounds(tmp_path / "sites")) == 2
    again = MemoryGrid()
    again.nodes = honest
    serve(config, again, {"out": str(tmp_path / "sites"), "resume": True})
    whole = MemoryGrid()
    config, whole.nodes = own_data(tmp_path)
    serve(config, whole, {"out": str(tmp_path / "whole")})
    assert without_seconds(tmp_path / "sites") == without_seconds(tmp_path / "whole")


def kept(tmp_path: Path, site: int, name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = (tmp_path / "state" / f"site-{site}").rglob(f"{name}-model-0.safetensors")
    model: dict[str, torch.Tensor] = load_file(path)
    return model


def test_each_site_gets_the_final_model_and_the_best_on_held_out_samples(
    tmp_path: Path, grid: MemoryGrid
) -> None:
    from safetensors.torch import load_file

    config, grid.nodes = own_data(tmp_path, data={"validation": 0.2}, stop={"best": True})
    serve(config, grid, {"out": str(tmp_path / "sites")})
    records = read_rounds(tmp_path / "sites")
    assert all(0 <= record["validation"]["accuracy"] <= 1 for record in records)
    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds.count(MessageType.EVALUATE) == 8  # test and held-out samples in one message
    for kind, name in (("final", "model-0"), ("best", "best-0")):
        model = load_file(tmp_path / "sites" / f"{name}.safetensors")
        for site in (0, 1):
            found = kept(tmp_path, site, kind)
            assert found.keys() == model.keys()
            assert all(torch.equal(found[name], value) for name, value in model.items())


def test_without_held_out_samples_no_model_is_called_the_best(tmp_path: Path, grid: MemoryGrid) -> None:
    config, grid.nodes = own_data(tmp_path)
    serve(config, grid, {"out": str(tmp_path / "sites")})
    assert kept(tmp_path, 0, "final")
    assert not list((tmp_path / "state").rglob("best-model-*"))


def test_each_site_has_its_own_model_in_its_folder(tmp_path: Path, grid: MemoryGrid) -> None:
    config, grid.nodes = own_data(tmp_path, method="fedavg+ditto")
    serve(config, grid, {"out": str(tmp_path / "sites")})
    mine, theirs = kept(tmp_path, 0, "personal"), kept(tmp_path, 1, "personal")
    assert mine.keys() == theirs.keys() == kept(tmp_path, 0, "final").keys()
    assert any(not torch.equal(mine[name], theirs[name]) for name in mine)
    assert "client_personal_accuracy" in read_rounds(tmp_path / "sites")[-1]


def test_sites_measure_any_task_on_their_own_samples(tmp_path: Path, grid: MemoryGrid) -> None:
    config, grid.nodes = own_data(
        tmp_path,
        method="fedavg",
        task={"name": "regression", "metrics": ["r2", "mae"]},
        flower={"classes": 1},
    )
    serve(config, grid, {"out": str(tmp_path / "sites")})
    for record in read_rounds(tmp_path / "sites"):
        by_site = record["sites"]
        assert by_site["site-0"].keys() == {"r2", "mae", "loss", "samples"}
        mean = (by_site["site-0"]["mae"] * 10 + by_site["site-1"]["mae"] * 11) / 21
        assert record["metrics"]["mae"] == pytest.approx(mean)
        # what the report page reads for every client
        assert record["client_metrics"]["mae"] == [found["mae"] for found in by_site.values()]


def test_warmup_rounds_send_less_over_the_wire(tmp_path: Path, grid: MemoryGrid) -> None:
    made = experiment(method={"name": "fedavg+pews"}, warmup={"rounds": 1}, rounds=2)
    config = write(tmp_path / "experiment.toml", made)
    grid.nodes = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    warmup, full = (
        sum(s["bytes_up"] for s in line["sites"].values()) for line in journal(tmp_path / "sites")
    )
    density = read_rounds(tmp_path / "sites")[0]["density"]
    assert density < 0.7
    assert warmup < 0.5 * full  # an element is sent only when the neurons on both of its sides are owned


@pytest.mark.parametrize(
    ("rule", "asked", "good", "closes"),
    [
        (FlowerTable(min_sites=2), 3, 2, True),
        (FlowerTable(min_sites=2), 3, 1, False),
        (FlowerTable(min_sites=2), 1, 1, True),  # a cohort of one needs only that one
        (FlowerTable(min_sites=1, max_failures=0), 2, 1, False),
        (FlowerTable(min_sites=1, max_failures=1), 2, 1, True),
    ],
)
def test_a_round_closes_with_enough_good_uploads(
    rule: FlowerTable, asked: int, good: int, closes: bool
) -> None:
    assert is_enough(rule, asked, good) is closes


def test_an_upload_above_the_norm_bound_is_refused(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(
        tmp_path / "experiment.toml", experiment(rounds=1, flower={"attempts": 1, "max_norm": 1e-6})
    )
    grid.nodes = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    with pytest.raises(TooFewSites, match="max_norm"):
        serve(config, grid, {"out": str(tmp_path / "sites")})
