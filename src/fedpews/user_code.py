"""Code that users name on the command line or in a configuration: ``module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


def load_module(place: str) -> ModuleType:
    """A module by its name, also one in the working directory, or a Python file by its path."""
    with working_directory_first():
        if not place.endswith(".py"):
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(f"own_{Path(place).stem}", place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place!r} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses in it look themselves up
        spec.loader.exec_module(module)
        return module


@contextmanager
def working_directory_first() -> Iterator[None]:
    """Find modules in the working directory, where an installed command does not look by itself."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
