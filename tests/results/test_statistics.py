"""Who is better, by how much: against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest

from fedpews.results.statistics import (
    Difference,
    corrected,
    holm,
    interval,
    paired_difference,
    restricted_rounds,
    sign_flip_test,
)


def test_the_interval_of_a_few_seeds_is_students() -> None:
    difference = paired_difference([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])

    # sd 1, standard error 1/√3, t(0.975, 2) = 4.3027
    assert (difference.mean, difference.seeds) == (2.0, 3)
    assert (difference.low, difference.high) == pytest.approx(
        (2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-4
    )


def test_only_seeds_that_both_have_are_paired() -> None:
    difference = paired_difference({0: 5.0, 1: 6.0, 2: 7.0, 9: 100.0}, {0: 4.0, 1: 5.0, 2: 6.0, 3: 0.0})

    assert (difference.mean, difference.low, difference.high, difference.seeds) == (1.0, 1.0, 1.0, 3)


def test_where_less_is_better_fewer_is_a_gain() -> None:
    difference = paired_difference([10, 12, 11] * 2, [20, 22, 21] * 2, higher_is_better=False)

    assert difference.outcome == "better"
    assert difference.describe(0, " rounds") == "better by 10 rounds"


def test_swapping_the_two_turns_better_into_worse_by_as_much() -> None:
    a, b = [0.91, 0.88, 0.93, 0.90, 0.91, 0.91], [0.80, 0.82, 0.79, 0.81, 0.81, 0.81]

    # gains .11 .06 .14 .09 .10 .10: mean .1, sd .0261, t(0.975, 5) = 2.571, half of the interval .0274
    assert paired_difference(a, b).describe(2) == "better by 0.07 to 0.13"
    assert paired_difference(b, a).describe(2) == "worse by 0.07 to 0.13"


def test_an_interval_with_zero_inside_decides_nothing_and_bounds_nothing() -> None:
    assert Difference(1.0, -0.5, 2.5, 6, 0.2).describe() == "undecided"


def test_what_the_interval_says_and_the_corrected_p_does_not_is_undecided() -> None:
    alone = paired_difference([0.9, 0.8, 0.7] * 2, [0.6] * 6)  # unanimous: p = 2/64

    assert alone.outcome == "better"
    assert [difference.outcome for difference in corrected([alone, alone])] == ["undecided"] * 2  # Holm: 4/64


@pytest.mark.parametrize(("seeds", "words"), [(1, "1 seed"), (5, "5 seeds")])
def test_fewer_than_six_seeds_are_not_enough_however_far_apart(seeds: int, words: str) -> None:
    difference = paired_difference([0.9] * seeds, [0.1] * seeds)

    assert difference.describe() == f"not enough runs ({words})"


def test_no_common_seed_says_nothing() -> None:
    difference = paired_difference({0: 1.0}, {1: 1.0})

    assert (difference.seeds, difference.outcome, difference.p) == (0, "not enough runs", 1.0)


def test_equal_gains_up_to_rounding_are_one_number_not_an_interval_of_noise() -> None:
    difference = paired_difference([0.3, 0.2, 0.1], [0.2, 0.1, 0.0])

    assert difference.low == difference.high == pytest.approx(0.1)


def test_the_sign_flip_test_counts_every_flip() -> None:
    gains = [0.3, -0.1, 0.5, 0.2, 0.4, -0.05]

    flips = [
        fmean(s * g for s, g in zip(signs, gains, strict=True))
        for signs in itertools.product((1, -1), repeat=6)
    ]
    expected = sum(abs(flip) >= abs(fmean(gains)) - 1e-12 for flip in flips) / len(flips)
    assert sign_flip_test(gains) == pytest.approx(expected)


def test_flips_with_equal_means_count_although_their_last_bits_differ() -> None:
    counts = [6, -3, 9, -7, 1, -8, 4, -1]  # sum 1, a small mean among large gains
    gains = [100 * (0.503 + 0.001 * count) - 100 * 0.503 for count in counts]
    flips = [
        sum(s * c for s, c in zip(signs, counts, strict=True))
        for signs in itertools.product((1, -1), repeat=8)
    ]

    assert sign_flip_test(gains) == pytest.approx(sum(abs(flip) >= 1 for flip in flips) / len(flips))


def test_no_gain_anywhere_has_p_of_one() -> None:
    assert sign_flip_test([0.0, 0.0, 0.0]) == 1.0


def test_many_seeds_take_the_bootstrap_and_say_the_same_twice() -> None:
    draw = random.Random(1)
    gains = [draw.expovariate(1.0) for _ in range(40)]

    low, high = interval(gains)

    assert low < fmean(gains) < high
    assert high - fmean(gains) > fmean(gains) - low  # skewed data: Student's t would be symmetric
    assert interval(gains) == (low, high)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(7)
    samples = [[draw.gauss(1.0, 2.0) for _ in range(5)] for _ in range(400)]

    covered = [low <= 1.0 <= high for low, high in map(interval, samples)]

    # binomial with n = 400, p = 0.95: five standard deviations are 0.054
    assert fmean(covered) == pytest.approx(0.95, abs=0.055)


def test_holm_multiplies_the_smallest_most_and_never_reorders() -> None:
    # sorted 0.01, 0.02, 0.02, 0.5 times 4, 3, 2, 1, each at least the one before
    assert holm([0.02, 0.5, 0.01, 0.02]) == pytest.approx([0.06, 0.5, 0.04, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_seed_that_never_arrives_counts_as_the_whole_run() -> None:
    slow, fast = restricted_rounds([40, None, None], 50), restricted_rounds([30, 20, 35], 50)

    difference = paired_difference(fast, slow, higher_is_better=False)

    assert difference.mean == pytest.approx(((40 - 30) + (50 - 20) + (50 - 35)) / 3)
