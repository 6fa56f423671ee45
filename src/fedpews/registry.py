"""The names of methods, optimisers and masks. A class is registered where it is defined.

`registered` reads these lines from the source files of the package without importing them, so that a list of names
does not wait for torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar, get_args

Kind = Literal["method", "server", "optimizer", "personal", "masks"]
"""A base method, a server optimiser, a local optimiser, a way to give each client its own model, masks of a warmup."""

C = TypeVar("C", bound=type)

LINE = re.compile(r'^@register\("(\w+)", "([\w-]+)"\)\n(?:@.*\n)*class (\w+)', re.MULTILINE)


def register(kind: Kind, name: str) -> Callable[[C], C]:
    """Make a class known by its name in configurations: ``@register("method", "fedprox")``."""

    def add(cls: C) -> C:
        registered(kind)[name] = f"{cls.__module__}:{cls.__qualname__}"
        return cls

    return add


def registered(kind: Kind) -> dict[str, str]:
    """The classes of a kind: name -> "module:Class"."""
    return _read_package()[kind]


@cache
def _read_package() -> dict[str, dict[str, str]]:
    names: dict[str, dict[str, str]] = {kind: {} for kind in get_args(Kind)}
    package = Path(__file__).parent
    for path in (*sorted(package.glob("methods/*.py")), *sorted(package.glob("warmup/*.py"))):
        module = f"{package.name}.{path.parent.name}.{path.stem}"
        for kind, name, cls in LINE.findall(path.read_text(encoding="utf-8")):
            names[kind][name] = f"{module}:{cls}"
    names["method"] = dict(sorted(names["method"].items()))
    return names
