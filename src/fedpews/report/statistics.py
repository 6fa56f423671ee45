"""The statistics of a federation as tables and as one HTML page: who has which classes, how inputs differ, advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from fedpews.data.statistics import Statistics
from fedpews.report.html import render, write_html
from fedpews.report.style import PALETTE

SCRIPTS = ("base.js", "statistics.js")

DRAWN = 60
"""Features whose distributions are drawn; all are in the table."""

MANY = 50
"""With more clients than this their masks cannot be disjoint."""

Matrix = list[list[float]]


def write_page(found: Statistics, path: Path) -> Path:
    """Write the page of a federation's statistics."""
    return write_html(path, render(document(found), page="statistics.html", scripts=SCRIPTS))


def document(found: Statistics) -> dict[str, Any]:
    """All that the page shows."""
    names = list(found.sites)
    colors = [PALETTE[1 + number % (len(PALETTE) - 1)] for number in range(len(names))]
    labels, inputs = label_distances(found), input_distances(found)
    return {
        "title": f"{found.name}: {len(names)} sites",
        "headline": [*filter(None, advise(found)), _about(found)],
        "sites": [
            {
                "name": name,
                "light": color.light,
                "dark": color.dark,
                "samples": found.sites[name].samples,
                "classes": found.sites[name].classes,
                "bytes": found.bytes_sent.get(name, 0),
            }
            for name, color in zip(names, colors, strict=True)
        ],
        "classes": _class_names(found),
        "min_count": found.privacy.min_count,
        "noise": found.privacy.noise,
        "distances": [
            {"title": title, "say": say, "values": matrix}
            for title, say, matrix in (
                ("Labels", "Half the summed differences of the class shares.", labels),
                ("Inputs", "The same for each feature's histogram, mean over features.", inputs),
            )
            if matrix is not None
        ],
        "features": _features(found),
        "drawn": DRAWN,
    }


def site_rows(found: Statistics) -> list[list[str]]:
    """A line for each site: samples, classes, the classes with most samples, bytes sent."""
    rows = [["site", "samples", "classes", "most samples", "bytes sent"]]
    names = _class_names(found)
    for site, sums in found.sites.items():
        known = sorted(
            ((count, index) for index, count in enumerate(sums.classes) if count),
            key=lambda pair: (-pair[0], pair[1]),
        )
        most = ", ".join(f"{names[index]} {count:,}" for count, index in known[:3])
        hidden = sums.classes.count(None)
        classes = f"{len(known)}" + (
            f" and {hidden} of fewer than {found.privacy.min_count}" if hidden else ""
        )
        rows.append([site, f"{sums.samples:,}", classes, most, f"{found.bytes_sent.get(site, 0):,}"])
    return rows


def feature_rows(found: Statistics) -> list[list[str]]:
    """A line for each feature: its mean and deviation at each site, and over all."""
    rows = [["feature", *found.sites, "all sites"]]
    for feature in _features(found):
        cells = [_mean(site["mean"], site["deviation"], site["missing"]) for site in feature["sites"]]
        rows.append([feature["name"], *cells, _mean(feature["mean"], feature["deviation"], 0)])
    return rows


def distance_rows(matrix: Matrix, names: Sequence[str]) -> list[list[str]]:
    """A matrix of distances as text."""
    rows = [["", *names]]
    return rows + [
        [name, *(f"{value:.2f}" for value in row)] for name, row in zip(names, matrix, strict=True)
    ]


def label_distances(found: Statistics) -> Matrix | None:
    """The total variation between two sites' shares of classes: 0 the same, 1 no class in common."""
    shares = [_shares(sums.classes) for sums in found.sites.values()]
    if not shares[0] or any(sum(share) == 0 for share in shares):
        return None
    return _matrix([[share] for share in shares])


def input_distances(found: Statistics) -> Matrix | None:
    """The total variation between two sites' histograms, mean over features; of tokens also the vocabulary's."""
    shown = [
        index
        for index in range(len(found.features))
        if all(sum(_shares(counts[index])) for counts in found.histograms.values())
    ]
    words = [{token for token, _ in sums.vocabulary} for sums in found.sites.values()]
    if not found.histograms or not (shown or all(words)):
        return None
    matrix = _matrix([[_shares(counts[index]) for index in shown] for counts in found.histograms.values()])
    if all(words):
        for i, j in combinations(range(len(words)), 2):
            apart = 1 - len(words[i] & words[j]) / len(words[i] | words[j])
            matrix[i][j] = matrix[j][i] = (matrix[i][j] * len(shown) + apart) / (len(shown) + 1)
    return matrix


def advise(found: Statistics) -> tuple[str, str]:
    """What measured runs say of such data (docs/how-to/when-not.md): a sentence, and what it rests on."""
    names, first = list(found.sites), "run plain FedAvg first"
    if len(names) == 1:
        return "One site: there is nothing to compare.", ""
    if len(names) > MANY:
        return (
            f"{len(names)} sites: start with plain FedAvg.",
            "Nothing measured speaks for a warmup among so many.",
        )
    labels, inputs = label_distances(found), input_distances(found)
    if labels is None:
        return f"No classes can be compared: {first}.", "A warmup may pay if its curve does not climb."
    pairs = list(combinations(range(len(names)), 2))
    apart = [labels[i][j] for i, j in pairs]
    if min(apart) > 0.99:
        return (
            "Label sets are disjoint: a warmup is worth trying.",
            "Compare it with SCAFFOLD, local momentum and FedAdam: among four clients of one class each FedAvg ended "
            "at 61 %, with a warmup at 90 %, with SCAFFOLD at 89 %, with momentum or FedAdam at 97 %.",
        )
    by_chance = [_by_chance(found, names[i], names[j]) for i, j in pairs]
    alike = all(distance <= 2 * chance + 0.02 for distance, chance in zip(apart, by_chance, strict=True))
    differs = 0.0 if inputs is None else max(inputs[i][j] for i, j in pairs)
    if alike and differs < 0.2:
        return (
            "Alike: plain FedAvg.",
            "There is nothing to keep apart, and masks would only delay the training.",
        )
    if alike:
        return (
            f"Labels are alike and inputs differ (up to {differs:.2f}): {first}.",
            "No run that was measured speaks for a warmup here.",
        )
    return (
        f"Sites share classes in unequal parts ({min(apart):.2f} to {max(apart):.2f} apart): {first}.",
        "If its curve climbs from the first round, you have no problem that a warmup solves.",
    )


def _by_chance(found: Statistics, one: str, other: str) -> float:
    """The distance that two samples of the same size from one distribution are expected to have."""
    counts = [[count or 0 for count in found.sites[name].classes] for name in (one, other)]
    sizes = [sum(each) or 1 for each in counts]
    shares = [(a + b) / sum(sizes) for a, b in zip(*counts, strict=True)]
    variance = sum(1 / size for size in sizes)
    return 0.5 * sum(math.sqrt(2 / math.pi * share * (1 - share) * variance) for share in shares)


def _about(found: Statistics) -> str:
    sums, privacy = list(found.sites.values()), found.privacy
    noise = f", counts have Laplace noise of scale {privacy.noise:g}" if privacy.noise else ""
    return (
        f"{len(sums)} sites, {sum(each.samples for each in sums):,} training samples of shape {sums[0].shape}. "
        f"Each site sent sums only; cells of fewer than {privacy.min_count} samples are suppressed{noise}."
    )


def _features(found: Statistics) -> list[dict[str, Any]]:
    """Each feature with its edges and, at each site, mean, deviation, missing values, range and shares of the cells."""
    features: list[dict[str, Any]] = []
    for index, (name, pooled) in enumerate(zip(found.features, found.pooled(), strict=True)):
        edges = found.edges[index]
        sites = []
        for site, sums in found.sites.items():
            feature, cells = sums.features[index], found.histograms[site][index]
            total = sums.samples * sums.values[index]
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


def _class_names(found: Statistics) -> list[str]:
    count = len(next(iter(found.sites.values())).classes)
    return found.class_names if len(found.class_names) == count else [str(label) for label in range(count)]


def _shares(cells: Sequence[int | None]) -> list[float]:
    """Counts as shares; what is suppressed counts as nothing."""
    counts = [cell or 0 for cell in cells]
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def _matrix(sites: Sequence[Sequence[Sequence[float]]]) -> Matrix:
    """Total variation between the distributions of each two sites, mean over the distributions."""
    matrix = [[0.0] * len(sites) for _ in sites]
    for i, j in combinations(range(len(sites)), 2):
        apart = [
            0.5 * sum(abs(a - b) for a, b in zip(one, other, strict=True))
            for one, other in zip(sites[i], sites[j], strict=True)
        ]
        matrix[i][j] = matrix[j][i] = sum(apart) / len(apart) if apart else 0.0
    return matrix


def _mean(mean: float | None, deviation: float | None, missing: int | None) -> str:
    if mean is None or deviation is None:
        return "suppressed"
    gaps = "" if missing == 0 else ", some missing" if missing is None else f", {missing:,} missing"
    return f"{mean:.4g} ± {deviation:.3g}{gaps}"
