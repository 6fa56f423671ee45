"""Code that users name on the command line or in a configuration: ``module:name`` or ``path/to/file.py:name``.

A configuration that names code runs it: the module is imported. What is named must have been written for the purpose,
so that `os:system` as a model is a mistake that is refused and not a command that runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any


def load_module(place: str) -> ModuleType:
    """A module by its name, also one in the working directory, or a Python file by its path.

    >>> load_module("os")
    Traceback (most recent call last):
    ...
    ImportError: 'os' is part of Python itself, not code written for this
    """
    if _is_ours(place):
        # what we ship needs nothing from the working directory, so nothing there can take its place
        return importlib.import_module(place)
    if not place.endswith(".py"):
        _refuse_standard(place, place)
        with working_directory():
            return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(f"own_{Path(place).stem}", place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # where dataclasses in it look themselves up
    sys.modules[spec.name] = module
    with working_directory():
        spec.loader.exec_module(module)
    return module


def load_named(name: str, kind: type | None = None) -> Any:
    """What ``module:name`` stands for: a subclass of ``kind``, or a function that was written in Python.

    Anything else that can be called is an ImportError: a function of Python's own library, or another class.
    """
    place, _, attribute = name.rpartition(":")
    what = "function" if kind is None else "class or function"
    found = getattr(load_module(place), attribute, None)
    if not callable(found):
        raise ImportError(f"{place!r} has no {what} {attribute!r}")
    written = _written(found)
    _refuse_standard(str(getattr(written, "__module__", None) or "builtins"), attribute)
    is_kind = isinstance(found, type) and kind is not None and issubclass(found, kind)
    if not is_kind and not inspect.isfunction(written):
        wanted = "a function" if kind is None else f"a subclass of {kind.__name__}, nor a function"
        raise ImportError(f"{attribute!r} of {place!r} is not {wanted}")
    return found


@contextmanager
def working_directory() -> Iterator[None]:
    """Find modules in the working directory too, where an installed command does not look by itself.

    After everything else: a file there called like an installed module does not take its place.
    """
    here = str(Path.cwd())
    if here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _is_ours(place: str) -> bool:
    return place.partition(".")[0] == __name__.partition(".")[0] and not place.endswith(".py")


def _refuse_standard(module: str, what: str) -> None:
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ImportError(f"{what!r} is part of Python itself, not code written for this")


def _written(found: Any) -> Any:
    """The function or class behind decorators and partial arguments."""
    while isinstance(found, partial):
        found = found.func
    return inspect.unwrap(found)
