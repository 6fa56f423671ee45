"""Uploads come from the network: nothing in them is believed before it has been checked here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedpews import trees
from fedpews.engines.engine import Job
from fedpews.experiment import FlowerTable
from fedpews.methods.contract import Download, Upload, Work
from fedpews.methods.wire import BadMessage, decode_upload, upload_size
from fedpews.neurons.network import Batch, Network
from fedpews.torch_private import tree_map_only

SLACK = 4096
"""Bytes that an upload's header may take beyond the expected: numbers have more or fewer digits."""


MAX_STEPS = 10**9
"""Local steps that an upload may claim."""


class UploadCheck:
    """Accepts exactly what an honest site of this method and phase would send, up to the values.

    The method itself says what that looks like: its client half takes one step on an empty batch, and the names,
    shapes and types of what it then sends are what every upload must have.
    """

    def __init__(self, net: Network, limits: FlowerTable | None = None) -> None:
        self.net, self.limits = net, limits or FlowerTable()
        self._samples: dict[tuple[str, str], tuple[Upload, int]] = {}

    def read(self, job: Job, data: bytes) -> Upload:
        """The upload that answers a job, or a BadMessage that says why it is refused."""
        try:
            sample, size = self._sample(job)
            if len(data) > size:
                raise BadMessage(f"it has {len(data)} bytes where at most {size} are possible")
            upload = decode_upload(self.net, data)
            self._check(upload, job, sample)
        except BadMessage:
            raise
        except Exception as error:  # whatever foreign bytes bring about, the round goes on
            raise BadMessage(f"it cannot be read: {type(error).__name__}: {error!s:.200}") from error
        return upload

    def _check(self, upload: Upload, job: Job, sample: Upload) -> None:
        limits = self.limits
        if upload.client != job.client:
            raise BadMessage(f"it says it is from client {upload.client}, not {job.client}")
        if upload.round != job.download.round:
            raise BadMessage(f"it is of round {upload.round}, not {job.download.round}")
        for name, value, top in (
            ("samples", upload.samples, limits.max_samples),
            ("steps", upload.steps, MAX_STEPS),
        ):
            if not 1 <= value <= top:
                raise BadMessage(f"{name} is {value}; it must be 1 to {top}")
        if not math.isfinite(upload.loss):
            raise BadMessage(f"its training loss is {upload.loss}")
        _same_layout("params", upload.params, sample.params)
        if upload.extra.keys() != sample.extra.keys():
            raise BadMessage(f"it brings {sorted(upload.extra)} where {sorted(sample.extra)} is expected")
        for key, tree in upload.extra.items():
            _same_layout(key, tree, sample.extra[key])
        self._check_ownership(upload, job.download, sample)
        _check_values(upload)
        if limits.max_norm is not None:
            self._check_norm(upload, job.download.params, limits.max_norm)

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

    def _check_norm(self, upload: Upload, old: Mapping[str, Tensor], bound: float) -> None:
        owned = upload.ownership(self.net) or {}
        change = {
            name: torch.where(owned[name].bool(), value - old[name], 0.0)
            if name in owned
            else value - old[name]
            for name, value in upload.params.items()
            if name in old and value.is_floating_point()
        }
        norm = float(trees.norm(change)) if change else 0.0
        if not norm <= bound:
            raise BadMessage(f"its change has norm {norm:.6g}, above flower.max_norm = {bound:g}")

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
            size = upload_size(self.net, replace(largest, params=dense, extra=extra)) + SLACK
            self._samples[key] = sample, size
        return self._samples[key]


def sample_upload(net: Network, job: Job) -> Upload:
    """What a job's client half would send after a single step on two empty samples."""
    empty = tree_map_only(
        torch.Tensor, lambda leaf: torch.zeros_like(leaf[:1]).expand(2, *leaf.shape[1:]), net.example
    )
    batch = Batch(empty, net.blank_labels(2))
    half, noise = job.half, torch.full((job.half.noise_size(net),), 0.5)
    with torch.random.fork_rng(devices=[]):
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
    for name, theta in upload.extra.get("theta", {}).items():
        if not bool(((theta >= 0) & (theta <= 1)).all()):
            raise BadMessage(f"theta.{name} holds values outside [0, 1]")


def _no_zeros(value: Tensor) -> Tensor:
    return torch.ones_like(value)
