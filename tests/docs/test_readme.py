"""What the README shows works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def output(code: str, folder: Path) -> str:
    script = folder / "own.py"
    script.write_text(code)
    # many threads on a busy machine only wait for each other
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return str(code)


def test_the_example_runs_also_when_it_is_short(tmp_path: Path) -> None:
    code = example()
    assert "seeds=[0, 1, 2], progress=True" in code
    settings = 'rounds=2, warmup={"rounds": 1}, data={"train_per_class": 40, "test_per_class": 20}, seeds=[0]'
    said = output(code.replace("seeds=[0, 1, 2], progress=True", settings), tmp_path)
    assert [line.split()[0] for line in said.splitlines()] == ["fedavg", "fedavg+pews"]
    assert (tmp_path / "accuracy.png").exists()


@pytest.mark.slow
def test_the_warmup_of_the_example_ends_far_higher(tmp_path: Path) -> None:
    means = [float(mean) for mean in re.findall(r"'mean': ([\d.]+)", output(example(), tmp_path))]
    plain, warm = means
    assert warm > plain + 0.2


def test_every_file_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    missing = [link for link in links if not (README.parent / link).exists()]
    assert len(links) > 5
    assert not missing
