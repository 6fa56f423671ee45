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


def load_module(name: str) -> ModuleType:
    """A module by its name, also one in the working directory, or a Python file by its path.

    >>> load_module("os")
    Traceback (most recent call last):
    ...
    ImportError: 'os' is part of Python itself, not code written for this
    """
    if not name.endswith(".py"):
        if name.partition(".")[0] == __name__.partition(".")[0]:
            # what we ship needs nothing from the working directory, so nothing there can replace it
            return importlib.import_module(name)
        _refuse_standard(name, name)
        with working_directory():
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"own_{Path(name).stem}", name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # dataclasses in it look themselves up there
    sys.modules[spec.name] = module
    with working_directory():
        spec.loader.exec_module(module)
    return module


def load_named(name: str, kind: type | None = None) -> Any:
    """What ``module:name`` stands for: a subclass of ``kind``, or a function that was written in Python.

    Anything else that can be called is an ImportError: a function of Python's own library, or another class.
    """
    module, _, attribute = name.rpartition(":")
    value: Any = getattr(load_module(module), attribute, None)
    if not callable(value):
        what = "function" if kind is None else "class or function"
        raise ImportError(f"{module!r} has no {what} {attribute!r}")
    # the function or class behind partial arguments and decorators
    written: Any = value
    while isinstance(written, partial):
        written = written.func
    written = inspect.unwrap(written)
    _refuse_standard(str(getattr(written, "__module__", None) or "builtins"), attribute)
    is_kind = isinstance(value, type) and kind is not None and issubclass(value, kind)
    if not is_kind and not inspect.isfunction(written):
        wanted = "a function" if kind is None else f"a subclass of {kind.__name__}, nor a function"
        raise ImportError(f"{attribute!r} of {module!r} is not {wanted}")
    return value


@contextmanager
def working_directory() -> Iterator[None]:
    """Look for modules in the working directory too, where an installed command does not look by itself.

    After everything else: a file there called like an installed module does not replace it.
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


def _refuse_standard(module: str, what: str) -> None:
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ImportError(f"{what!r} is part of Python itself, not code written for this")
