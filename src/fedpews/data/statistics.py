"""Federated statistics: sums and histograms of each client's training samples, and never a single sample.

Two passes. In the first a client sends counts of its classes and, for each feature, the mean and the sum of squared
deviations (`describe`). The federation's means and deviations give the edges of the histograms (`Statistics.edges`),
and in the second pass the client counts its values between them (`histograms`): no client ever sends its smallest or
largest value. A cell of fewer than ``min_count`` samples is None, and so are the mean and the deviation of a feature
that fewer samples, or a single sample, decide.

A feature is a column of a table, a channel of images, the number of tokens of a sample, or a target of regression.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import SystemRandom
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.data.inputs import prepare, read, take
from fedpews.errors import ConfigError, explain
from fedpews.tasks.builtin import Regression
from fedpews.torch_private import tree_leaves

BINS = 40
"""Of a histogram, between the federation's mean ± 3 deviations; one more on each side counts what is beyond."""

MOST_FEATURES = 2_000
"""An input with more columns is described as one feature: all its values."""

CHUNK = 2**22
"""Values that are read at once."""

DOMINANT = 0.85
"""A feature of which one sample makes up this share of the squared deviations is suppressed."""

BUCKETS = 2**16
"""Tokens are counted by their number modulo this."""

Whole = Annotated[int, Field(ge=0, le=10**15)]
Some = Annotated[int, Field(ge=1, le=10**15)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Cells = Annotated[list[Whole | None], Field(max_length=10**6)]


@dataclass(frozen=True)
class FeatureSums:
    """The sums of one feature over a client's training samples; None is suppressed."""

    name: Annotated[str, Field(max_length=1000)]
    mean: Number | None
    squares: Annotated[float, Field(allow_inf_nan=False, ge=0)] | None  # Σ (value − mean)²
    values: Some  # in one sample
    missing: Whole | None = 0
    low: Number | None = None  # of all possible values, not of the client's: the limits of the type
    high: Number | None = None


@dataclass(frozen=True)
class Sums:
    """What a client sends in the first pass."""

    samples: Some
    shape: Annotated[str, Field(max_length=1000)]  # of one sample
    classes: Cells
    features: Annotated[list[FeatureSums], Field(max_length=10 * MOST_FEATURES)]
    vocabulary: Annotated[list[tuple[Whole, Whole]], Field(max_length=BUCKETS)] = field(default_factory=list)
    """Tokens that enough samples have: the token and the number of samples."""


Histograms = list[Cells]
"""What a client sends in the second pass: the counts of each feature; empty where it is suppressed."""


@dataclass(frozen=True)
class Privacy:
    """What is hidden: cells of fewer samples than ``min_count``; counts get Laplace noise of the scale ``noise``."""

    min_count: int = 5
    noise: float = 0.0


def describe(data: Federation, client: int, privacy: Privacy) -> Sums:
    """The first pass over a client's training samples; memory does not grow with their number."""
    rows, least = data.clients[client], privacy.min_count
    if not len(rows):
        raise ConfigError(f"{data.names[client]} has no samples, so it has no statistics.")
    moments: list[_Moments] = []
    tokens = torch.zeros(BUCKETS, dtype=torch.int64)
    for chunk in _chunks(data, rows):
        views = list(_views(data, chunk))
        moments = moments or [_Moments(view.values) for view in views]
        for view, running in zip(views, moments, strict=True):
            running.add(view.values)
            if view.tokens is not None:
                tokens += _presence(view.tokens % BUCKETS, BUCKETS)
    features: list[FeatureSums] = []
    missing = iter(data.missing[client] if data.missing else ())
    for view, running in zip(views, moments, strict=True):
        for name, (mean, squares) in zip(view.names, running.shown(least), strict=True):
            lacking = next(missing, 0)  # targets, the last features, are never missing
            hidden = None if 0 < lacking < least else lacking
            values = view.values.shape[2]
            features.append(FeatureSums(name, mean, squares, values, hidden, view.low, view.high))
    counts = _class_counts(data, rows)
    kept = (tokens >= least).nonzero().flatten().tolist()
    return Sums(
        len(rows),
        ", ".join("×".join(map(str, leaf.shape[1:])) for leaf in tree_leaves(take(data.x, rows[:1]))),
        suppress(_noised(counts, privacy.noise), counts, least),
        features,
        [(token, int(tokens[token])) for token in kept],
    )


def histograms(
    data: Federation, client: int, edges: Sequence[Sequence[float]], privacy: Privacy
) -> Histograms:
    """The second pass: the values below the first edge, between two edges, and from the last edge on."""
    cuts = [torch.tensor(row, dtype=torch.float64) for row in edges]
    # of each feature: the values in each cell, and the samples they are of; an image has many values
    cells = [torch.zeros(2, len(row) + 1 if len(row) else 0, dtype=torch.int64) for row in edges]
    for chunk in _chunks(data, data.clients[client]):
        columns = [column for view in _views(data, chunk) for column in view.values.unbind(1)]
        for column, cut, cell in zip(columns, cuts, cells, strict=True):
            if len(cut):
                index = torch.bucketize(column.double(), cut, right=True)  # (rows, values)
                cell[0] += torch.bincount(index.flatten(), minlength=len(cut) + 1)
                cell[1] += _presence(index, len(cut) + 1)
    return [
        suppress(_noised(counts, privacy.noise * column.shape[1]), samples, privacy.min_count)
        for (counts, samples), column in zip(cells, columns, strict=True)
    ]


@dataclass(frozen=True)
class Statistics:
    """The statistics of a federation: the sums and histograms of its clients by name."""

    name: str
    class_names: list[str]
    privacy: Privacy
    sites: dict[str, Sums]
    histograms: dict[str, Histograms] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=dict)

    def pooled(self) -> list[tuple[float, float] | None]:
        """The mean and the deviation of each feature over all clients; None if no client shows it."""
        pooled: list[tuple[float, float] | None] = []
        for index in range(len(self.features)):
            known = [
                (site.samples * feature.values, feature.mean, feature.squares)
                for site in self.sites.values()
                if (feature := site.features[index]).mean is not None and feature.squares is not None
            ]
            total = sum(n for n, _, _ in known)
            mean = sum(n * of_site for n, of_site, _ in known) / total if total else 0.0
            squares = sum(squares + n * (of_site - mean) ** 2 for n, of_site, squares in known)
            pooled.append((mean, math.sqrt(squares / total)) if total else None)
        return pooled

    @property
    def features(self) -> list[str]:
        """The names of the features, which are the same at every client."""
        return [feature.name for feature in next(iter(self.sites.values())).features]

    @property
    def edges(self) -> list[list[float]]:
        """The edges of each feature's histogram: round numbers around the federation's mean ± 3 deviations."""
        first = next(iter(self.sites.values()))
        edges: list[list[float]] = []
        for feature, pooled in zip(first.features, self.pooled(), strict=True):
            if pooled is None:
                edges.append([])
            elif feature.name.endswith(FLAG):
                edges.append([-0.5, 0.5, 1.5])
            else:
                mean, spread = pooled
                low, high = mean - 3 * spread, mean + 3 * spread
                low = low if feature.low is None else max(low, feature.low)
                high = high if feature.high is None else min(high, feature.high)
                edges.append(_round_edges(low, high))
        return edges

    def scaling(self) -> tuple[list[float], list[float]]:
        """The centre and the spread of each feature for ``data.scaling = "federated"``; flags stay 0 and 1."""
        centres, spreads = [], []
        for name, pooled in zip(self.features, self.pooled(), strict=True):
            mean, spread = (0.0, 1.0) if pooled is None or name.endswith(FLAG) else pooled
            centres.append(mean)
            spreads.append(spread if spread > 0 else 1.0)
        return centres, spreads


FLAG = "(true/false)"
"""The end of a flag's name; its values are 0 and 1."""


def gather(data: Federation, privacy: Privacy) -> Statistics:
    """The statistics of a federation in one process, as its clients would send them."""
    clients = range(len(data))
    sums = {data.names[client]: describe(data, client, privacy) for client in clients}
    statistics = Statistics(data.name, list(data.class_names), privacy, sums)
    counts = {data.names[client]: histograms(data, client, statistics.edges, privacy) for client in clients}
    sent = {name: len(to_bytes(sums[name])) + len(to_bytes(counts[name])) for name in sums}
    return replace(statistics, histograms=counts, bytes_sent=sent)


def to_bytes(value: Sums | Histograms) -> bytes:
    """What travels: JSON."""
    content = asdict(value) if isinstance(value, Sums) else value
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def sums_from_bytes(data: bytes, like: Sums | None = None) -> Sums:
    """The sums that a client sent, checked: they must have the features and classes of another client's."""
    sums: Sums = _read(Sums, data)
    if like is not None:
        names, first = (", ".join(feature.name for feature in each.features) for each in (sums, like))
        if names != first:
            raise ConfigError(f"its features are {names:.500}; the first client has {first:.500}")
        if len(sums.classes) != len(like.classes):
            raise ConfigError(f"it has {len(sums.classes)} classes, the first client {len(like.classes)}")
    return sums


def histograms_from_bytes(data: bytes, edges: Sequence[Sequence[float]]) -> Histograms:
    """The histograms that a client sent, checked against the edges."""
    counts: Histograms = _read(Annotated[list[Cells], Field(max_length=10 * MOST_FEATURES)], data)
    if [len(row) for row in counts] != [len(cuts) + 1 if cuts else 0 for cuts in edges]:
        raise ConfigError("its histograms have the wrong number of bins")
    return counts


def _read(kind: Any, data: bytes) -> Any:
    try:
        return TypeAdapter(kind).validate_json(data)
    except ValidationError as error:
        raise ConfigError(f"its statistics have {explain(error)}") from None


@dataclass(frozen=True)
class _View:
    """Some features of a batch."""

    names: list[str]
    values: Tensor  # (rows, features, values of a sample)
    tokens: Tensor | None = None  # (rows, length)
    low: float | None = None
    high: float | None = None


def _chunks(data: Federation, rows: Tensor) -> Iterator[Tensor]:
    """The rows in parts that fit in memory, whatever the size of a sample."""
    size = sum(leaf[0].numel() for leaf in tree_leaves(take(data.x, rows[:1])))
    yield from rows.split(max(1, CHUNK // max(1, size)))


def _views(data: Federation, rows: Tensor) -> Iterator[_View]:
    """The features of some samples: those of the inputs, then the targets of regression."""
    leaves = tree_leaves(read(data.x, rows))
    for number, leaf in enumerate(leaves):
        values, names = values_of(leaf, data)
        names = [f"input {number}: {name}" for name in names] if len(leaves) > 1 else names
        if leaf.dtype == torch.int64 and leaf.ndim > 1:
            yield _View(names, values, leaf.flatten(1), low=0.0)
        else:
            yield _View(names, values, None, *((-1.0, 1.0) if leaf.dtype == torch.uint8 else ()))
    if isinstance(data.task, Regression):
        targets = data.y[rows].flatten(1) if data.y.ndim > 1 else data.y[rows, None]
        names = ["target"] if targets.shape[1] == 1 else [f"target {i}" for i in range(targets.shape[1])]
        yield _View(names, targets[:, :, None])


def values_of(leaf: Tensor, data: Federation) -> tuple[Tensor, list[str]]:
    """Inputs as (rows, features, values) and the features' names."""
    if leaf.dtype == torch.int64 and leaf.ndim > 1:
        return (leaf.flatten(1) != 0).sum(1)[:, None, None], ["tokens"]
    leaf = prepare(leaf)
    values = leaf.reshape(len(leaf), leaf.shape[1] if leaf.ndim > 1 else 1, -1)
    if values.shape[1] > MOST_FEATURES:
        return values.reshape(len(leaf), 1, -1), [f"all {values[0].numel():,} values"]
    word = "channel" if leaf.ndim > 2 else "column"
    names = list(data.columns[:-1])
    return values, names if len(names) == values.shape[1] else [f"{word} {i}" for i in range(values.shape[1])]


class _Moments:
    """Mean and squared deviations of features, chunk by chunk, and whether a few samples decide them."""

    def __init__(self, first: Tensor) -> None:
        # a value that nearly all samples have is the median of any part of them
        self.usual = first.movedim(1, 0).flatten(1).double().median(1).values
        self.count = 0
        self.mean = torch.zeros_like(self.usual)
        self.squares, self.others, self.largest, self.total = (torch.zeros_like(self.mean) for _ in range(4))

    def add(self, values: Tensor) -> None:
        values = values.double()
        new = values.shape[0] * values.shape[2]
        variance, mean = torch.var_mean(values, dim=(0, 2), correction=0)
        before, self.count = self.count, self.count + new
        step = mean - self.mean
        self.mean += step * new / self.count
        self.squares += variance * new + step**2 * before * new / self.count
        away = values - self.usual[:, None]
        self.others += (away != 0).any(2).sum(0)
        by_sample = (away**2).sum(2)  # (rows, features)
        self.largest = torch.maximum(self.largest, by_sample.max(0).values)
        self.total += by_sample.sum(0)

    def shown(self, least: int) -> list[tuple[float, float] | tuple[None, None]]:
        """Mean and squares; None of a feature in which fewer than ``least`` samples differ, or one dominates."""
        few = (self.others > 0) & (self.others < least)
        hidden = few | (self.largest > DOMINANT * self.total)
        pairs = zip(self.mean.tolist(), self.squares.tolist(), hidden.tolist(), strict=True)
        return [(None, None) if secret else (mean, squares) for mean, squares, secret in pairs]


def _class_counts(data: Federation, rows: Tensor) -> Tensor:
    """The training samples that have each class."""
    labels = data.y[rows]
    known = data.task.classes_of(labels)
    if known is not None:
        return torch.bincount(known.cpu(), minlength=data.classes)
    if isinstance(data.task, Regression):
        return torch.zeros(0, dtype=torch.int64)
    if labels.is_floating_point():  # several labels of a sample
        return labels.sum(0).long()
    counts = torch.zeros(data.classes, dtype=torch.int64)
    for chunk in labels.flatten(1).split(max(1, CHUNK // max(1, labels[0].numel()))):
        # negative labels are ignored positions
        counts += _presence(chunk.clamp_min(-1) + 1, data.classes + 1)[1:]
    return counts


def _presence(cells: Tensor, size: int) -> Tensor:
    """In how many rows of (rows, values) each number below ``size`` occurs."""
    counts = torch.zeros(size, dtype=torch.int64)
    for part in cells.split(max(1, CHUNK // size)):
        there = torch.zeros(len(part), size, dtype=torch.bool, device=part.device)
        counts += there.scatter_(1, part, True).sum(0).cpu()
    return counts


def suppress(counts: Tensor, samples: Tensor, least: int) -> list[int | None]:
    """The counts without those of 1 to least − 1 samples.

    The total is known, so a single hidden cell could be computed: the next smallest is hidden too, until the hidden
    cells together have enough samples.

    >>> suppress(torch.tensor([2, 0, 40, 7]), torch.tensor([2, 0, 40, 7]), 5)
    [None, 0, 40, None]
    """
    hidden = (samples > 0) & (samples < least)
    while bool(hidden.any()) and (int(hidden.sum()) == 1 or int(samples[hidden].sum()) < least):
        left = torch.where(hidden | (samples == 0), torch.iinfo(torch.int64).max, samples)
        if bool((hidden | (samples == 0)).all()):
            break
        hidden[int(left.argmin())] = True
    return [None if secret else int(count) for count, secret in zip(counts, hidden, strict=True)]


def _noised(counts: Tensor, scale: float) -> Tensor:
    """Counts with Laplace noise, as whole numbers from 0 on."""
    if scale == 0:
        return counts
    draw = SystemRandom().expovariate
    noise = torch.tensor([scale * (draw(1.0) - draw(1.0)) for _ in counts], dtype=torch.float64)
    return (counts + noise).round().clamp_min(0).long()


def _round_edges(low: float, high: float) -> list[float]:
    """At most BINS + 1 edges at multiples of a round step.

    >>> _round_edges(0.1, 11.7)[:3]
    [0.0, 0.5, 1.0]
    """
    width = high - low if high > low else max(abs(low), 1.0)
    raw = width / (BINS - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.floor(low / step)
    return [float(f"{(first + index) * step:.12g}") for index in range(math.ceil(high / step) - first + 1)]
