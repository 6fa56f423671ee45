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
    assert "rounds=100" in code
    assert "list(range(10))" in code
    short = code.replace("rounds=100", "rounds=2").replace("list(range(10))", "[0]")
    said = output(short.replace('"rounds": 15', '"rounds": 1').replace("3200", "160"), tmp_path)
    assert [line.split()[0] for line in said.splitlines()] == ["fedavg", "fedavg+pews-fixed"]


@pytest.mark.slow
def test_the_examples_warmup_ends_far_higher_on_rows_nobody_trained_on(tmp_path: Path) -> None:
    means = [float(mean) for mean in re.findall(r"'mean': ([\d.]+)", output(example(), tmp_path))]
    plain, warm = means
    assert warm > plain + 0.2


def test_every_file_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    missing = [link for link in links if not (README.parent / link).exists()]
    assert len(links) > 5
    assert not missing
