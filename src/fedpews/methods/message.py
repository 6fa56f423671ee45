"""A message of named tensors, known before it is made: encoded as a safetensors file, or only counted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor


class Part(NamedTuple):
    """One tensor of a message, known before it is made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


class Message(NamedTuple):
    """A message: what its header says, and its tensors by name."""

    about: dict[str, Any]
    parts: dict[str, Part]

    def encode(self) -> bytes:
        tensors = {key: part.make().cpu() for key, part in self.parts.items()}
        encoded: bytes = save(tensors, {"about": json.dumps(self.about, separators=(",", ":"))})
        return encoded

    def payload(self) -> int:
        """The bytes of all tensors; the header with their names is not counted."""
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in self.parts.values())
