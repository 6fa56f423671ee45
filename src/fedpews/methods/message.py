"""A message of named tensors, known before it is made: built as a safetensors file, or only measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""safetensors' names, from the narrowest to the widest."""

WIDTHS = {dtype: place for place, dtype in enumerate(DTYPES)}

COMPACT = (",", ":")


class Part(NamedTuple):
    """One tensor of a message, known before it is made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


class Message(NamedTuple):
    """What a message consists of: what it says about itself, and its tensors by name."""

    numbers: dict[str, int]
    words: dict[str, str]
    trees: tuple[
        tuple[str, tuple[str, ...], tuple[str, ...]], ...
    ]  # of each its key, names, and which are bits
    mask: tuple[tuple[str, tuple[int, ...]], ...] | None  # its names and shapes
    parts: dict[str, Part]

    @property
    def about(self) -> str:
        """What the message says about itself, in JSON."""
        said = {**self.numbers, **self.words}
        # the model's names are the same in every message, and by far the longest part
        return f"{json.dumps(said, separators=COMPACT)[:-1]},{_layout_text(self.trees, self.mask)[1:]}"

    def encode(self) -> bytes:
        tensors = {key: part.make().cpu() for key, part in self.parts.items()}
        encoded: bytes = save(tensors, {"about": self.about})
        return encoded

    def size(self) -> int:
        """The length of ``encode``'s bytes: a header in JSON that gives each tensor's place, then the tensors."""
        # safetensors' own layout, worked out again: the header lists where each tensor's bytes are
        entries = [f'"__metadata__":{{"about":{json.dumps(self.about, ensure_ascii=False)}}}']
        end = 0
        for key, (dtype, shape, _) in sorted(self.parts.items(), key=_place):
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            sizes = ",".join(map(str, shape))
            entries.append(
                f'{_quoted(key)}:{{"dtype":"{DTYPES[dtype]}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}'
            )
        described = len(",".join(entries).encode()) + len("{}")
        # eight bytes say how long the header is, which is filled up with blanks to a multiple of eight
        return 8 + -(-described // 8) * 8 + end


def _place(part: tuple[str, Part]) -> tuple[int, str]:
    """Where a tensor comes in a file: the widest type first, those of one type by name."""
    return -WIDTHS[part[1].dtype], part[0]


@lru_cache(maxsize=1000)
def _quoted(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


@lru_cache(maxsize=1000)
def _layout_text(
    trees: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...],
    mask: tuple[tuple[str, tuple[int, ...]], ...] | None,
) -> str:
    layout: dict[str, Any] = {} if mask is None else {"mask": dict(mask)}
    layout["trees"] = {key: {"names": names, "bits": bits} for key, names, bits in trees}
    return json.dumps(layout, separators=COMPACT)
