"""What the README shows works."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_with_ones_own_model_and_data_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "own.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'mean'" in done.stdout
    assert (tmp_path / "accuracy.png").exists()


def test_every_file_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    missing = [link for link in links if not (README.parent / link).exists()]
    assert len(links) > 5
    assert not missing


def test_the_measured_parts_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("measured", README.parent / "docs" / "measured.py")
    assert spec is not None
    assert spec.loader is not None
    measured = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measured)
    assert measured.with_parts(README.read_text()) == README.read_text(), "run make docs"
