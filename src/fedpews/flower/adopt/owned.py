"""A model's state of which only some neurons are sent: the owned elements, and which they are, without a graph.

A mask over neurons is, for each parameter, one mask per dimension; an element is owned when all its positions
are. So a server that knows only names and shapes can put the elements back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpews.methods.wire import BadMessage

Arrays = Mapping[str, NDArray[Any]]


def select(values: Arrays, sides: Mapping[str, Mapping[int, NDArray[np.bool_]]]) -> dict[str, NDArray[Any]]:
    """The owned elements of each array, one after the other; an array without sides as it is."""
    return {
        name: value[_expand(value.shape, sides[name])] if name in sides else value
        for name, value in values.items()
    }


def pack_sides(sides: Mapping[str, Mapping[int, NDArray[np.bool_]]]) -> dict[str, NDArray[np.uint8]]:
    """The masks as bits, under the keys ``name:dimension``."""
    return {f"{name}:{dim}": np.packbits(mask) for name, axes in sides.items() for dim, mask in axes.items()}


def restore(
    sent: Arrays, packed: Arrays, like: Arrays
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.bool_]]]:
    """The arrays in their shapes (zero where not owned) and their masks; both checked against the global model.

    Args:
        like: the global model, whose names, shapes and types everything must have.
    """
    sides: dict[str, dict[int, NDArray[np.bool_]]] = {}
    for key, bits in packed.items():
        name, _, number = key.rpartition(":")
        if name not in like or not number.isdecimal() or int(number) >= like[name].ndim:
            raise BadMessage(f"a mask for {key!r:.60}, which the model does not have")
        length = like[name].shape[int(number)]
        if bits.dtype != np.uint8 or bits.shape != ((length + 7) // 8,):
            raise BadMessage(
                f"the mask {key!r:.60} has {bits.size} bytes where {(length + 7) // 8} are expected"
            )
        sides.setdefault(name, {})[int(number)] = np.unpackbits(bits, count=length).astype(bool)
    if sent.keys() != like.keys():
        raise BadMessage(f"other names than the model: {sorted(sent.keys() ^ like.keys())[:3]}")
    values, masks = {}, {}
    for name, kept in like.items():
        mask = _expand(kept.shape, sides[name]) if name in sides else np.ones(kept.shape, bool)
        part, shape = sent[name], (int(mask.sum()),) if name in sides else kept.shape
        if part.dtype != kept.dtype or part.shape != shape:
            raise BadMessage(f"{name} is {part.dtype} {part.shape} where {kept.dtype} {shape} is expected")
        if not np.isfinite(part).all():
            raise BadMessage(f"{name} holds values that are not finite")
        values[name] = np.zeros_like(kept)
        values[name][mask] = part if name in sides else part[mask]
        masks[name] = mask
    return values, masks


def fill_in(
    uploads: list[dict[str, NDArray[Any]]],
    masks: list[dict[str, NDArray[np.bool_]]],
    weights: list[float],
    old: Arrays,
) -> list[dict[str, NDArray[Any]]]:
    """Uploads whose plain weighted average is the average over the owners of each element.

    An element that a client does not own takes the mean of those that do, or its old value when nobody does:
    (Σ_owners p_i·x_i + Σ_others p_i·mean)/Σ p_i = mean. So whatever averages them needs to know of no mask.
    """
    filled: list[dict[str, NDArray[Any]]] = [{} for _ in uploads]
    for name, kept in old.items():
        if not np.issubdtype(kept.dtype, np.floating):
            for place, upload in enumerate(uploads):
                filled[place][name] = upload[name]
            continue
        total, mean = np.zeros(kept.shape), np.zeros(kept.shape)
        for upload, mask, weight in zip(uploads, masks, weights, strict=True):
            total += weight * mask[name]
            mean += weight * np.where(mask[name], upload[name], 0.0)
        mean = np.where(total > 0, mean / np.where(total > 0, total, 1.0), kept).astype(kept.dtype)
        for place, (upload, mask) in enumerate(zip(uploads, masks, strict=True)):
            filled[place][name] = np.where(mask[name], upload[name], mean)
    return filled


def _expand(shape: tuple[int, ...], sides: Mapping[int, NDArray[np.bool_]]) -> NDArray[np.bool_]:
    mask = np.ones(shape, bool)
    for dim, side in sides.items():
        mask &= side.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return mask
