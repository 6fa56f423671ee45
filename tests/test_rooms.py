"""The rooms of the package: who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedpews

PACKAGE = Path(fedpews.__file__).parent

# a room may import what stands here, and itself; every room may import errors
ROOMS = {
    "__init__": {
        "data",
        "experiment",
        "methods",
        "neurons",
        "running",
        "warmup",
    },  # for their public names only
    "errors": set(),
    "seeds": set(),
    "trees": set(),
    "own_code": set(),
    "neurons": {"trees"},
    "methods": {"trees", "seeds", "neurons", "own_code"},
    "warmup": {"methods", "neurons", "trees", "seeds"},
    "models": {"own_code"},
    "data": {"seeds", "own_code"},
    "runtimes": {"methods", "neurons", "warmup", "data", "trees", "seeds", "results"},
    "results": set(),
    "recipes": set(),
    "experiment": {"methods", "recipes"},
    "running": {
        "experiment",
        "data",
        "models",
        "methods",
        "warmup",
        "neurons",
        "runtimes",
        "results",
        "report",
        "seeds",
        "trees",
    },
    "report": {"results"},
    "testing": {"methods", "warmup", "neurons", "runtimes", "data", "trees", "seeds", "results", "models"},
    "reproduce": {
        "seeds",
        "experiment",
        "running",
        "report",
        "results",
        "recipes",
        "data",
        "models",
        "neurons",
    },
    "flower": {"experiment", "running", "runtimes", "data", "neurons"},
    "loopback": {"experiment", "flower", "running", "runtimes", "results"},
    "cli": {
        "experiment",
        "running",
        "report",
        "reproduce",
        "loopback",
        "data",
        "models",
        "methods",
        "runtimes",
        "results",
    },
}

LIGHT = {"errors": set(), "seeds": set(), "own_code": set(), "trees": {"torch"}}
"""Rooms that may only use the standard library, and these."""


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide which room is meant"
            if node.module == "fedpews":
                yield from (f"fedpews.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_every_room_is_named_here() -> None:
    assert {room(path) for path in files()} <= set(ROOMS)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_the_rooms_it_may(path: Path) -> None:
    used = {name.split(".")[1] for name in imports(path) if name.startswith("fedpews.")}
    assert used <= ROOMS[room(path)] | {room(path), "errors"}


@pytest.mark.parametrize("name", LIGHT)
def test_a_light_room_stays_light(name: str) -> None:
    import sys

    used = {module.split(".")[0] for module in imports(PACKAGE / f"{name}.py")}
    assert used <= sys.stdlib_module_names | LIGHT[name] | {"__future__"}


def test_flower_is_imported_only_by_its_runtime() -> None:
    users = {path for path in files() if any(name.split(".")[0] == "flwr" for name in imports(path))}
    assert all(path.is_relative_to(PACKAGE / "runtimes" / "flower") for path in users)
