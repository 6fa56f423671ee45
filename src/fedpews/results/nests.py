"""Files that are never half written, and nested dicts of tensors as files."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from fedpews.errors import CheckpointError

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


def write_nest(path: Path, nest: Nest, header: Mapping[str, Any]) -> None:
    """A nested dict of tensors as one safetensors file."""
    from safetensors.torch import save

    tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in leaves(nest)}
    about = json.dumps({"header": dict(header), "empty": list(_empties(nest))})
    write_atomically(path, save(tensors, {"about": about}))


def read_nest(path: Path, device: torch.device | str = "cpu") -> tuple[Nest, dict[str, Any]]:
    """The inverse of ``write_nest``, with the tensors on a device; a file that is not whole is a CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
        nest: Nest = {}
        for name, value in [*tensors.items(), *((name, {}) for name in about["empty"])]:
            *parents, last = map(unquote, name.split("/"))
            place = nest
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        return nest, dict(about["header"])
    except (
        OSError,
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{path} is missing or damaged ({error}). Start again in another folder (--out)."
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """A file appears whole or not at all, also when the machine goes down."""
    # a name that nobody can guess, and never through a link that somebody put there
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
