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
    label: str,
    finals: list[float],
    rounds: int = 3,
    planned: int = 3,
    target: float | None = 0.9,
    metric: str = "accuracy",
    **data: Any,
) -> Run:
    """A run whose metric climbs in a straight line to each seed's final one."""
    records = [
        {
            "seed": seed,
            "round": t,
            "phase": "train",
            "metrics": {metric: final * t / rounds},
            "bytes_up": 10,
            "bytes_down": 10,
            "seconds": 1.0,
        }
        for t in range(1, rounds + 1)
        for seed, final in enumerate(finals)
    ]
    config = {"rounds": planned, "data": {"name": "a", **data}, "method": {"name": label}}
    goal = Goal(metric, target if metric == "accuracy" else None)
    return Run(label, None, records, summarize(records, label, goal), config, rounds == planned)


BASE, HIGHER = [0.5, 0.6, 0.7] * 2, [0.6, 0.7, 0.8] * 2


def test_better_is_said_with_both_numbers_and_the_interval() -> None:
    (sentence,) = verdicts([made("fedavg", BASE), made("pews", HIGHER)])

    assert sentence.startswith("pews: 70 % vs 60 % (fedavg), +10 points [10, 10], 6 seeds.")


def test_what_is_to_be_lowered_has_a_difference_below_zero() -> None:
    (comparison,) = compare([made("fedavg", HIGHER, metric="loss"), made("pews", BASE, metric="loss")])

    assert comparison.final.outcome == "better"
    assert comparison.sentences == ["pews: 0.60 vs 0.70 (fedavg), −0.10 loss [−0.10, −0.10], 6 seeds."]


@pytest.mark.parametrize(
    ("finals", "words"),
    [
        ([0.5], "1 seed is too few to tell: pews +10 points against fedavg."),
        ([0.5, 0.6], "2 seeds are too few to tell: pews +10 points against fedavg, between +10 and +10."),
    ],
)
def test_too_few_seeds_say_so_instead_of_a_verdict(finals: list[float], words: str) -> None:
    (sentence,) = verdicts([made("fedavg", finals), made("pews", [value + 0.1 for value in finals])])

    assert sentence.startswith(words)


def test_an_undecided_difference_is_given_with_its_interval_and_not_as_a_bound() -> None:
    # gains of 20, -10 and -10 points: mean 0, sd 17.3, t(2) = 4.303, half of the interval 43
    (sentence,) = verdicts([made("fedavg", [0.5] * 3), made("pews", [0.7, 0.4, 0.4])])

    assert sentence.startswith(
        "3 seeds are too few to tell: pews 0 points against fedavg, between −43 and +43."
    )


def test_a_comparison_among_several_is_decided_by_the_corrected_p() -> None:
    alone = made("fedavg", BASE), made("pews", HIGHER)

    sentences = verdicts([*alone, made("ist", HIGHER)])

    assert [
        difference.outcome
        for difference in (compare(alone)[0].final, compare([*alone, made("ist", HIGHER)])[0].final)
    ] == [
        "better",
        "undecided",
    ]
    # two flips of 64, twice
    assert sentences[0].startswith(
        "6 seeds do not decide: pews +10 points against fedavg, between +10 and +10; p = 0.062 (Holm)."
    )


def test_where_nobody_arrives_nobody_is_tied() -> None:
    (sentence,) = verdicts([made("fedavg", [0.5, 0.6, 0.7]), made("pews", [0.6, 0.7, 0.8])])

    assert sentence.endswith("Neither reaches 90 % within 3 rounds.")
    assert "tied" not in sentence


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        (3, "pews reaches 60 % in 3 of 3 seeds, fedavg in 0 of 3."),
        (
            6,
            "pews reaches 60 % in 6 of 6 seeds, fedavg in 0 of 6; it is sooner by 1 round, "
            "a seed that never arrives counted as 3.",
        ),
    ],
)
def test_seeds_that_arrive_are_counted_and_rounds_are_bounded_by_no_empty_number(
    seeds: int, words: str
) -> None:
    base, other = made("fedavg", [0.5] * seeds, target=0.6), made("pews", [0.9] * seeds, target=0.6)

    (comparison,) = compare([base, other])

    assert comparison.reach.mean == 1.0  # round 2 (0.6) against all 3
    assert comparison.sentences[1] == words


def test_a_target_that_no_seed_reaches_is_reached_by_none() -> None:
    rows = table([made("fedavg", [0.5, 0.5], target=0.6), made("pews", [0.5, 0.9], target=0.6)])

    assert [row[2:4] for row in rows] == [("none", "0/2"), ("not all", "1/2")]


def test_other_data_is_not_compared_and_said_first() -> None:
    runs = [made("fedavg", [0.5] * 3), made("pews", [0.9] * 3, alpha=0.1)]

    assert remarks(runs) == [
        "These runs were trained on different data, so their numbers are not comparable."
    ]
    assert verdicts(runs) == ["pews and fedavg are not compared: they were trained on different data."]


def test_an_unfinished_run_is_compared_at_the_last_round_both_have() -> None:
    done, going = made("fedavg", [0.9] * 3), made("pews", [0.5] * 3, rounds=2)

    (comparison,) = compare([done, going])

    assert remarks([done, going]) == ["pews is not finished: round 2 of 3."]
    assert table([done, going])[1][0] == "pews (round 2 of 3)"
    assert comparison.final.mean == pytest.approx(50 - 60)  # 0.9 · 2/3 at round 2
    assert "at round 2, the last both have" in comparison.sentences[0]


def test_runs_without_a_common_seed_are_not_compared() -> None:
    base, other = made("a", [0.5]), made("b", [0.6])
    moved = [record | {"seed": 7} for record in other.records]
    other = Run("b", None, moved, summarize(moved, "b", Goal(value=0.9)), other.config)

    assert verdicts([base, other]) == ["b and a are not compared: they have no seed in common."]


def test_one_seed_has_no_deviation() -> None:
    assert spread({"mean": 50.0, "std": None, "by_seed": [50.0]}, 2) == "50.00"
    assert summarize(made("a", [0.5]).records, "a", Goal(value=0.9))["final_accuracy"]["std"] is None


def test_several_comparisons_are_corrected_together() -> None:
    runs = [made("a", [0.5, 0.6, 0.7]), made("b", [0.6, 0.7, 0.8]), made("c", [0.7, 0.8, 0.9])]

    assert [comparison.final.p for comparison in compare(runs[:2])] == [0.25]
    assert [comparison.final.p for comparison in compare(runs)] == [0.5, 0.5]


def test_a_narrow_window_folds_names_and_never_cuts_a_number(
    runs_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpews.cli.console.out", Console(highlight=False, width=40))
    done = fedpews("compare", str(runs_folder))

    assert done.code == 0, done.stderr
    assert "…" not in done.stdout
    for row in table(find_runs([runs_folder])):
        assert all(cell in done.stdout for cell in row[1:])
