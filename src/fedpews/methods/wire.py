"""Downloads and uploads as bytes: only owned elements, masks one bit each, no pickle.

The layout is a safetensors file. A tree of parameters becomes one flat vector of the elements the client owns,
in the tree's order; if it has so many zeros that it pays, only the others are sent, with a bit for each
element. Booleans are packed eight to a byte; what is left goes in whole. Every value comes back to the bit.

A message is first described (every tensor's type and shape, and how to make it), then encoded or only counted: in one
process nothing travels, so a round's bytes are counted without encoding them. The bytes of a message are those of its
tensors, without the header that names them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedpews.errors import FedpewsError
from fedpews.methods.contract import PARAMS, Download, Upload
from fedpews.neurons.network import Network
from fedpews.trees import Nest, Tree, bit_pattern, map_leaves, stack, stacks


class WirePart(NamedTuple):
    """One tensor of a message, known before it is made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


SPARSE_HEADER = 100
"""Bytes that the description of one more tensor costs, about."""

LOSS = struct.Struct(">d")
"""A loss travels as its eight bytes in hexadecimal, so that it comes back to the bit."""


class BadMessage(FedpewsError):
    """Bytes that are not an upload or a download of this network."""


def encode_upload(net: Network, upload: Upload) -> bytes:
    """An upload as it travels."""
    return _encode(net, upload)


def encode_download(net: Network, download: Download) -> bytes:
    """A download as it travels."""
    return _encode(net, download)


def _encode(net: Network, sent: Upload | Download) -> bytes:
    about, parts = _describe(net, sent, *_count_owned(net, [sent]))
    tensors = {key: part.make().cpu() for key, part in parts.items()}
    encoded: bytes = save(tensors, {"about": json.dumps(about, separators=(",", ":"))})
    return encoded


def message_sizes(net: Network, sent: Sequence[Upload | Download]) -> list[int]:
    """The bytes of each message's tensors, computed without encoding them."""
    dense, sizes = _without_zeros(net, sent), []
    first_keys = {PARAMS, *sent[0].extra}
    # whole models without zeros are all of one size: with many small clients, the number of calls is what costs
    is_alike = first_keys <= dense and all(
        one.neurons is None and getattr(one, "mask", None) is None and {PARAMS, *one.extra} == first_keys
        for one in sent
    )
    measured = sent[:1] if is_alike else sent
    for message, counts in zip(measured, _count_owned(net, measured), strict=True):
        _, parts = _describe(net, message, counts, dense)
        sizes.append(sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values()))
    return sizes * len(sent) if is_alike else sizes


def _without_zeros(net: Network, sent: Sequence[Upload | Download]) -> frozenset[str]:
    """The keys of the trees that have too few zeros in all messages together for any of them to leave some out."""
    keys = []
    messages = [{PARAMS: one.params, **one.extra} for one in sent]
    for key, tree in messages[0].items():
        every = [message.get(key, {}) for message in messages]
        dtypes = {value.dtype for value in tree.values()}
        is_model = all(value.shape == net.shapes.get(name) for name, value in tree.items())
        is_alike = all(other.keys() == tree.keys() for other in every)
        if not is_model or not is_alike or len(dtypes) != 1:
            continue
        (dtype,) = dtypes
        if not dtype.is_floating_point:
            continue
        zeros = 0
        for name in tree:
            # downloads share the model
            distinct = {id(other[name]): other[name] for other in every}
            for rows in stacks([*distinct.values()]):
                zeros += rows.numel() - int(bit_pattern(rows).count_nonzero())
        if zeros * dtype.itemsize <= SPARSE_HEADER:
            keys.append(key)
    return frozenset(keys)


def decode_upload(net: Network, data: bytes) -> Upload:
    """The inverse of ``encode_upload``; elements that were not sent are zero."""
    about, content = _decode(net, data)
    content |= {key: _number(about, key) for key in ("client", "round", "samples", "steps")}
    try:
        (loss,) = LOSS.unpack(bytes.fromhex(about["loss"]))
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise BadMessage(f"loss must be {LOSS.size} bytes in hexadecimal: {error}") from error
    return Upload(loss=loss, **content)


def decode_download(net: Network, data: bytes) -> Download:
    """The inverse of ``encode_download``; elements that were not sent are zero."""
    about, content = _decode(net, data)
    content.pop("mask", None)
    round, total = (_number(about, key) for key in ("round", "total"))
    return Download(round, str(about.get("phase")), total, **content)


def _describe(
    net: Network, sent: Upload | Download, counts: Mapping[str, int], dense: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, WirePart]]:
    """What the header of a message says, and its tensors by name, before they are made.

    Args:
        counts: how many elements of each tensor are sent; all of a tensor that is missing.
        dense: keys of trees that are known to have next to no zeros.
    """
    neurons, mask = sent.neurons, None
    about: dict[str, Any]
    if isinstance(sent, Upload):
        about = {"client": sent.client, "round": sent.round, "samples": sent.samples, "steps": sent.steps}
        about["loss"] = LOSS.pack(sent.loss).hex()
        mask = sent.mask
    else:
        about = {"round": sent.round, "total": sent.total, "phase": sent.phase}
    parts: dict[str, WirePart] = {}
    if neurons is not None:
        # one bit each, in whole bytes: −(−n // 8) is n / 8 rounded up
        parts["neurons"] = WirePart(torch.uint8, (-(-neurons.numel() // 8),), partial(_pack, neurons))
    if mask is not None:
        about["mask"] = {name: tuple(bits.shape) for name, bits in mask.items()}
        bits = torch.cat([bits.flatten() for bits in mask.values()])
        parts["mask"] = WirePart(torch.uint8, (-(-bits.numel() // 8),), partial(_pack, bits))
    about["trees"] = {}
    for key, tree in {PARAMS: sent.params, **sent.extra}.items():
        # a tree shaped like the model (or some of its layers) is cut down to what the client owns; any
        # other, such as one number per neuron, has no owned elements to pick
        if all(value.shape == net.shapes.get(name) for name, value in tree.items()):
            # single weights are owned in the model; what is sent beside it goes whole
            is_whole = mask is not None and key != PARAMS
            sizes = {n: v.numel() if is_whole else counts.get(n, v.numel()) for n, v in tree.items()}
            yes_no = {name: value for name, value in tree.items() if value.dtype == torch.bool}
            about["trees"][key] = {"names": list(tree), "bits": list(yes_no)}
            rest = {name: value for name, value in tree.items() if name not in yes_no}
            if yes_no:
                count, take = sum(sizes[n] for n in yes_no), partial(_pack_owned, net, sent, yes_no, is_whole)
                parts[f"{key}:bits"] = WirePart(torch.uint8, (-(-count // 8),), take)
            if rest:
                count, take = sum(sizes[n] for n in rest), partial(_take_owned, net, sent, rest, is_whole)
                if key in dense:
                    parts[key] = WirePart(next(iter(rest.values())).dtype, (count,), take)
                else:
                    parts |= _squeeze(key, rest, count, take)
        else:
            for name, value in tree.items():
                parts[f"{key}/{name}"] = WirePart(value.dtype, tuple(value.shape), value.contiguous)
    return about, parts


def _count_owned(net: Network, sent: Sequence[Upload | Download]) -> list[dict[str, int]]:
    """How many elements of each tensor a message has; a name that is missing belongs to its client as a whole."""
    masks = [getattr(message, "mask", None) for message in sent]
    neurons = [message.neurons for message in sent if message.neurons is not None]
    if len(neurons) == len(sent) and masks == [None] * len(sent):
        # all at once: with many small clients, the number of calls is what costs
        return net.graph.count(stack(neurons), net.shapes) or [{}] * len(sent)
    counts: list[dict[str, int]] = []
    for message, mask in zip(sent, masks, strict=True):
        if mask is not None:
            whole = {name: bits.expand(net.shapes[name]) for name, bits in mask.items()}
            counts.append({name: int(bits.count_nonzero()) for name, bits in whole.items()})
        else:
            counts += [{}] if message.neurons is None else _count_owned(net, [message])
    return counts


def _take_owned(net: Network, sent: Upload | Download, tree: Mapping[str, Tensor], is_whole: bool) -> Tensor:
    """The owned elements of a tree as one flat vector, in the tree's order."""
    masks: Mapping[str, Tensor] = {}
    if not is_whole:
        masks = getattr(sent, "mask", None) or (
            {} if sent.neurons is None else net.graph.expand(sent.neurons)
        )
    return torch.cat(
        [
            value[masks[name].bool().expand_as(value)] if name in masks else value.flatten()
            for name, value in tree.items()
        ]
    )


def _decode(net: Network, data: bytes) -> tuple[dict[str, Any], Nest]:
    """What the header says; and params, extra, and neurons or mask if they were sent, on the network's device."""
    try:
        tensors = load(data)
        # ``load`` leaves the metadata out, so the header is read a second time
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        layout = {str(key): (list(tree["names"]), set(tree["bits"])) for key, tree in about["trees"].items()}
        shapes = {str(name): tuple(map(int, shape)) for name, shape in about.get("mask", {}).items()}
        names = {name for listed, _ in layout.values() for name in listed} | set(shapes)
    # the bytes come from another machine: whatever is wrong with them must end here, RecursionError (JSON nested too
    # deep) included
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadMessage(f"not a message of this kind: {error}") from error
    # checked once, since from here on the names are used to look up the model's shapes
    unknown = [str(name) for name in names if name not in net.shapes]
    if unknown or "params" not in layout:
        raise BadMessage(f"the message does not fit the model: {sorted(unknown)[:3] or 'no params'}")
    owned: Tree = {}
    content: Nest = {}
    if "neurons" in tensors:
        content["neurons"] = _unpack(tensors.pop("neurons"), net.graph.size)
        owned = net.graph.expand(content["neurons"])
    if "mask" in about:
        owned = content["mask"] = _unpack_mask(net, _take(tensors, "mask"), shapes)
    trees = {
        key: _unflatten(net, tensors, key, *entry, {} if "mask" in about and key != PARAMS else owned)
        for key, entry in layout.items()
    }
    # the expected tensors are popped; the rest are trees that are sent whole
    for key, value in tensors.items():
        tree, _, name = key.partition("/")
        if not name or tree in layout:
            raise BadMessage(f"the message has a part {key!r} that does not belong to it")
        trees.setdefault(tree, {})[name] = value
    content |= {"params": trees.pop(PARAMS), "extra": trees}
    return about, map_leaves(lambda leaf: leaf.to(net.device), content)


def _unflatten(
    net: Network,
    tensors: dict[str, Tensor],
    key: str,
    names: Sequence[str],
    bits: set[str],
    owned: Mapping[str, Tensor],
) -> Tree:
    # None owns the whole tensor
    masks = {n: owned[n].bool().expand(net.shapes[n]) if n in owned else None for n in names}
    sizes = {n: net.shapes[n].numel() if m is None else int(m.sum()) for n, m in masks.items()}
    parts: Tree = {}
    # booleans and numbers were flattened into one vector each, in the order of the names
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
        # what the client does not own was not sent, and is zero here
        empty = torch.zeros(shape, dtype=part.dtype)
        tree[name] = part.view(shape) if mask is None else empty.masked_scatter_(mask, part)
    return tree


def _squeeze(
    key: str, tree: Mapping[str, Tensor], count: int, take: Callable[[], Tensor]
) -> dict[str, WirePart]:
    """The owned values, so many, or only those that are not zero when that is shorter."""
    dtypes = {value.dtype for value in tree.values()}
    if len(dtypes) == 1:
        (dtype,) = dtypes
        # no more zeros can be owned than there are, so most trees need no second look
        zeros = sum(v.numel() - int(bit_pattern(v).count_nonzero()) for v in tree.values())
        if zeros * dtype.itemsize - (count + 7) // 8 <= SPARSE_HEADER:
            return {key: WirePart(dtype, (count,), take)}
    values = take()
    size = values.element_size()
    present = bit_pattern(values) != 0
    filled = int(present.count_nonzero())
    # now exactly: zeros saved, less a bit for each element and the header of one more tensor
    if (count - filled) * size - (count + 7) // 8 <= SPARSE_HEADER:
        return {key: WirePart(values.dtype, (count,), lambda: values)}
    return {
        key: WirePart(values.dtype, (filled,), lambda: values[present]),
        f"{key}:where": WirePart(torch.uint8, (-(-count // 8),), partial(_pack, present)),
    }


def _stretch(tensors: dict[str, Tensor], key: str, count: int) -> Tensor:
    values, present = _take(tensors, key), tensors.pop(f"{key}:where", None)
    where = torch.ones(count, dtype=torch.bool) if present is None else _unpack(present, count)
    # masked_scatter_ would ignore surplus values without an error
    if values.shape != (int(where.sum()),):
        raise BadMessage(f"{key} has {tuple(values.shape)} values where {int(where.sum())} are expected")
    return (
        values if present is None else torch.zeros(count, dtype=values.dtype).masked_scatter_(where, values)
    )


def _unpack_mask(net: Network, packed: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Tree:
    sizes = [math.prod(shape) for shape in shapes.values()]
    bits = _unpack(packed, sum(sizes)).split(sizes)
    mask = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), bits, strict=True)}
    for name, part in mask.items():
        try:
            # a mask may be smaller than its tensor (a bit per row), as long as it broadcasts
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
    # for Python, True is an int
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadMessage(f"{key} must be a whole number, got {value!r:.40}")
    return value


def _pack_owned(net: Network, sent: Upload | Download, tree: Mapping[str, Tensor], is_whole: bool) -> Tensor:
    return _pack(_take_owned(net, sent, tree, is_whole))


def _pack(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(bits.cpu().numpy().astype(bool)))


def _unpack(packed: Tensor, count: int) -> Tensor:
    if packed.dtype != torch.uint8 or packed.shape != ((count + 7) // 8,):
        raise BadMessage(f"a mask has {packed.numel()} bytes where {(count + 7) // 8} are expected")
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count).astype(bool))
