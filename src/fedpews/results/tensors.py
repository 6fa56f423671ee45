"""Files of tensors (safetensors): trees of named tensors, and nested dicts of tensors. They never hold code."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews import outside
from fedpews.errors import CheckpointError, ConfigError, first_line
from fedpews.results.files import digest, read_bytes, write_atomically

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedpews.trees import Nest


def read_tensors(path: Path, *, follow: bool = False) -> dict[str, Tensor]:
    """The tensors of a plain file; with ``follow`` the path may be a link."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = outside.read_bytes(path, sys.maxsize, follow=follow)
    try:
        tensors: dict[str, Tensor] = load(data)
    # a type of numbers that torch does not have is a KeyError
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error
    return tensors


def write_nest(path: Path, nest: Nest, header: Mapping[str, Any], *, durable: bool = True) -> str:
    """Write a nested dict of tensors as one file and return its digest."""
    from safetensors.torch import save

    from fedpews.trees import flatten

    leaves, structure = flatten(nest)
    # numbered: the structure says where each tensor belongs
    tensors = {str(i): leaf.detach().cpu().contiguous().clone() for i, leaf in enumerate(leaves)}
    data = save(tensors, {"about": json.dumps({"header": dict(header), "structure": structure})})
    write_atomically(path, data, durable=durable)
    return digest(data)


def read_nest(
    path: Path, device: torch.device | str = "cpu", expected: str | None = None
) -> tuple[Nest, dict[str, Any]]:
    """The inverse of ``write_nest``: the nest with its tensors on a device, and the header.

    A damaged file is a CheckpointError.

    Args:
        expected: the digest that the file must have.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    from fedpews.trees import unflatten

    data = read_bytes(path)
    if expected is not None and digest(data) != expected:
        raise CheckpointError(f"{path} is damaged: it does not match its digest")
    try:
        # the format: the length of a JSON header in eight bytes, then the header
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        tensors = load(data)
        leaves = (tensors[str(i)].to(device) for i in range(len(tensors)))
        return unflatten(leaves, about["structure"]), dict(about["header"])
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        StopIteration,
    ) as error:
        raise CheckpointError(
            f"{path} is damaged ({first_line(error)}). Start again in another folder (--out)."
        ) from error
