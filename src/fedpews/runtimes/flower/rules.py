"""What a deployment tolerates."""

from __future__ import annotations

from dataclasses import dataclass

from fedpews.errors import RunFailed


class TooFewSites(RunFailed):
    """Not enough sites are there, or not enough of them answered."""


@dataclass(frozen=True)
class Tolerance:
    """When a round starts, when it ends, and when it is given up."""

    min_sites: int = 2  # a round counts with this many good uploads; fewer only if the cohort is smaller
    max_failures: int | None = (
        None  # more failed sites than this, and those are asked again; None is any number
    )
    attempts: int = 3  # how often a round is tried before the run stops
    round_seconds: float = 3600.0  # the time limit of a round
    join_seconds: float = 120.0  # at the start, how long to wait for all sites
    wait_seconds: float = 600.0  # how long to wait for the least number of sites

    def enough(self, asked: int, good: int) -> bool:
        """Whether a round in which so many of the cohort delivered may be closed."""
        if good < min(self.min_sites, asked):
            return False
        return self.max_failures is None or asked - good <= self.max_failures
