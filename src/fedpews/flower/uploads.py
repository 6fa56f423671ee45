"""Uploads come from the network: nothing in them is believed before it has been checked here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedpews import trees
from fedpews.engines.batches import count_steps
from fedpews.engines.engine import Job, Schedule
from fedpews.flower.norms import BOUNDED, norms
from fedpews.methods.contract import Download, Upload, Work
from fedpews.methods.wire import BadMessage, decode_upload, encode_upload
from fedpews.neurons.network import Batch, Network
from fedpews.seeds import global_generator
from fedpews.tables import FlowerTable
from fedpews.torch_private import tree_map_only

SLACK = 4096
"""Bytes that an upload's header may take beyond the expected: numbers have more or fewer digits."""


FLOWER_SLACK = 65536
"""Bytes that Flower's own objects around the uploads of a message may take."""


LARGEST_LOSS = 1e6
"""A mean training loss that an upload may report; honest ones are below a hundred."""


class UploadCheck:
    """Accepts exactly what an honest site of this method and phase would send, up to the values.

    The method itself says what that looks like: its client half takes one step on an empty batch, and the names,
    shapes and types of what it then sends are what every upload must have.
    """

    def __init__(
        self, net: Network, limits: FlowerTable | None = None, schedule: Schedule | None = None
    ) -> None:
        self.net, self.limits, self.schedule = net, limits or FlowerTable(), schedule
        self._samples: dict[tuple[str, str], tuple[Upload, int]] = {}

    def most_bytes(self, jobs: Sequence[Job]) -> int:
        """The most that an honest answer to these jobs can have, as Flower sends it."""
        return sum(self._sample(job)[1] for job in jobs) + FLOWER_SLACK

    def read(self, job: Job, data: bytes, samples: int | None = None) -> Upload:
        """The upload that answers a job, or a BadMessage that says why it is refused.

        Args:
            samples: how many the site declared when it was met.
        """
        try:
            sample, size = self._sample(job)
            if len(data) > size:
                raise BadMessage(f"it has {len(data)} bytes where at most {size} are possible")
            upload = decode_upload(self.net, data)
            self._check(upload, job, sample, samples)
        except BadMessage:
            raise
        except Exception as error:  # whatever foreign bytes bring about, the round goes on
            raise BadMessage(f"it cannot be read: {type(error).__name__}: {error!s:.200}") from error
        return upload

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
        self._check_steps(upload)
        if not 0 <= upload.loss <= LARGEST_LOSS:
            raise BadMessage(f"its training loss is {upload.loss}")
        _same_layout("params", upload.params, sample.params)
        if upload.extra.keys() != sample.extra.keys():
            raise BadMessage(f"it brings {sorted(upload.extra)} where {sorted(sample.extra)} is expected")
        for key, tree in upload.extra.items():
            _same_layout(key, tree, sample.extra[key])
        self._check_ownership(upload, job.download, sample)
        _check_values(upload)
        if limits.max_norm is not None:
            for part, size in norms(self.net, upload, job.download).items():
                if not size <= limits.max_norm:
                    raise BadMessage(
                        f"its {part} has norm {size:.6g}, above flower.max_norm = {limits.max_norm:g}"
                    )

    def _check_steps(self, upload: Upload) -> None:
        """The steps follow from the samples: nobody can claim more work than it had."""
        expected = (
            None
            if self.schedule is None
            else count_steps(upload.samples, self.schedule, self.net.least_batch)
        )
        if upload.steps < 1 or (expected is not None and upload.steps != expected):
            raise BadMessage(
                f"steps is {upload.steps}; with {upload.samples} samples it must be {expected or 'at least 1'}"
            )

    def _check_ownership(self, upload: Upload, download: Download, sample: Upload) -> None:
        if (upload.neurons is None) != (sample.neurons is None):
            expected = "all" if sample.neurons is None else "its own"
            raise BadMessage(f"in this phase a site sends {expected} neurons, and this is not so here")
        if (upload.mask is None) != (sample.mask is None):
            raise BadMessage(
                f"a mask of single weights is {'missing' if upload.mask is None else 'not expected'}"
            )
        if upload.mask is not None and sample.mask is not None:
            _same_layout("mask", upload.mask, sample.mask)
        if download.neurons is not None and upload.neurons is not None:
            assigned = download.neurons.to(torch.bool)
            if not torch.equal(upload.neurons, assigned):
                raise BadMessage("it owns other neurons than the server assigned")

    def _sample(self, job: Job) -> tuple[Upload, int]:
        """What an upload of this phase looks like, and the most bytes it can have."""
        key = (job.download.phase, type(job.half).__name__)
        if key not in self._samples:
            sample = sample_upload(self.net, job)
            largest = sample
            if sample.neurons is not None:
                largest = replace(largest, neurons=torch.ones_like(sample.neurons))
            if sample.mask is not None:
                everything = {name: torch.ones_like(mask) for name, mask in sample.mask.items()}
                largest = replace(largest, mask=everything)
            dense = {name: _no_zeros(value) for name, value in largest.params.items()}
            extra = {k: {n: _no_zeros(v) for n, v in tree.items()} for k, tree in largest.extra.items()}
            size = len(encode_upload(self.net, replace(largest, params=dense, extra=extra))) + SLACK
            self._samples[key] = sample, size
        return self._samples[key]


def sample_upload(net: Network, job: Job) -> Upload:
    """What a job's client half would send after a single step on two empty samples."""
    empty = tree_map_only(
        torch.Tensor, lambda leaf: torch.zeros_like(leaf[:1]).expand(2, *leaf.shape[1:]), net.example
    )
    batch = Batch(empty, net.blank_labels(2))
    half, noise = job.half, torch.full((job.half.noise_size(net),), 0.5)
    with global_generator():
        wanted = half.probe(net, job.download, None)
        memory = None if wanted is None else half.probed(net, job.download, None, 0.0)
        local = half.start(net, job.download, memory)
        local, _ = half.step(net, local, batch, noise, job.lr)
    work = Work(job.client, samples=2, steps=1, lr=job.lr, loss=0.0, noise=noise)
    return half.finish(net, job.download, local, work)[1]


def _same_layout(what: str, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if given.keys() != expected.keys():
        odd = sorted(given.keys() ^ expected.keys())[:3]
        raise BadMessage(f"{what} has other names than the model: {odd}")
    for name, value in given.items():
        like = expected[name]
        if value.shape != like.shape or value.dtype != like.dtype:
            raise BadMessage(
                f"{what}.{name} is {value.dtype} {tuple(value.shape)} where {like.dtype} {tuple(like.shape)} "
                "is expected"
            )


def _check_values(upload: Upload) -> None:
    for key, tree in {"params": upload.params, **upload.extra}.items():
        if not trees.is_finite(tree):
            raise BadMessage(f"{key} holds values that are not finite")
    for key in BOUNDED:
        for name, value in upload.extra.get(key, {}).items():
            if not bool(((value >= 0) & (value <= 1)).all()):
                raise BadMessage(f"{key}.{name} holds values outside [0, 1]")


def _no_zeros(value: Tensor) -> Tensor:
    return torch.ones_like(value)
