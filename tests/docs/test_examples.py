"""The example scripts run as they are, and show what they are meant to show."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(name: str, folder: Path) -> str:
    # many threads on a busy machine only wait for each other
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, EXAMPLES / name]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_round_by_hand_learns_and_ends_its_warmup(tmp_path: Path) -> None:
    rounds = re.findall(r"round +(\d+) (\w+) +([\d.]+)", output("a_round_by_hand.py", tmp_path))
    assert [kind for _, kind, _ in rounds] == ["warmup"] * 10 + ["full"] * 20
    assert float(rounds[-1][2]) > 0.8


def test_own_model_and_data_trains_the_users_module(tmp_path: Path) -> None:
    said = output("own_model_and_data.py", tmp_path)
    assert float(re.findall(r"accuracy ([\d.]+)", said)[0]) > 0.7
    assert "BatchNorm1d" in said


TASKS = ("domain_shift", "multilabel", "regression", "segmentation", "tabular", "text")


@pytest.mark.parametrize("name", TASKS)
def test_the_example_of_a_task_trains_with_and_without_a_warmup(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / "tasks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = {"samples": 48} if "samples" in inspect.signature(module.main).parameters else {}

    module.main(rounds=2, **small)

    lines = capsys.readouterr().out.splitlines()
    assert any("fedavg " in line for line in lines)
    assert any("fedavg+pews" in line for line in lines)


def test_every_example_is_in_the_gallery_with_a_picture_and_a_command() -> None:
    rows = re.findall(
        r"^\| !\[[^\]]+\]\((\S+)\) \|.*?\]\((\S+)\).*\| `(.+)` \|$",
        (EXAMPLES / "README.md").read_text(),
        re.MULTILINE,
    )
    scripts = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb"), *EXAMPLES.glob("tasks/*.py")]
    folders = [
        path for path in EXAMPLES.iterdir() if path.is_dir() and path.name not in ("tasks", "pictures")
    ]
    shown = {EXAMPLES / link for _, link, _ in rows}
    assert {path for path in [*scripts, *folders] if path.name != "__pycache__"} == shown
    assert all((EXAMPLES / picture).exists() for picture, _, _ in rows)
    assert {Path(picture).name for picture, _, _ in rows} == {
        path.name for path in (EXAMPLES / "pictures").iterdir()
    }
