"""Runs side by side: sentences that follow from the numbers, and what must not be compared."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from command_line import fedpews
from fedpews.report.compare import compare, remarks, spread, table, verdicts
from fedpews.report.runs import Run, find_runs
from fedpews.results.records import summarize
from fedpews.tasks.names import Goal


def made(
    label: str, finals: list[float], rounds: int = 3, planned: int = 3, target: float = 0.9, **data: Any
) -> Run:
    """A run whose accuracy climbs in a straight line to each seed's final one."""
    records = [
        {
            "seed": seed,
            "round": t,
            "phase": "train",
            "accuracy": final * t / rounds,
            "bytes_up": 10,
            "bytes_down": 10,
            "seconds": 1.0,
        }
        for t in range(1, rounds + 1)
        for seed, final in enumerate(finals)
    ]
    config = {"rounds": planned, "data": {"name": "a", **data}, "method": {"name": label}}
    return Run(label, None, records, summarize(records, label, Goal(value=target)), config, rounds == planned)


def test_better_is_said_with_its_interval() -> None:
    (told,) = verdicts([made("fedavg", [0.5, 0.6, 0.7]), made("pews", [0.6, 0.7, 0.8])])

    assert told.startswith(
        "pews ends better than fedavg by 10.00 points of accuracy (95 % interval over 3 paired seeds)."
    )


def test_where_nobody_arrives_nobody_is_tied() -> None:
    (told,) = verdicts([made("fedavg", [0.5, 0.6, 0.7]), made("pews", [0.6, 0.7, 0.8])])

    assert told.endswith("Neither reaches 90 % within 3 rounds.")
    assert "tied" not in told


def test_a_seed_that_never_arrives_is_counted_as_the_whole_run_and_that_is_said() -> None:
    base, other = made("fedavg", [0.5] * 3, target=0.6), made("pews", [0.9] * 3, target=0.6)

    (one,) = compare([base, other])

    assert one.reach.mean == 1.0  # round 2 (0.6) against all 3
    assert one.sentences[1] == (
        "pews reaches 60 % in 3 of 3 seeds, fedavg in 0; it is sooner by 1 round, "
        "a seed that never arrives counted as 3."
    )


@pytest.mark.parametrize(("finals", "words"), [([0.5], "with one seed"), ([0.5, 0.6], "with 2 seeds")])
def test_too_few_seeds_say_so_instead_of_a_verdict(finals: list[float], words: str) -> None:
    (told,) = verdicts([made("fedavg", finals), made("pews", [value + 0.1 for value in finals])])

    assert told.startswith(
        f"Not enough runs to say which is better: {words}, pews ends at 10.00 points higher"
    )


def test_other_data_is_not_compared_and_said_first() -> None:
    runs = [made("fedavg", [0.5] * 3), made("pews", [0.9] * 3, alpha=0.1)]

    assert remarks(runs) == [
        "These runs were trained on different data; their numbers do not measure the same thing."
    ]
    assert verdicts(runs) == ["pews and fedavg are not compared: they were trained on different data."]


def test_an_unfinished_run_is_compared_at_the_last_round_both_have() -> None:
    done, going = made("fedavg", [0.9] * 3), made("pews", [0.5] * 3, rounds=2)

    (one,) = compare([done, going])

    assert remarks([done, going]) == ["pews is not finished: round 2 of 3."]
    assert table([done, going])[1][0] == "pews (round 2 of 3)"
    assert one.final.mean == pytest.approx(50 - 60)  # 0.9 · 2/3 at round 2
    assert "at round 2, the last both have" in one.sentences[0]


def test_runs_without_a_common_seed_are_not_compared() -> None:
    base, other = made("a", [0.5]), made("b", [0.6])
    moved = [record | {"seed": 7} for record in other.records]
    other = Run("b", None, moved, summarize(moved, "b", Goal(value=0.9)), other.config)

    assert verdicts([base, other]) == ["b and a are not compared: they have no seed in common."]


def test_one_seed_has_no_deviation() -> None:
    assert spread({"mean": 0.5, "std": 0.0, "by_seed": [0.5]}, 100, 2) == "50.00"
    assert summarize(made("a", [0.5]).records, "a", Goal(value=0.9))["final_accuracy"]["std"] is None


def test_several_comparisons_are_corrected_together() -> None:
    runs = [made("a", [0.5, 0.6, 0.7]), made("b", [0.6, 0.7, 0.8]), made("c", [0.7, 0.8, 0.9])]

    assert [one.final.p for one in compare(runs)] == [0.25, 0.25]
    assert [one.adjusted for one in compare(runs)] == [0.5, 0.5]


def test_a_narrow_window_folds_names_and_never_cuts_a_number(
    runs_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpews.cli.runs.out", Console(highlight=False, width=40))
    done = fedpews("compare", str(runs_folder))

    assert done.code == 0, done.stderr
    assert "…" not in done.stdout
    for row in table(find_runs([runs_folder])):
        assert all(cell in done.stdout for cell in row[1:])
