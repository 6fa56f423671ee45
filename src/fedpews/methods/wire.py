"""Downloads and uploads as bytes: only owned elements, masks one bit each, no pickle.

The layout is a safetensors file. A tree of parameters becomes one flat vector of the elements the client owns,
in the network's order; booleans are packed eight to a byte; what is left goes in whole.
"""

from __future__ import annotations

import json
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


class BadMessage(FedpewsError):
    """Bytes that are not an upload or a download of this network."""


def encode_upload(net: Network, upload: Upload) -> bytes:
    """An upload as it travels."""
    about = {key: getattr(upload, key) for key in ("client", "round", "samples", "steps", "loss")}
    return _encode(net, about, upload.params, upload.extra, upload.neurons, upload.mask)


def encode_download(net: Network, download: Download) -> bytes:
    """A download as it travels."""
    about = {key: getattr(download, key) for key in ("round", "phase", "total")}
    return _encode(net, about, download.params, download.extra, download.neurons, None)


def decode_upload(net: Network, data: bytes) -> Upload:
    """The inverse of ``encode_upload``; elements that were not sent are zero."""
    about, params, extra, neurons, mask = _decode(net, data)
    numbers = {key: _number(about, key, int) for key in ("client", "round", "samples", "steps")}
    loss = _number(about, "loss", float)
    return Upload(**numbers, loss=loss, params=params, extra=extra, neurons=neurons, mask=mask)


def decode_download(net: Network, data: bytes) -> Download:
    """The inverse of ``encode_download``; elements that were not sent are zero."""
    about, params, extra, neurons, _ = _decode(net, data)
    round, total = (_number(about, key, int) for key in ("round", "total"))
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
        about["masked"] = list(mask)
        tensors["mask"] = _pack(torch.cat([m.expand(net.shapes[name]).flatten() for name, m in mask.items()]))
        owned = mask
    about["trees"] = {}
    for key, tree in {"params": params, **extra}.items():
        if set(tree) <= set(net.names):
            values = (
                torch.cat([_owned(value, owned.get(name)) for name, value in tree.items()]) if tree else None
            )
            bits = values is not None and values.dtype == torch.bool
            about["trees"][key] = {"names": list(tree), "bits": bits}
            if values is not None:
                tensors[key] = _pack(values) if bits else values
        else:
            tensors |= {f"{key}/{name}": value.contiguous() for name, value in tree.items()}
    data: bytes = save(tensors, {"about": json.dumps(about)})
    return data


def _decode(
    net: Network, data: bytes
) -> tuple[dict[str, Any], Tree, dict[str, Tree], Tensor | None, Tree | None]:
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        layout = {
            str(key): (list(map(str, t["names"])), bool(t["bits"])) for key, t in about["trees"].items()
        }
        masked = None if "masked" not in about else list(map(str, about["masked"]))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadMessage(f"not a message of this kind: {error}") from error
    unknown = {name for names, _ in layout.values() for name in names if name not in net.shapes}
    unknown |= {name for name in masked or () if name not in net.shapes}
    if unknown or "params" not in layout:
        raise BadMessage(f"the message does not fit the model: {sorted(unknown)[:3] or 'no params'}")
    owned: Mapping[str, Tensor] = {}
    neurons = mask = None
    if "neurons" in tensors:
        neurons = _unpack(tensors.pop("neurons"), net.graph.size)
        owned = net.graph.expand(neurons)
    if masked is not None:
        sizes = [net.shapes[name].numel() for name in masked]
        bits = _unpack(_take(tensors, "mask"), sum(sizes))
        owned = mask = {n: b.view(net.shapes[n]) for n, b in zip(masked, bits.split(sizes), strict=True)}
    found = {key: _unflatten(net, tensors, key, names, owned, bits) for key, (names, bits) in layout.items()}
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
    owned: Mapping[str, Tensor],
    bits: bool,
) -> Tree:
    masks = {n: owned[n].bool().expand(net.shapes[n]) if n in owned else None for n in names}
    sizes = [net.shapes[name].numel() if mask is None else int(mask.sum()) for name, mask in masks.items()]
    if not names:
        return {}
    values = _take(tensors, key)
    if bits:
        values = _unpack(values, sum(sizes))
    if values.shape != (sum(sizes),):
        raise BadMessage(f"{key} has {tuple(values.shape)} values where {sum(sizes)} are expected")
    tree = {}
    for (name, mask), part in zip(masks.items(), values.split(sizes), strict=True):
        if mask is None:
            tree[name] = part.view(net.shapes[name])
        else:
            tree[name] = torch.zeros(net.shapes[name], dtype=values.dtype).masked_scatter_(mask, part)
    return tree


def _take(tensors: dict[str, Tensor], key: str) -> Tensor:
    if key not in tensors:
        raise BadMessage(f"the message lacks its {key}")
    return tensors.pop(key)


def _number(about: Mapping[str, Any], key: str, kind: type) -> Any:
    value = about.get(key)
    if not isinstance(value, (int, kind)) or isinstance(value, bool):
        raise BadMessage(f"{key} must be a number, got {value!r:.40}")
    return kind(value)


def _pack(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(bits.cpu().numpy().astype(bool)))


def _unpack(packed: Tensor, count: int) -> Tensor:
    if packed.dtype != torch.uint8 or packed.shape != ((count + 7) // 8,):
        raise BadMessage(f"a mask has {packed.numel()} bytes where {(count + 7) // 8} are expected")
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count).astype(bool))
