"""Downloads and uploads as bytes: only owned elements, masks one bit each, no pickle.

The layout is a safetensors file. A tree of parameters becomes one flat vector of the elements the client owns,
in the tree's order; if it has so many zeros that it pays, only the others are sent, with a bit for each
element. Booleans are packed eight to a byte; what is left goes in whole. Every value comes back to the bit, and
how many digits a number has never changes a message's length, so engines that round apart agree on it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedpews.errors import FedpewsError
from fedpews.methods.contract import Download, Upload
from fedpews.neurons.network import Network
from fedpews.trees import Tree

SPARSE_HEADER = 100
"""Bytes that the description of one more tensor costs, about."""

LOSS = struct.Struct(">d")


class BadMessage(FedpewsError):
    """Bytes that are not an upload or a download of this network."""


def encode_upload(net: Network, upload: Upload) -> bytes:
    """An upload as it travels."""
    about = {key: getattr(upload, key) for key in ("client", "round", "samples", "steps")}
    about["loss"] = LOSS.pack(upload.loss).hex()
    return _encode(net, about, upload.params, upload.extra, upload.neurons, upload.mask)


def encode_download(net: Network, download: Download) -> bytes:
    """A download as it travels."""
    about = {key: getattr(download, key) for key in ("round", "phase", "total")}
    return _encode(net, about, download.params, download.extra, download.neurons, None)


def decode_upload(net: Network, data: bytes) -> Upload:
    """The inverse of ``encode_upload``; elements that were not sent are zero."""
    about, params, extra, neurons, mask = _decode(net, data)
    numbers = {key: _number(about, key) for key in ("client", "round", "samples", "steps")}
    try:
        (loss,) = LOSS.unpack(bytes.fromhex(about["loss"]))
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise BadMessage(f"loss must be {LOSS.size} bytes in hexadecimal: {error}") from error
    return Upload(**numbers, loss=loss, params=params, extra=extra, neurons=neurons, mask=mask)


def decode_download(net: Network, data: bytes) -> Download:
    """The inverse of ``encode_download``; elements that were not sent are zero."""
    about, params, extra, neurons, _ = _decode(net, data)
    round, total = (_number(about, key) for key in ("round", "total"))
    return Download(round, str(about.get("phase")), total, params, neurons, extra)


def _encode(
    net: Network,
    about: dict[str, Any],
    params: Tree,
    extra: Mapping[str, Tree],
    neurons: Tensor | None,
    mask: Tree | None,
) -> bytes:
    tensors: dict[str, Tensor] = {}
    owned: Mapping[str, Tensor] = {}
    if neurons is not None:
        tensors["neurons"] = _pack(neurons)
        owned = net.graph.expand(neurons)
    if mask is not None:
        about["mask"] = {name: list(bits.shape) for name, bits in mask.items()}
        tensors["mask"] = _pack(torch.cat([bits.flatten() for bits in mask.values()]))
        owned = mask
    about["trees"] = {}
    for key, tree in {"params": params, **extra}.items():
        if all(value.shape == net.shapes.get(name) for name, value in tree.items()):
            mine = {} if mask is not None and key != "params" else owned
            parts = {name: _owned(value, mine.get(name)) for name, value in tree.items()}
            bits = [name for name, part in parts.items() if part.dtype == torch.bool]
            about["trees"][key] = {"names": list(tree), "bits": bits}
            if bits:
                tensors[f"{key}:bits"] = _pack(torch.cat([parts.pop(name) for name in bits]))
            if parts:
                tensors |= _squeeze(key, torch.cat(list(parts.values())))
        else:
            tensors |= {f"{key}/{name}": value.contiguous() for name, value in tree.items()}
    encoded: bytes = save(tensors, {"about": json.dumps(about, separators=(",", ":"))})
    return encoded


def _decode(
    net: Network, data: bytes
) -> tuple[dict[str, Any], Tree, dict[str, Tree], Tensor | None, Tree | None]:
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        layout = {str(key): (list(tree["names"]), set(tree["bits"])) for key, tree in about["trees"].items()}
        shapes = {str(name): tuple(map(int, shape)) for name, shape in about.get("mask", {}).items()}
        names = {name for listed, _ in layout.values() for name in listed} | set(shapes)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadMessage(f"not a message of this kind: {error}") from error
    unknown = [str(name) for name in names if name not in net.shapes]
    if unknown or "params" not in layout:
        raise BadMessage(f"the message does not fit the model: {sorted(unknown)[:3] or 'no params'}")
    owned: Mapping[str, Tensor] = {}
    neurons = mask = None
    if "neurons" in tensors:
        neurons = _unpack(tensors.pop("neurons"), net.graph.size)
        owned = net.graph.expand(neurons)
    if "mask" in about:
        owned = mask = _unpack_mask(net, _take(tensors, "mask"), shapes)
    found = {
        key: _unflatten(net, tensors, key, *entry, {} if mask is not None and key != "params" else owned)
        for key, entry in layout.items()
    }
    for key, value in tensors.items():
        tree, _, name = key.partition("/")
        if not name or tree in layout:
            raise BadMessage(f"the message has a part {key!r} that does not belong to it")
        found.setdefault(tree, {})[name] = value
    return about, found.pop("params"), found, neurons, mask


def _owned(value: Tensor, mask: Tensor | None) -> Tensor:
    return value.flatten() if mask is None else value[mask.bool().expand_as(value)]


def _unflatten(
    net: Network,
    tensors: dict[str, Tensor],
    key: str,
    names: Sequence[str],
    bits: set[str],
    owned: Mapping[str, Tensor],
) -> Tree:
    masks = {n: owned[n].bool().expand(net.shapes[n]) if n in owned else None for n in names}
    sizes = {n: net.shapes[n].numel() if m is None else int(m.sum()) for n, m in masks.items()}
    parts: Tree = {}
    packed, plain = ([n for n in names if (n in bits) == kind] for kind in (True, False))
    if packed:
        lengths = [sizes[n] for n in packed]
        values = _unpack(_take(tensors, f"{key}:bits"), sum(lengths))
        parts |= zip(packed, values.split(lengths), strict=True)
    if plain:
        lengths = [sizes[n] for n in plain]
        parts |= zip(plain, _stretch(tensors, key, sum(lengths)).split(lengths), strict=True)
    tree = {}
    for name, mask in masks.items():
        part, shape = parts[name], net.shapes[name]
        empty = torch.zeros(shape, dtype=part.dtype)
        tree[name] = part.view(shape) if mask is None else empty.masked_scatter_(mask, part)
    return tree


def _squeeze(key: str, values: Tensor) -> dict[str, Tensor]:
    """The values, or only those that are not zero when that is shorter."""
    size = values.element_size()
    present = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]) != 0  # −0 is not zero
    saved = int((~present).sum()) * size - (values.numel() + 7) // 8
    if saved <= SPARSE_HEADER:
        return {key: values}
    return {key: values[present], f"{key}:where": _pack(present)}


def _stretch(tensors: dict[str, Tensor], key: str, count: int) -> Tensor:
    values = _take(tensors, key)
    if f"{key}:where" in tensors:
        present = _unpack(tensors.pop(f"{key}:where"), count)
        if values.shape != (int(present.sum()),):
            raise BadMessage(
                f"{key} has {tuple(values.shape)} values where {int(present.sum())} are expected"
            )
        return torch.zeros(count, dtype=values.dtype).masked_scatter_(present, values)
    if values.shape != (count,):
        raise BadMessage(f"{key} has {tuple(values.shape)} values where {count} are expected")
    return values


def _unpack_mask(net: Network, packed: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Tree:
    sizes = [math.prod(shape) for shape in shapes.values()]
    bits = _unpack(packed, sum(sizes)).split(sizes)
    mask = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), bits, strict=True)}
    for name, part in mask.items():
        try:
            part.expand(net.shapes[name])
        except RuntimeError as error:
            raise BadMessage(f"the mask of {name} does not fit it: {error}") from error
    return mask


def _take(tensors: dict[str, Tensor], key: str) -> Tensor:
    if key not in tensors:
        raise BadMessage(f"the message lacks its {key}")
    return tensors.pop(key)


def _number(about: Mapping[str, Any], key: str) -> int:
    value = about.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadMessage(f"{key} must be a whole number, got {value!r:.40}")
    return value


def _pack(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(bits.cpu().numpy().astype(bool)))


def _unpack(packed: Tensor, count: int) -> Tensor:
    if packed.dtype != torch.uint8 or packed.shape != ((count + 7) // 8,):
        raise BadMessage(f"a mask has {packed.numel()} bytes where {(count + 7) // 8} are expected")
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count).astype(bool))
