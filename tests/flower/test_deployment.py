"""A real SuperLink and real SuperNodes, with TLS and authentication, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from command_line import fedpews
from fedpews.results.records import read_rounds
from waiting import when

CONFIG = """
rounds = 3
seeds = [0, 1]
[data]
name = "synthetic-3.2k"
partition = "parity"
train_per_class = 40
test_per_class = 20
[train]
batch_size = 16
[method]
name = "scaffold+pews"
[warmup]
rounds = 1
[runtime]
engine = "eager"
"""
LONGEST = 900
FEDPEWS = (sys.executable, "-c", "from fedpews.cli import main; main()")


def start(config: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [*FEDPEWS, "flower", "up", str(config), "--sites", "2", "--out", str(out)]
    return subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    def met() -> bool:
        if condition():
            return True
        assert process.poll() is None, process.communicate()[0]
        return False

    when(met)


def rounds_done(out: Path) -> int:
    return len({r["round"] for r in read_rounds(out)}) if (out / "rounds.jsonl").exists() else 0


def pid(process: subprocess.Popen[str], *words: str) -> int:
    """The process that `up` started with these words in its command."""
    (found,) = [
        c.pid for c in psutil.Process(process.pid).children() if " ".join(words) in " ".join(c.cmdline())
    ]
    return found


def without_seconds(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in read_rounds(folder)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "trial.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def alone(config: Path, tmp_path: Path) -> Path:
    """The same run in one process."""
    out = tmp_path / "process"
    assert fedpews("run", str(config), "--out", str(out), "--quiet").code == 0
    return out


def assert_same_run(out: Path, alone: Path) -> None:
    assert without_seconds(out) == without_seconds(alone)
    for name in ("model-0.safetensors", "model-1.safetensors", "masks-0.safetensors"):
        assert (out / name).read_bytes() == (alone / name).read_bytes()


def test_a_deployment_gives_the_numbers_of_one_process(config: Path, alone: Path, tmp_path: Path) -> None:
    process = start(config, tmp_path / "sites")
    text, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, text
    assert_same_run(tmp_path / "sites", alone)


@pytest.mark.slow
def test_a_deployment_whose_superlink_is_killed_resumes_to_the_numbers_of_one_process(
    config: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sites"
    first = start(config, out)
    wait_for(first, lambda: rounds_done(out) >= 1)
    os.kill(pid(first, "flower-superlink"), signal.SIGKILL)
    text, _ = first.communicate(timeout=LONGEST)
    assert first.returncode == 5
    assert "--resume" in text
    assert rounds_done(out) in (1, 2)

    again = start(config, out, "--resume")
    text, _ = again.communicate(timeout=LONGEST)
    assert again.returncode == 0, text
    assert_same_run(out, alone)


@pytest.mark.slow
def test_a_site_killed_in_a_round_is_asked_again_and_the_numbers_stay(
    config: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sites"
    process = start(config, out, "--set", "flower.max_failures=0")
    wait_for(process, lambda: rounds_done(out) >= 1)
    os.kill(pid(process, "--site", "1"), signal.SIGKILL)
    text, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, text
    assert "site 1 ended" in text
    assert_same_run(out, alone)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_running_however_it_is_stopped(number: int, config: Path, tmp_path: Path) -> None:
    process = start(config, tmp_path / "sites")
    wait_for(process, lambda: rounds_done(tmp_path / "sites") >= 1)
    family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    assert len(family) >= 3
    process.send_signal(number)
    process.communicate(timeout=LONGEST)
    when(lambda: not any(map(alive, family)))
    if number != signal.SIGKILL:
        assert process.returncode == 130
