"""The statistics of a federation as tables and as one HTML page: who has which classes, how inputs differ, advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpews.data.statistics import Statistics
from fedpews.report.html import render, write_html
from fedpews.report.plots import PALETTE

SCRIPTS = ("base.js", "statistics.js")

DRAWN = 60
"""Features whose distributions are drawn; all are in the table."""

MANY = 50
"""With more clients than this their masks cannot be disjoint."""

Matrix = list[list[float]]


def write_page(stats: Statistics, path: Path) -> Path:
    """Write the page of a federation's statistics."""
    return write_html(path, render(document(stats), page="statistics.html", scripts=SCRIPTS))


def document(stats: Statistics) -> dict[str, Any]:
    """All that the page shows."""
    names = list(stats.sites)
    colors = [PALETTE[1 + number % (len(PALETTE) - 1)] for number in range(len(names))]
    labels, inputs = label_distances(stats), input_distances(stats)
    return {
        "title": f"{stats.name}: {len(names)} sites",
        "headline": [*filter(None, advise(stats)), _about(stats)],
        "sites": [
            {
                "name": name,
                "light": color.light,
                "dark": color.dark,
                "samples": stats.sites[name].samples,
                "classes": stats.sites[name].classes,
                "bytes": stats.bytes_sent.get(name, 0),
            }
            for name, color in zip(names, colors, strict=True)
        ],
        "classes": _class_names(stats),
        "min_count": stats.privacy.min_count,
        "noise": stats.privacy.noise,
        "distances": [
            {"title": title, "say": say, "values": matrix}
            for title, say, matrix in (
                ("Labels", "Half the summed differences of the class shares.", labels),
                ("Inputs", "The same for each feature's histogram, mean over features.", inputs),
            )
            if matrix is not None
        ],
        "features": _features(stats),
        "drawn": DRAWN,
    }


def site_rows(stats: Statistics) -> list[list[str]]:
    """A line for each site: samples, classes, the classes with most samples, bytes sent."""
    rows = [["site", "samples", "classes", "most samples", "bytes sent"]]
    names = _class_names(stats)
    for site, sums in stats.sites.items():
        known = sorted(
            ((count, index) for index, count in enumerate(sums.classes) if count),
            key=lambda pair: (-pair[0], pair[1]),
        )
        most = ", ".join(f"{names[index]} {count:,}" for count, index in known[:3])
        hidden = sums.classes.count(None)
        classes = f"{len(known)}" + (
            f" and {hidden} of fewer than {stats.privacy.min_count}" if hidden else ""
        )
        rows.append([site, f"{sums.samples:,}", classes, most, f"{stats.bytes_sent.get(site, 0):,}"])
    return rows


def feature_rows(stats: Statistics) -> list[list[str]]:
    """A line for each feature: its mean and deviation at each site, and over all."""
    rows = [["feature", *stats.sites, "all sites"]]
    for feature in _features(stats):
        cells = [_mean(site["mean"], site["deviation"], site["missing"]) for site in feature["sites"]]
        rows.append([feature["name"], *cells, _mean(feature["mean"], feature["deviation"], 0)])
    return rows


def distance_rows(matrix: Matrix, names: Sequence[str]) -> list[list[str]]:
    """A matrix of distances as text."""
    rows = [[name, *(f"{value:.2f}" for value in row)] for name, row in zip(names, matrix, strict=True)]
    return [["", *names], *rows]


def label_distances(stats: Statistics) -> Matrix | None:
    """The total variation between two sites' shares of classes: 0 the same, 1 no class in common."""
    classes = [sums.classes for sums in stats.sites.values()]
    if not classes[0] or not all(map(any, classes)):
        return None
    matrix: Matrix = _distances(classes).tolist()
    return matrix


def input_distances(stats: Statistics) -> Matrix | None:
    """The total variation between two sites' histograms, mean over features; of tokens also the vocabulary's."""
    features = [[counts[i] for counts in stats.histograms.values()] for i in range(len(stats.features))]
    apart = [_distances(sites) for sites in features if sites and all(map(any, sites))]
    words = [{token for token, _ in sums.vocabulary} for sums in stats.sites.values()]
    if stats.histograms and all(words):
        apart.append(np.array([[1 - len(a & b) / len(a | b) for b in words] for a in words]))
    if not apart:
        return None
    mean: Matrix = np.mean(apart, axis=0).tolist()
    return mean


def advise(stats: Statistics) -> tuple[str, str]:
    """What measured runs say of such data (docs/how-to/when-not.md): a sentence, and what it rests on."""
    names, first = list(stats.sites), "run plain FedAvg first"
    if len(names) == 1:
        return "One site: there is nothing to compare.", ""
    if len(names) > MANY:
        return (
            f"{len(names)} sites: start with plain FedAvg.",
            "No measurement shows a gain from a warmup with so many sites.",
        )
    labels, inputs = label_distances(stats), input_distances(stats)
    if labels is None:
        return f"No classes can be compared: {first}.", "If its accuracy does not rise, try a warmup."
    pairs = list(combinations(range(len(names)), 2))
    apart = [labels[i][j] for i, j in pairs]
    if min(apart) > 0.99:
        return (
            "Label sets are disjoint: a warmup is worth trying.",
            "Compare it with SCAFFOLD, local momentum and FedAdam: among four clients of one class each FedAvg ended "
            "at 61 %, with a warmup at 90 %, with SCAFFOLD at 89 %, with momentum or FedAdam at 97 %.",
        )
    by_chance = [_by_chance(stats, names[i], names[j]) for i, j in pairs]
    alike = all(distance <= 2 * chance + 0.02 for distance, chance in zip(apart, by_chance, strict=True))
    differs = 0.0 if inputs is None else max(inputs[i][j] for i, j in pairs)
    if alike and differs < 0.2:
        return (
            "Alike: plain FedAvg.",
            "A warmup would only delay the training.",
        )
    if alike:
        return (
            f"Labels are alike and inputs differ (up to {differs:.2f}): {first}.",
            "No measurement shows a gain from a warmup in this case.",
        )
    return (
        f"Sites share classes in unequal parts ({min(apart):.2f} to {max(apart):.2f} apart): {first}.",
        "If its accuracy rises from the first round on, you do not need a warmup.",
    )


def _by_chance(stats: Statistics, one: str, other: str) -> float:
    """The distance that two samples of the same size from one distribution are expected to have."""
    counts = np.array([[count or 0 for count in stats.sites[name].classes] for name in (one, other)])
    sizes = counts.sum(1).clip(min=1)
    shares = counts.sum(0) / sizes.sum()
    return float(0.5 * np.sqrt(2 / np.pi * shares * (1 - shares) * (1 / sizes).sum()).sum())


def _about(stats: Statistics) -> str:
    sums, privacy = list(stats.sites.values()), stats.privacy
    noise = f", counts have Laplace noise of scale {privacy.noise:g}" if privacy.noise else ""
    return (
        f"{len(sums)} sites, {sum(each.samples for each in sums):,} training samples of shape {sums[0].shape}. "
        f"Each site sent sums only; cells of fewer than {privacy.min_count} samples are suppressed{noise}."
    )


def _features(stats: Statistics) -> list[dict[str, Any]]:
    """Each feature with its edges and, at each site, mean, deviation, missing values, range and shares of the cells."""
    features: list[dict[str, Any]] = []
    for index, (name, edges, pooled) in enumerate(
        zip(stats.features, stats.edges, stats.pooled(), strict=True)
    ):
        sites = []
        for site, sums in stats.sites.items():
            feature, cells = sums.features[index], stats.histograms[site][index]
            total = sums.samples * sums.features[index].values
            spread = None if feature.squares is None else math.sqrt(feature.squares / total)
            filled = [number for number, count in enumerate(cells) if count]
            sites.append(
                {
                    "mean": feature.mean,
                    "deviation": spread,
                    "missing": feature.missing,
                    "range": [_edge(edges, filled[0]), _edge(edges, filled[-1] + 1)] if filled else None,
                    "shares": _shares(cells),
                }
            )
        mean, deviation = pooled or (None, None)
        features.append({"name": name, "edges": edges, "mean": mean, "deviation": deviation, "sites": sites})
    return features


def _edge(edges: Sequence[float], number: int) -> float | None:
    """The edge below a cell; None for what lies beyond the last ones."""
    return edges[number - 1] if 0 < number <= len(edges) else None


def _class_names(stats: Statistics) -> list[str]:
    count = len(next(iter(stats.sites.values())).classes)
    return stats.class_names if len(stats.class_names) == count else [str(label) for label in range(count)]


def _shares(cells: Sequence[int | None]) -> list[float]:
    """Counts as shares; what is suppressed counts as nothing."""
    counts = [cell or 0 for cell in cells]
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def _distances(counts: Sequence[Sequence[int | None]]) -> NDArray[np.float64]:
    """Total variation between the distributions of each two sites, from counts of (sites, cells)."""
    shares = np.array([_shares(cells) for cells in counts])
    return 0.5 * np.abs(shares[:, None] - shares).sum(2)  # type: ignore[no-any-return]


def _mean(mean: float | None, deviation: float | None, missing: int | None) -> str:
    if mean is None or deviation is None:
        return "suppressed"
    gaps = "" if missing == 0 else ", some missing" if missing is None else f", {missing:,} missing"
    return f"{mean:.4g} ± {deviation:.3g}{gaps}"
