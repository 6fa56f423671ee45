"""What goes from rank to rank: a few words as JSON and tensors, packed into one tensor of bytes. No pickle.

The bytes are put together where the tensors are, so that on a GPU nothing passes through the host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedpews.methods.contract import Download, Upload
from fedpews.trees import Nest, flatten, unflatten

ALIGN = 16
"""Every tensor's bytes start at a multiple of this, so that they can be read in place as any type."""

LENGTH = 8
"""Bytes that say how long the words are."""

TYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    )
}
"""The types of tensors that travel, by name."""


@dataclass(frozen=True)
class Message:
    """What one rank tells another.

    >>> sent = Message("train", {"lr": 0.1}, {"x": {"w": torch.ones(2)}})
    >>> unpack(pack(sent, torch.device("cpu")))
    Message(kind='train', about={'lr': 0.1}, tensors={'x': {'w': tensor([1., 1.])}})
    """

    kind: str
    about: Mapping[str, Any] = field(default_factory=dict)
    tensors: Nest = field(default_factory=dict)


def pack(message: Message, device: torch.device) -> Tensor:
    """(bytes,) uint8 on the device. A tensor that occurs several times is sent once."""
    leaves, layout = flatten(message.tensors)
    # one model for all clients is one tensor in all their downloads
    distinct = {id(leaf): leaf for leaf in leaves}
    number = {key: i for i, key in enumerate(distinct)}
    header = {
        "kind": message.kind,
        "about": message.about,
        "layout": layout,
        "which": [number[id(leaf)] for leaf in leaves],
        "leaves": [(str(leaf.dtype), list(leaf.shape)) for leaf in distinct.values()],
    }
    words = json.dumps(header).encode()
    length = torch.tensor([len(words)]).view(torch.uint8)
    parts = [length, torch.frombuffer(bytearray(words), dtype=torch.uint8)]
    parts = [torch.cat(parts).to(device)]
    parts += [leaf.detach().to(device).contiguous().flatten().view(torch.uint8) for leaf in distinct.values()]
    return torch.cat([pad(part, (0, -part.numel() % ALIGN)) for part in parts])


def unpack(data: Tensor) -> Message:
    """The inverse of ``pack``; tensors stay on the device where the bytes are."""
    words = int(data[:LENGTH].view(torch.int64))
    header = json.loads(bytes(data[LENGTH : LENGTH + words].cpu().numpy()))
    place = LENGTH + words
    found = []
    for name, shape in header["leaves"]:
        place += -place % ALIGN
        dtype, shape = TYPES[name], torch.Size(shape)
        end = place + shape.numel() * dtype.itemsize
        # a copy, or whoever keeps one tensor would keep all that came with it
        found.append(data[place:end].view(dtype).view(shape).clone())
        place = end
    tensors = unflatten(iter([found[i] for i in header["which"]]), header["layout"])
    return Message(header["kind"], header["about"], tensors)


def download_parts(download: Download) -> tuple[dict[str, Any], Nest]:
    """A download as words and tensors: all of it, also what a network would not carry."""
    tensors: Nest = {"params": dict(download.params), "extra": _trees(download.extra)}
    if download.neurons is not None:
        tensors["neurons"] = download.neurons
    return {"round": download.round, "phase": download.phase, "total": download.total}, tensors


def join_download(about: Mapping[str, Any], tensors: Nest) -> Download:
    """The inverse of ``download_parts``."""
    return Download(**about, **tensors)


def upload_parts(upload: Upload) -> tuple[dict[str, Any], Nest]:
    """An upload as words and tensors: all of it, so that the server's sums are those of one process to the bit."""
    tensors: Nest = {"params": dict(upload.params), "extra": _trees(upload.extra)}
    if upload.neurons is not None:
        tensors["neurons"] = upload.neurons
    if upload.mask is not None:
        tensors["mask"] = dict(upload.mask)
    about = {key: getattr(upload, key) for key in ("client", "round", "samples", "steps", "loss")}
    return about, tensors


def join_upload(about: Mapping[str, Any], tensors: Nest) -> Upload:
    """The inverse of ``upload_parts``."""
    return Upload(**about, **tensors)


def _trees(extra: Mapping[str, Mapping[str, Tensor]]) -> Nest:
    return {key: dict(tree) for key, tree in extra.items()}
