"""One label, one colour, in every figure and on the page; they differ also with red-green colour blindness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Color(NamedTuple):
    """The same colour on white and on black."""

    light: str
    dark: str


# after Okabe and Ito, with enough contrast for thin lines on either ground
PALETTE = (
    Color("#5c6773", "#a9b4c0"),  # grey: what the others are measured against
    Color("#0072b2", "#56b4e9"),
    Color("#c8500a", "#ff9145"),
    Color("#00835f", "#3dd6a5"),
    Color("#a8327d", "#ea8cc6"),
    Color("#836400", "#e6c84a"),
    Color("#5a4fcf", "#a8a2ff"),
    Color("#7a3b12", "#d3a17e"),
    # for more than eight labels at once; told apart by lightness as much as by hue
    Color("#1c2126", "#eef2f6"),
    Color("#5c7a00", "#bfe05a"),
    Color("#b3001b", "#ff7a85"),
)

USUAL = {
    "fedavg": 0,
    "fedavg+pews": 1,
    "fedavg+pews-fixed": 2,
    "fedavg+pews-auto": 3,
    "fedprox": 7,
    "fedprox+pews": 4,
    "scaffold": 5,
    "scaffold+pews": 6,
}
"""Methods that are met most often have the same colour on every page."""


def colors(labels: Sequence[str]) -> dict[str, Color]:
    """A colour for each label; two share one only when there are more labels than colours.

    >>> colors(["mine", "fedavg"])["fedavg"] == PALETTE[0]
    True
    """
    chosen = {label: USUAL[label] for label in labels if label in USUAL}
    free = [number for number in range(1, len(PALETTE)) if number not in chosen.values()]
    free = free or list(range(len(PALETTE)))
    others = [label for label in dict.fromkeys(labels) if label not in chosen]
    chosen |= {label: free[place % len(free)] for place, label in enumerate(others)}
    return {label: PALETTE[chosen[label]] for label in labels}
