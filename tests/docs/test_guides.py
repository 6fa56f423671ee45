"""The code of a guide runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "steer-a-run.md"


def test_the_guide_to_steering_a_run_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    assert names["result"].summary["ended_after"][0] < 200
    assert "<Run in runs/watched: fedavg" in capsys.readouterr().out


def test_every_key_that_the_guide_names_exists() -> None:
    from fedpews.experiment import known_keys

    named = set(re.findall(r"--set ([a-z_]+\.[a-z_]+)=", PAGE.read_text()))
    assert named
    assert named <= set(known_keys())
