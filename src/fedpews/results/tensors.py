"""Files of named tensors (safetensors): never code, and refused in words when damaged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedpews.errors import ConfigError, first_line

if TYPE_CHECKING:
    from torch import Tensor


def read_tensors(path: Path, *, follow: bool = False) -> dict[str, Tensor]:
    """The tensors of a plain file; with ``follow`` the path may be a link."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.is_symlink() and not follow:
        raise ConfigError(f"{path} is a link; a run's folder holds plain files only")
    if not path.is_file():
        raise ConfigError(f"{path} is not a plain file")
    try:
        found: dict[str, Tensor] = load_file(path)
    # a type of numbers that torch does not have is a KeyError
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error
    return found
