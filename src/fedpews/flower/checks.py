"""Uploads and scores come from the network: nothing in them is used before it has been checked here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from flwr.app import RecordDict
from safetensors.torch import load
from torch import Tensor

from fedpews import trees
from fedpews.config import FlowerTable
from fedpews.engines.eager import batch_sizes
from fedpews.engines.engine import Job, Part, Schedule
from fedpews.errors import ConfigError
from fedpews.flower.messages import FRAME, unpack
from fedpews.methods.contract import THETA, Download, Upload, Work
from fedpews.methods.wire import BadMessage, decode_upload, encode_upload
from fedpews.neurons.network import Batch, Network
from fedpews.seeds import global_generator
from fedpews.tasks.metrics import Sums
from fedpews.tasks.names import is_share
from fedpews.tasks.task import Task
from fedpews.torch_private import tree_map_only
from fedpews.trees import map_leaves

SLACK = 4096
"""Bytes that an upload's header may take beyond the expected: numbers have more or fewer digits."""

SMALL = 0.01
"""A change of the params by less than this share of the model's norm is never refused: while both hardly move, two
honest sites with unlike data may differ by more than a multiple."""

BOUNDED = ("theta", "privacy")
"""Trees of an upload whose values lie between 0 and 1."""

POWERS = (0.0, 0.5, 1.0)
"""A change grows with the number of steps: not at all, as their root, or linearly. Only an upload that is too large in
every view is refused, so a site with much more or much less data than the others is accepted."""

LARGEST_LOSS = 1e6
"""The largest mean loss (of training or of evaluation) or metric that a site may report; honest losses are below a
hundred."""


class UploadCheck:
    """Accepts exactly what an honest site of this method and phase would send, up to the values.

    The method itself shows what that looks like: its client half takes one step on an empty batch, and every upload
    must have the names, shapes and types of the result.
    """

    def __init__(self, net: Network, limits: FlowerTable, schedule: Schedule) -> None:
        self.net, self.limits, self.schedule = net, limits, schedule
        self._samples: dict[tuple[str, str], tuple[Upload, int]] = {}

    def most_bytes(self, jobs: Sequence[Job]) -> int:
        """The most bytes that an honest answer to these jobs can have, as Flower sends it."""
        return sum(self._sample(job)[1] for job in jobs)

    def read(self, job: Job, data: bytes, samples: int | None = None, most: float = math.inf) -> Upload:
        """The upload that answers a job; a BadMessage says why it is refused.

        Args:
            samples: the number that the site declared when it connected.
            most: its upload counts as one of at most so many samples, and of the steps that follow from them.
        """
        try:
            sample, size = self._sample(job)
            if len(data) > size:
                raise BadMessage(f"it has {len(data)} bytes where at most {size} are possible")
            upload = decode_upload(self.net, data)
            self._check(upload, job, sample, samples)
        except BadMessage:
            raise
        except Exception as error:  # bytes from outside may raise anything, and the round goes on
            raise BadMessage(f"it cannot be read: {type(error).__name__}: {error!s:.200}") from error
        if upload.samples <= most:
            return upload
        return replace(upload, samples=int(most), steps=self._steps(int(most)))

    def _steps(self, samples: int) -> int:
        return len(batch_sizes(samples, self.schedule, self.net.least_batch))

    def _check(self, upload: Upload, job: Job, sample: Upload, declared: int | None) -> None:
        limits = self.limits
        if upload.client != job.client:
            raise BadMessage(f"it says it is from client {upload.client}, not {job.client}")
        if upload.round != job.download.round:
            raise BadMessage(f"it is of round {upload.round}, not {job.download.round}")
        if not 1 <= upload.samples <= limits.max_samples:
            raise BadMessage(f"samples is {upload.samples}; it must be 1 to {limits.max_samples}")
        if declared is not None and upload.samples != declared:
            raise BadMessage(f"samples is {upload.samples}, and the site declared {declared}")
        # the steps follow from the samples, so no site can claim more work than it had
        steps = self._steps(upload.samples)
        if upload.steps != steps:
            raise BadMessage(f"steps is {upload.steps}; with {upload.samples} samples it must be {steps}")
        if not 0 <= upload.loss <= LARGEST_LOSS:
            raise BadMessage(f"its training loss is {upload.loss}")
        _check_layout("params", upload.params, sample.params)
        if upload.extra.keys() != sample.extra.keys():
            raise BadMessage(f"it has {sorted(upload.extra)} where {sorted(sample.extra)} is expected")
        for key, tree in upload.extra.items():
            _check_layout(key, tree, sample.extra[key])
        _check_ownership(upload, job.download, sample)
        _check_values(upload)
        if limits.max_norm is not None:
            for key, size in norms(self.net, upload, job.download).items():
                if not size <= limits.max_norm:
                    raise BadMessage(
                        f"its {key} has norm {size:.6g}, above flower.max_norm = {limits.max_norm:g}"
                    )

    def _sample(self, job: Job) -> tuple[Upload, int]:
        """An upload of this phase, and the most bytes that one can have."""
        key = (job.download.phase, type(job.half).__name__)
        if key not in self._samples:
            sample = sample_upload(self.net, job)
            # the largest upload owns everything and has no zeros
            largest = replace(
                sample,
                params=map_leaves(torch.ones_like, sample.params),
                neurons=None if sample.neurons is None else torch.ones_like(sample.neurons),
                mask=None if sample.mask is None else map_leaves(torch.ones_like, sample.mask),
                extra=map_leaves(torch.ones_like, sample.extra),
            )
            self._samples[key] = sample, len(encode_upload(self.net, largest)) + SLACK
        return self._samples[key]


def sample_upload(net: Network, job: Job) -> Upload:
    """The upload of a job's client half after a single step on two empty samples."""
    batch, half = blank_batch(net), job.half
    noise = torch.full((half.noise_size(net),), 0.5)
    with global_generator():
        download = job.download.with_accuracy(0.0) if half.probes else job.download
        local = half.start(net, download, None)
        local, _ = half.step(net, local, batch, noise, job.lr)
    work = Work(job.client, samples=2, steps=1, lr=job.lr, loss=0.0, noise=noise)
    return half.finish(net, job.download, local, work)[1]


def blank_batch(net: Network) -> Batch:
    """Two empty samples."""
    empty = tree_map_only(
        torch.Tensor, lambda leaf: torch.zeros_like(leaf[:1]).expand(2, *leaf.shape[1:]), net.example
    )
    return Batch(empty, net.blank_labels(2))


def sample_sums(net: Network, task: Task) -> Sums:
    """The sums of an evaluation of two empty samples."""
    batch = blank_batch(net)
    with torch.no_grad(), global_generator():
        return task.sums(net.predict(net.initial(), batch.x), batch.y)


def _check_layout(what: str, tree: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse a tree whose names, shapes or types differ from the expected."""
    if tree.keys() != expected.keys():
        odd = sorted(tree.keys() ^ expected.keys())[:3]
        raise BadMessage(f"{what} has other names than the model: {odd}")
    for name, value in tree.items():
        like = expected[name]
        if value.shape != like.shape or value.dtype != like.dtype:
            raise BadMessage(
                f"{what}.{name} is {value.dtype} {tuple(value.shape)} where {like.dtype} {tuple(like.shape)} "
                "is expected"
            )


def _check_ownership(upload: Upload, download: Download, sample: Upload) -> None:
    if (upload.neurons is None) != (sample.neurons is None):
        expected = "all" if sample.neurons is None else "its own"
        raise BadMessage(f"in this phase a site sends {expected} neurons, and this upload does not")
    if (upload.mask is None) != (sample.mask is None):
        raise BadMessage(
            f"a mask of single weights is {'missing' if upload.mask is None else 'not expected'}"
        )
    if upload.mask is not None and sample.mask is not None:
        _check_layout("mask", upload.mask, sample.mask)
    if download.neurons is None or upload.neurons is None:
        return
    assigned = download.neurons.bool()
    # of what it is assigned, a client that learns its mask sends a part
    sent = upload.neurons | assigned if THETA in download.extra else upload.neurons
    if not torch.equal(sent, assigned):
        raise BadMessage("it owns other neurons than the server assigned")


def _check_values(upload: Upload) -> None:
    for key, tree in {"params": upload.params, **upload.extra}.items():
        if not trees.is_finite(tree):
            raise BadMessage(f"{key} has values that are not finite")
    for key in BOUNDED:
        for name, value in upload.extra.get(key, {}).items():
            if not bool(((value >= 0) & (value <= 1)).all()):
                raise BadMessage(f"{key}.{name} has values outside [0, 1]")


def norms(net: Network, upload: Upload, download: Download) -> dict[str, float]:
    """The norm of everything an upload carries: the change of the params it owns, and each tree a method adds."""
    owned = upload.ownership(net) or {}
    change = {}
    for name, value in upload.params.items():
        if value.is_floating_point():
            moved = value.double() - (download.params[name].double() if name in download.params else 0.0)
            change[name] = torch.where(owned[name].bool(), moved, 0.0) if name in owned else moved
    numbers = {"params": change}
    for key, tree in upload.extra.items():
        if key not in BOUNDED:
            numbers[key] = {name: value.double() for name, value in tree.items() if value.is_floating_point()}
    return {
        key: float(torch.stack([value.pow(2).sum() for value in tree.values()]).sum().sqrt())
        for key, tree in numbers.items()
        if tree
    }


class NormRule:
    """Refuses an upload larger than a multiple of the median: of its round, or of the run so far if that is larger.

    The median of two norms is the smaller one. The run's median accepts an upload in a round in which the other
    clients hardly move.

    Args:
        multiple: infinity refuses no upload.
    """

    def __init__(self, multiple: float) -> None:
        self.multiple = multiple
        self._accepted: dict[str, list[tuple[float, int]]] = {}  # by tree: norm and steps

    def check(
        self, clients: Mapping[int, tuple[Mapping[str, float], int]], model: float = 0.0
    ) -> dict[int, str]:
        """By client, why its upload is refused.

        Args:
            clients: each client's ``norms`` and number of steps.
            model: the norm of the model that they were sent.
        """
        refused: dict[int, str] = {}
        if self.multiple == math.inf or len(clients) < 2:
            return refused
        for key in sorted({key for sizes, _ in clients.values() for key in sizes}):
            changes = {client: (sizes.get(key, 0.0), steps) for client, (sizes, steps) in clients.items()}
            references = [
                max(_median(list(changes.values()), power), _median(self._accepted.get(key, []), power))
                for power in POWERS
            ]
            if not any(references):  # no other client moved, so there is nothing to compare with
                continue
            for client, (size, steps) in changes.items():
                limit = self.multiple * max(
                    reference * steps**power for power, reference in zip(POWERS, references, strict=True)
                )
                limit = max(limit, SMALL * model) if key == "params" else limit
                if not size <= limit:
                    refused[client] = (
                        f"its {key} has norm {size:.6g}, above {self.multiple:g} times the round's median "
                        f"({limit / self.multiple:.6g} at {steps} steps; flower.norm_multiple)"
                    )
        return refused

    def accept(self, sizes: Mapping[str, float], steps: int) -> None:
        """Add an accepted upload to the median of the run."""
        for key, size in sizes.items():
            self._accepted.setdefault(key, []).append((size, steps))


def _median(uploads: list[tuple[float, int]], power: float) -> float:
    return statistics.median_low([size / steps**power for size, steps in uploads]) if uploads else 0.0


def least(task: Task, sums: Sums) -> Sums:
    """The least that the metrics need: right answers by class would show how often a site has each class.

    >>> from fedpews.tasks import Classification
    >>> least(Classification(), {"correct": torch.tensor([2, 1]), "seen": torch.tensor([3, 3])})
    {'correct': tensor([3]), 'seen': tensor([6])}
    """
    others = [
        task.METRICS[metric] for metric in task.metrics if metric in task.METRICS and metric != "accuracy"
    ]
    needed = {name for metric in others for name in metric.needs}
    return {
        name: value.sum().reshape(1) if name in ("correct", "seen") and name not in needed else value
        for name, value in sums.items()
    }


@dataclass
class ScoreCheck:
    """Reads sites' scores. A site may be wrong about its samples, but not about the number that it declared.

    Args:
        labels: the most labels that one sample may have: its pixels or tokens.
        sample: the sums of a few samples, which have the shapes of every site's; else those of the first site count.
    """

    task: Task
    labels: int
    sample: Sums = field(default_factory=dict)

    def __post_init__(self) -> None:
        if kept := [name for name in self.task.sum_names if name.startswith("kept_")]:
            raise ConfigError(
                f"{' and '.join(self.task.metrics)}: one of these needs every sample's output ({', '.join(kept)}), "
                "which does not leave a site. Give the server a test set (test=FILE.npz), or choose other metrics."
            )

    @property
    def most_bytes(self) -> int:
        """The most bytes that the sums of one seed and part of the data can have."""
        return sum(8 * value.numel() for value in self.sample.values()) + FRAME

    def read(self, content: RecordDict, part: Part, seeds: Iterable[int], declared: int) -> dict[int, Sums]:
        """The sums for each seed's model, over exactly as many samples as the site declared; {} for none.

        The content comes from the network.
        """
        scores = {}
        for seed in seeds:
            try:
                sums = {
                    name: value.double() for name, value in load(unpack(content, f"{part}-{seed}")).items()
                }
                scores[seed] = self._check(sums, declared)
            except BadMessage as error:
                raise BadMessage(f"its score on its {part} samples for seed {seed}: {error}") from None
            except Exception as error:  # bytes from outside may raise anything
                raise BadMessage(
                    f"its score cannot be read: {type(error).__name__}: {error!s:.200}"
                ) from error
        return scores

    def _check(self, sums: Sums, declared: int) -> Sums:
        if not declared:
            if sums:
                raise BadMessage("it declared no samples")
            return {}
        wanted = self.task.sum_names
        if set(sums) != set(wanted):
            raise BadMessage(f"it is made of {sorted(sums)!r:.200}, not of {sorted(wanted)}")
        for name, value in sums.items():
            if not bool(torch.isfinite(value).all()):
                raise BadMessage(f"{name} has numbers that are not finite")
            shape = tuple(self.sample.get(name, value).shape)
            if shape != tuple(value.shape):
                raise BadMessage(f"{name} has the shape {tuple(value.shape)}, others have {shape}")
        if sums["loss"].dim() or sums["weight"].dim():
            raise BadMessage("its loss or its weight is no single number")
        heaviest = declared * self.labels * max(1.0, *(getattr(self.task, "class_weights", None) or (1.0,)))
        loss, weight = float(sums["loss"]), float(sums["weight"])
        if not 0 <= weight <= heaviest or not 0 <= loss <= LARGEST_LOSS * max(weight, 1):
            raise BadMessage(f"loss {loss:g} over {weight:g} makes no sense")
        every_sample_is_one = (
            type(self.task).weigh is Task.weigh or getattr(self.task, "class_weights", ()) is None
        )
        if every_sample_is_one and weight != declared:
            raise BadMessage(f"it is over {weight:g} samples, and the site declared {declared}")
        if "seen" in sums:
            self._check_counts(sums, declared)
        self.sample = self.sample or sums
        return sums

    def _check_counts(self, sums: Sums, declared: int) -> None:
        right, seen = sums["correct"], sums["seen"]
        whole = bool((right == right.round()).all()) and bool((seen == seen.round()).all())
        if right.shape != seen.shape or not whole or not bool(((right >= 0) & (right <= seen)).all()):
            raise BadMessage("its right answers are more than its answers, or not counts")
        total, classed = int(seen.sum()), self.task.name == "classification"
        if total > declared * self.labels or (classed and total != declared):
            raise BadMessage(f"it is over {total} answers, and the site declared {declared} samples")


def is_metric(name: str, value: object) -> bool:
    """Whether a value can be that of a metric.

    >>> is_metric("accuracy", 0.5), is_metric("accuracy", 1.5), is_metric("mae", 1.5), is_metric("mae", float("nan"))
    (True, False, True, False)
    """
    low, high = (0.0, 1.0) if is_share(name) else (-LARGEST_LOSS, LARGEST_LOSS)
    return isinstance(value, float) and low <= value <= high
