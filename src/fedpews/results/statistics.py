"""Which of two runs is better, by how much, and how sure that is. Seeds are paired, because they differ more than
methods do.

All numbers are *gains*: positive if the first run is better, whether higher (accuracy) or lower (loss, rounds, bytes)
is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

ENOUGH_SEEDS = 6
"""With fewer, no run is called better: even five unanimous seeds have a two-sided sign-flip p of 0.0625."""

SIGNIFICANT = 0.05
"""A run is called better only with a lower p, corrected for all comparisons made together (Holm)."""

BOOTSTRAP_FROM = 10
"""From this many seeds on the interval is a BCa bootstrap; with fewer, Student's t."""

EXACT_UP_TO = 16
"""Up to this many seeds all 2ⁿ flips of sign are tried; with more, ``DRAWN`` random ones."""

DRAWN = 9999

BySeed = Mapping[int, float] | Sequence[float]
"""Numbers by seed; in a sequence the indices are the seeds."""


@dataclass(frozen=True)
class Difference:
    """How much better one run is than another, over the seeds that both have."""

    mean: float
    low: float  # of the 95 % interval; -inf with a single seed
    high: float
    seeds: int
    p: float  # of the paired sign-flip permutation test, two-sided; see ``corrected``

    @property
    def outcome(self) -> str:
        """better, worse, undecided, or not enough runs: the rule for tables, pages and studies."""
        if self.seeds < ENOUGH_SEEDS:
            return "not enough runs"
        if self.p >= SIGNIFICANT or self.low <= 0 <= self.high:
            return "undecided"
        return "better" if self.low > 0 else "worse"

    def describe(self, digits: int = 1, unit: str = "") -> str:
        """The outcome in words, to stand beside the mean, its interval and p.

        >>> Difference(3.0, 2.0, 4.0, 6, 0.03).describe(unit=" points")
        'better by 2.0 to 4.0 points'
        >>> Difference(3.0, 2.0, 4.0, 6, 0.06).describe(unit=" points")
        'undecided'
        >>> Difference(3.0, -1.0, 7.0, 5, 0.5).describe()
        'not enough runs (5 seeds)'
        """
        if self.outcome == "not enough runs":
            return f"not enough runs ({self.seeds} seed{'' if self.seeds == 1 else 's'})"
        if self.outcome == "undecided":
            return self.outcome
        ends = (self.low, self.high) if self.low > 0 else (-self.high, -self.low)
        span = " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in ends))
        return f"{self.outcome} by {span}{unit}"

    def describe_bound(self, digits: int = 1, unit: str = "") -> str:
        """The largest difference that the interval allows, for a difference that was shown to be small."""
        return f"no difference larger than {max(abs(self.low), abs(self.high)):.{digits}f}{unit}"


def corrected(differences: Sequence[Difference]) -> list[Difference]:
    """Differences that are tested together, each with its p corrected for that (Holm)."""
    ps = holm([difference.p for difference in differences])
    return [replace(difference, p=p) for difference, p in zip(differences, ps, strict=True)]


def paired_difference(a: BySeed, b: BySeed, higher_is_better: bool = True) -> Difference:
    """The mean gain of ``a`` over ``b`` with its 95 % interval, over the seeds that both have.

    Numbers that are not finite are left out; for seeds that never reach a target see ``restricted_rounds``.

    >>> paired_difference([0.9, 0.8, 0.85] * 2, [0.6, 0.5, 0.55] * 2).describe(digits=2)
    'better by 0.30'
    """
    gains = paired_gains(a, b, higher_is_better)
    if not gains:
        return Difference(math.nan, -math.inf, math.inf, 0, 1.0)
    mean = math.fsum(gains) / len(gains)
    low, high = interval(gains)
    return Difference(mean, low, high, len(gains), sign_flip_test(gains))


def paired_gains(a: BySeed, b: BySeed, higher_is_better: bool = True) -> list[float]:
    """How much better ``a`` is in each seed that both have.

    >>> paired_gains({0: 10, 1: 12}, {1: 15, 2: 11}, higher_is_better=False)
    [3.0]
    """
    first, second = _by_seed(a), _by_seed(b)
    sign = 1.0 if higher_is_better else -1.0
    return [sign * (first[seed] - second[seed]) for seed in sorted(first.keys() & second.keys())]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean: Student's t for few values, a BCa bootstrap for ``BOOTSTRAP_FROM`` or more.

    A single value says nothing about its spread: the interval is everything.
    """
    import numpy as np
    from scipy import stats

    if len(values) < 2:
        return -math.inf, math.inf
    array = np.asarray(values, dtype=float)
    mean = float(array.mean())
    # subtraction leaves 1e-17 where the gains are really equal
    if float(np.ptp(array)) <= 1e-12 * max(1.0, abs(mean)):
        return mean, mean
    if len(array) >= BOOTSTRAP_FROM:
        rng = np.random.default_rng(0)
        resampled = stats.bootstrap((array,), np.mean, method="BCa", rng=rng).confidence_interval
        if math.isfinite(resampled.low) and math.isfinite(resampled.high):
            return float(resampled.low), float(resampled.high)
    half = float(stats.sem(array)) * float(stats.t.ppf(0.975, len(array) - 1))
    return mean - half, mean + half


def unpaired_interval(
    values: Sequence[float], mean: float, deviation: float, count: int
) -> tuple[float, float, float]:
    """By how much the mean of these values exceeds a published mean, with both ends of Welch's interval.

    Published numbers have a mean, a deviation and a count, but no seeds to pair.

    >>> difference = unpaired_interval([10.0, 12.0, 14.0], mean=11.0, deviation=2.0, count=3)
    >>> [round(number, 2) for number in difference]  # 12 - 11, and 2.776 · √(4/3 + 4/3) either side
    [1.0, -3.53, 5.53]
    """
    import numpy as np
    from scipy import stats

    array = np.asarray(values, dtype=float)
    difference = float(array.mean()) - mean
    variances = [float(array.var(ddof=1)) / len(array), deviation**2 / count]
    if sum(variances) == 0:
        return difference, difference, difference
    counts = (len(array), count)
    freedom = sum(variances) ** 2 / sum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True))
    half = sum(variances) ** 0.5 * float(stats.t.ppf(0.975, freedom))
    return difference, difference - half, difference + half


def sign_flip_test(
    gains: Sequence[float], alternative: Literal["two-sided", "greater"] = "two-sided"
) -> float:
    """The p of a mean gain this far from 0, if in each seed either run could have been the better one.

    >>> sign_flip_test([1.0, 2.0, 3.0])  # of 2³ flips, only all + and all - are so far out
    0.25
    """
    import numpy as np
    from scipy import stats

    array = np.asarray(gains, dtype=float)
    if len(array) < 2 or not array.any():
        return 1.0
    drawn = float("inf") if len(array) <= EXACT_UP_TO else DRAWN
    # rounded, because equal means differ in their last bits, and those depend on the processor
    test = stats.permutation_test(
        (array / np.abs(array).max(),),
        lambda gains, axis: np.mean(gains, axis=axis).round(10),
        permutation_type="samples",
        alternative=alternative,
        vectorized=True,
        n_resamples=drawn,
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def equivalence_test(gains: Sequence[float], within: float) -> float:
    """The p of gains this small, if the true gain is ``within`` or more in either direction (two one-sided tests).

    A test for a difference cannot show that there is none: with few seeds it is not significant.

    >>> equivalence_test([0.1, -0.1, 0.0], within=1.0)  # of 2³ flips, one is so far from -1, and one from 1
    0.125
    """
    return max(
        sign_flip_test([within + gain for gain in gains], "greater"),
        sign_flip_test([within - gain for gain in gains], "greater"),
    )


def holm(ps: Sequence[float]) -> list[float]:
    """The p of each of several tests, corrected so that all together err as rarely as one test (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = highest
    return adjusted


def restricted_rounds(
    reached: Mapping[int, int | None] | Sequence[int | None], horizon: int
) -> dict[int, float]:
    """Rounds to a target by seed; a seed that never reaches it counts as all ``horizon`` rounds.

    Their mean is the restricted mean: without the slow seeds, a method that fails would look fast.

    >>> restricted_rounds([12, None, 20], horizon=50)
    {0: 12.0, 1: 50.0, 2: 20.0}
    """
    pairs = reached.items() if isinstance(reached, Mapping) else enumerate(reached)
    return {seed: float(horizon if value is None else min(value, horizon)) for seed, value in pairs}


def _by_seed(values: BySeed) -> dict[int, float]:
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    return {seed: float(value) for seed, value in pairs if math.isfinite(value)}
