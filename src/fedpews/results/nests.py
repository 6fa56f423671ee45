"""Nested dicts of tensors as files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from fedpews.errors import CheckpointError
from fedpews.results.files import digest, read_bytes, write_atomically

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedpews.trees import Nest


def leaves(nest: Nest, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested dict with its path."""
    for key, value in nest.items():
        path = f"{prefix}{quote(str(key), safe='')}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}/")
        else:
            yield path, value


def nest_bytes(nest: Nest) -> int | None:
    """What all tensors of a nested dict take; None when it holds none."""
    total = None
    for value in nest.values():
        size = nest_bytes(value) if isinstance(value, dict) else value.nbytes
        if size is not None:
            total = size + (total or 0)
    return total


def _empties(nest: Nest, prefix: str = "") -> Iterator[str]:
    for key, value in nest.items():
        path = f"{prefix}{quote(str(key), safe='')}"
        if value == {}:
            yield path
        elif isinstance(value, dict):
            yield from _empties(value, f"{path}/")


def write_nest(path: Path, nest: Nest, header: Mapping[str, Any], *, durable: bool = True) -> str:
    """A nested dict of tensors as one safetensors file; its digest."""
    from safetensors.torch import save

    tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in leaves(nest)}
    about: dict[str, Any] = {"header": dict(header), "empty": list(_empties(nest))}
    # the format sorts by itself; a nest comes back in the order it had, so that it is the same to every reader
    if list(tensors) != sorted(tensors):
        places = {name: place for place, name in enumerate(sorted(tensors))}
        about["order"] = [places[name] for name in tensors]
    data = save(tensors, {"about": json.dumps(about)})
    write_atomically(path, data, durable=durable)
    return digest(data)


def read_nest(
    path: Path, device: torch.device | str = "cpu", expected: str | None = None
) -> tuple[Nest, dict[str, Any]]:
    """The inverse of ``write_nest``, with the tensors on a device; a file that is not whole is a CheckpointError.

    Args:
        expected: the digest that the file must have.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = read_bytes(path)
    if expected is not None and digest(data) != expected:
        raise CheckpointError(f"{path} is damaged: it does not give its digest")
    try:
        # the format: the length of a JSON header in eight bytes, then the header
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        tensors = {name: value.to(device) for name, value in sorted(load(data).items())}
        if "order" in about:
            names = list(tensors)
            tensors = {names[place]: tensors[names[place]] for place in about["order"]}
        nest: Nest = {}
        for name, value in [*tensors.items(), *((name, {}) for name in about["empty"])]:
            *parents, last = map(unquote, name.split("/"))
            place = nest
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        return nest, dict(about["header"])
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}). Start again in another folder (--out)."
        ) from error
