"""What is said of a claim, with intervals and tests worked out by hand."""

from __future__ import annotations

import pytest

from fedpews.paper.cells import CellResult
from fedpews.paper.claims import Verdict, conclude, evaluate_claims, summarise
from fedpews.paper.page import apart_rows
from fedpews.paper.study import Claim, cells
from toy import study

SEEDS = range(6)


def readings(
    gains: list[float], column: str = "a", base: float = 70.0
) -> dict[tuple[str, str, str], dict[int, float]]:
    mine = {seed: base + gain for seed, gain in enumerate(gains)}
    # a seed that only one of them has is not compared
    return {
        ("final", "fedavg", column): dict.fromkeys(range(len(gains)), base),
        ("final", "pews", column): {**mine, 99: 1.0},
    }


@pytest.mark.parametrize(
    ("gains", "by", "agrees", "finding"),
    [
        # mean 2, deviation √0.8, t(5) = 2.571: half the interval is 2.571·√(0.8/6) = 0.94
        ([1.0, 3.0, 2.0, 1.0, 3.0, 2.0], 0.0, True, "better by 1.06 to 2.94 points"),
        ([1.0, 3.0, 2.0, 1.0, 3.0, 2.0], 2.0, None, "better by 1.06 to 2.94 points"),
        ([-1.0, -3.0, -2.0, -1.0, -3.0, -2.0], 0.0, False, "worse by 1.06 to 2.94 points"),
        # mean 0, deviation √2.4: 2.571·√(2.4/6) = 1.63
        ([2.0, -2.0, 1.0, -1.0, 1.0, -1.0], 0.0, None, "undecided"),
        ([2.0] * 5, 0.0, None, "not enough runs (5 seeds)"),
        ([2.0], 0.0, None, "not enough runs (1 seed)"),
    ],
)
def test_the_words_follow_from_the_interval(
    gains: list[float], by: float, agrees: bool | None, finding: str
) -> None:
    claim = Claim(text="higher", rows=["pews"], than="fedavg", columns=["a"], by=by)

    (verdict,) = evaluate_claims(study(claims=[claim]), readings(gains))

    assert (verdict.finding, verdict.agrees, verdict.seeds) == (finding, agrees, len(gains))
    assert verdict.paper == "+5.00 points"  # 75 − 70
    assert verdict.where == "PeWS against FedAvg, A"


def test_a_unanimous_gain_of_six_seeds_has_the_p_of_two_flips_in_sixty_four() -> None:
    claim = Claim(text="higher", rows=["pews"], than="fedavg", columns=["a"])
    (verdict,) = evaluate_claims(study(claims=[claim]), readings([1.0, 3.0, 2.0, 1.0, 3.0, 2.0]))
    assert verdict.p == pytest.approx(2 / 64)


def test_all_claims_of_a_page_are_corrected_together() -> None:
    claim = Claim(text="higher", rows=["pews"], than="fedavg")
    both = readings([1.0, 3.0, 2.0, 1.0, 3.0, 2.0]) | readings([1.0, 3.0, 2.0, 1.0, 3.0, 2.0], "b")
    verdicts = evaluate_claims(study(claims=[claim]), both)
    assert [verdict.p for verdict in verdicts] == [
        pytest.approx(4 / 64)
    ] * 2  # Holm: the smaller of two, doubled


def test_what_only_its_own_interval_says_is_not_concluded() -> None:
    claim = Claim(text="higher", rows=["pews"], than="fedavg")
    both = readings([1.0, 3.0, 2.0, 1.0, 3.0, 2.0]) | readings([1.0, 3.0, 2.0, 1.0, 3.0, 2.0], "b")
    verdict = evaluate_claims(study(claims=[claim]), both)[0]  # p = 4/64 among two claims
    assert verdict.agrees is None
    assert verdict.finding == "undecided"


def test_fewer_rounds_are_better() -> None:
    claim = Claim(text="faster", rows=["pews"], than="fedavg", measure="rounds", columns=["a"])
    measured = {
        ("rounds", "pews", "a"): dict(enumerate([100.0, 90, 95, 100, 90, 95])),
        ("rounds", "fedavg", "a"): dict(enumerate([120.0, 130, 125, 120, 130, 125])),
    }
    (verdict,) = evaluate_claims(study(claims=[claim]), measured)
    assert verdict.agrees is True
    assert verdict.ours.startswith("+30.0 rounds [")  # (20 + 40 + 30 + 20 + 40 + 30) / 6


@pytest.mark.parametrize(
    ("gains", "agrees"),
    [
        ([0.3, -0.3, 0.2, -0.2, 0.1, -0.1], True),
        ([3.1, 2.9, 3.0, 3.1, 2.9, 3.0], False),
        ([3.0, -3.0, 2.0, -2.0, 1.0, -1.0], None),
    ],
)
def test_near_asks_that_the_whole_interval_is_small(gains: list[float], agrees: bool | None) -> None:
    claim = Claim(text="same", kind="near", rows=["pews"], than="fedavg", columns=["a"], within=1.0)
    assert evaluate_claims(study(claims=[claim]), readings(gains))[0].agrees is agrees


def test_near_tests_that_no_difference_is_large_not_that_there_is_none() -> None:
    claim = Claim(text="same", kind="near", rows=["pews"], than="fedavg", within=1.0)
    gains = [0.3, 0.2, 0.3, 0.2, 0.3, 0.2]  # a small difference beyond doubt: the interval is above 0
    measured = readings(gains) | readings([8.0, -8.0, 7.0, -7.0, 6.0, -6.0], "b")

    small, unknown = evaluate_claims(study(claims=[claim]), measured)

    assert small.agrees is True
    assert small.finding == "no difference larger than 0.31 points"  # 0.25 + 2.571·√(0.003/6)
    # one flip of 64 is as far above -1, and one as far below 1; Holm doubles the smaller of two
    assert small.p == pytest.approx(2 / 64)
    # that no difference is measured between numbers so far apart does not make them near
    assert (unknown.agrees, unknown.p) == (None, pytest.approx(0.5, abs=0.2))
    assert unknown.finding == "undecided"


def test_shrinks_compares_the_gain_in_the_first_column_with_the_last_seed_by_seed() -> None:
    claim = Claim(text="shrinks", kind="shrinks", rows=["pews"], than="fedavg")
    measured = readings([5.0, 6.0, 5.0, 6.0, 5.0, 6.0]) | readings([1.0, 1.0, 2.0, 2.0, 1.0, 2.0], "b", 80.0)
    (verdict,) = evaluate_claims(study(claims=[claim]), measured)
    assert verdict.agrees is True
    assert verdict.ours.startswith("+4.00 points [")  # (4 + 5 + 3 + 4 + 4 + 4) / 6


def test_between_looks_at_the_interval_not_at_the_mean() -> None:
    claim = Claim(text="fails", kind="between", rows=["fedavg"], columns=["a"], low=0, high=75)

    def agrees(values: list[float]) -> bool | None:
        return evaluate_claims(study(claims=[claim]), {("final", "fedavg", "a"): dict(enumerate(values))})[
            0
        ].agrees

    assert agrees([70.0, 71, 70, 71, 70, 71]) is True
    assert agrees([70.0, 78, 70, 78, 70, 78]) is None
    assert agrees([80.0, 81, 80, 81, 80, 81]) is False


def test_a_baseline_is_compared_with_in_every_column() -> None:
    rows = dict(study().rows)
    rows["fedavg"] = rows["fedavg"].model_copy(update={"columns": ["a"], "baseline": True})
    measured = readings([1.0] * 8) | {("final", "pews", "b"): dict.fromkeys(range(8), 69.0)}

    verdicts = evaluate_claims(study(rows=rows, paper={}), measured)

    assert [verdict.agrees for verdict in verdicts] == [True, False]


def test_a_row_of_one_column_is_not_compared_with_elsewhere() -> None:
    rows = dict(study().rows)
    rows["fedavg"] = rows["fedavg"].model_copy(update={"columns": ["a"]})
    measured = readings([1.0] * 6) | {("final", "pews", "b"): dict.fromkeys(SEEDS, 69.0)}

    verdicts = evaluate_claims(study(rows=rows, paper={}), measured)

    assert [verdict.finding for verdict in verdicts] == ["better by 1.00 points", "not run"]


def test_the_paper_says_in_words_when_one_side_never_arrives() -> None:
    paper = {"rounds": {"fedavg": ["×", "100"], "pews": ["50 ± 3", "×"]}}
    claim = Claim(text="faster", rows=["pews"], than="fedavg", measure="rounds")
    verdicts = evaluate_claims(study(claims=[claim], paper=paper), {})
    assert [verdict.paper for verdict in verdicts] == ["only it arrives", "only the other arrives"]
    assert all(verdict.finding == "not run" for verdict in verdicts)


def test_several_cells_are_summed_up_without_hiding_the_undecided() -> None:
    verdicts = [
        Verdict(claim="", where="", paper="", ours="", seeds=seeds, finding="", agrees=agrees)
        for agrees, seeds in ((True, 6), (None, 6), (False, 6), (None, 0))
    ]
    assert summarise(verdicts) == (
        "agrees in 1 of 3 cells, contradicts in 1, undecided in 1 (3 of 4 cells measured)"
    )


def test_our_number_is_compared_with_the_papers_where_both_have_a_spread() -> None:
    paper = {"final": {"fedavg": ["70 ± 1", "60"], "pews": ["75 ± 2", "× ± NA"]}}
    ours = readings([1.0, 3.0, 2.0, 1.0, 3.0, 2.0]) | readings([1.0, 2.0], "b")
    del ours["final", "pews", "a"][99]
    toy = study(paper=paper)
    results = []
    for cell in cells(toy):
        finals = ours["final", cell.row, cell.column]
        results.append(
            CellResult(cell, {seed: [{"accuracy": value / 100}] for seed, value in finals.items()})
        )
    outcome = conclude(toy, results)

    header, fedavg, pews = apart_rows(outcome, "final")

    assert header == ["", "A", "B"]
    # 70 in every seed: the paper's deviation alone, 4.303·√(1/3)
    assert fedavg == ["FedAvg", "+0.00 [-2.48, +2.48]", ""]
    # 72 − 75; √(0.8/6 + 4/3) = 1.21, 2.41 degrees of freedom, t = 3.68
    assert pews == ["PeWS", "-3.00 [-7.45, +1.45]", ""]
