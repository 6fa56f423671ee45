"""Real processes: what torchrun starts gives the numbers of one process, also after a rank was killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import fedpews

METHODS = ("fedavg", "fedavg+pews", "scaffold+pews")

SETTINGS = (
    *("run", "synthetic-3.2k", "--set", "data.partition=dirichlet", "--set", "data.alpha=0.5"),
    *("--seeds", "0,1", "--set", "data.clients=5", "--set", "train.steps=2", "--set", "warmup.rounds=2"),
    *("--set", "runtime.engine=eager", "--set", "runtime.workers=1", "--set", "runtime.checkpoint_every=2"),
)

DEADLY = """
import os, signal
calls = 0
def deadly(batch, seed):
    global calls
    calls += 1
    # two clients of two steps a round at the second rank: it dies in the middle of its fourth round
    if calls == 14 and os.environ.get("RANK") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return batch
"""


def torchrun(ranks: int, *arguments: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("--max-restarts", str(restarts), "-m", "fedpews", *SETTINGS, *arguments),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)


def rounds_of(folder: Path) -> list[str]:
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [re.sub(r'"seconds": [^,}]+', "", line) for line in lines]


def methods() -> list[str]:
    return [text for method in METHODS for text in ("--method", method)]


def test_two_ranks_then_three_then_one_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert fedpews(*SETTINGS, *methods(), "--rounds", "6", "--out", str(alone)).code == 0
    ended = torchrun(2, *methods(), "--rounds", "2", "--out", str(shared))
    assert ended.returncode == 0, ended.stderr
    # one rank prints
    assert ended.stderr.count("fedavg+pews: eager engine, on 2 ranks") == 1
    assert ended.stdout.count("results in") == 1
    ended = torchrun(3, *methods(), "--rounds", "4", "--out", str(shared), "--resume")
    assert ended.returncode == 0, ended.stderr
    assert "on 3 ranks, as asked, from round 3" in ended.stderr
    assert fedpews(*SETTINGS, *methods(), "--rounds", "6", "--out", str(shared), "--resume").code == 0
    for method in METHODS:
        assert rounds_of(alone / method) == rounds_of(shared / method), method
        model = "model-0.safetensors"
        assert (alone / method / model).read_bytes() == (shared / method / model).read_bytes()


@pytest.fixture
def deadly(tmp_path: Path) -> tuple[str, ...]:
    place = tmp_path / "deadly.py"
    place.write_text(DEADLY)
    augment = f'data.augment=["{place}:deadly"]'
    return ("--rounds", "6", "--seeds", "0", "--set", "data.clients=4", "--set", augment)


def test_a_killed_rank_is_started_again_and_the_numbers_are_the_same(
    deadly: tuple[str, ...], tmp_path: Path
) -> None:
    ended = torchrun(2, *deadly, "--method", "scaffold+pews", "--out", str(tmp_path / "two"), restarts=1)
    assert ended.returncode == 0, ended.stderr
    # the last complete round was saved: the first rank has all memories
    assert "from round 4" in ended.stderr
    alone = fedpews(*SETTINGS, *deadly, "--method", "scaffold+pews", "--out", str(tmp_path / "one"))
    assert alone.code == 0, alone.stderr
    assert rounds_of(tmp_path / "one") == rounds_of(tmp_path / "two")


def test_a_killed_rank_ends_all_with_a_checkpoint_and_code_five(
    deadly: tuple[str, ...], tmp_path: Path
) -> None:
    ended = torchrun(2, *deadly, "--method", "fedavg", "--out", str(tmp_path / "two"))
    assert ended.returncode != 0
    assert "error: rank 1 of 2 is gone" in ended.stderr
    assert re.search(r"rank +: 0 .*\n +exitcode +: 5 ", ended.stderr)
    # one line of ours, before what torchrun has to say
    assert "Traceback" not in ended.stderr.partition("torch/distributed/elastic")[0]
    # the last complete round was saved, though no checkpoint was due
    again = fedpews(*SETTINGS, *deadly, "--method", "fedavg", "--out", str(tmp_path / "two"), "--resume")
    assert again.code == 0, again.stderr
    assert "from round 4" in again.stderr
    alone = fedpews(*SETTINGS, *deadly, "--method", "fedavg", "--out", str(tmp_path / "one"))
    assert alone.code == 0
    assert rounds_of(tmp_path / "one") == rounds_of(tmp_path / "two")
