"""Short versions of ``make torture`` and ``make damage``: a few kills and damages of each kind."""

from __future__ import annotations

import sys
from pathlib import Path

import damage
import processes
import pytest
import torture

from fedpews.compose import METHODS, PERSONAL, WARMUPS


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    processes.warm_up()


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc")
@pytest.mark.parametrize(
    ("method", "phases"),
    [
        ("lotteryfl", ["write", "append", "delete"]),
        ("scaffold+pews", ["rename", "sync", "round"]),
        ("fedweit", ["start", "write"]),
    ],
)
def test_a_run_killed_anywhere_goes_on_to_the_same_bytes(
    method: str, phases: list[str], tmp_path: Path
) -> None:
    whole = torture.undisturbed(tmp_path / "whole", method, "eager", tmp_path / "cache")
    for phase in phases:
        draw = processes.generator(0, method, phase)
        folder = tmp_path / phase
        verdict, kills, said = torture.torture(
            whole, folder, method, "eager", phase, tmp_path / "cache", draw
        )
        assert verdict in ("identical", "healed"), said
        assert kills


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_no_damaged_file_gives_another_result_or_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    wrong, rows = damage.main(0, ["flip", "delete", "folder"], ["killed"], every=4)
    assert not wrong, capsys.readouterr().out
    assert sum(row["healed"] for row in rows.values())
    assert sum(row["refused"] for row in rows.values())


def test_every_method_is_in_the_list_of_those_killed_and_resumed() -> None:
    listed = {part for name in processes.METHODS for part in name.split("+")}
    # fedbn needs a model with norm layers, and the other optimisers of a server have the same slots as fedadam
    assert {*METHODS, *PERSONAL, *WARMUPS, "fedexp", "fedadam"} - {"fedbn"} <= listed
