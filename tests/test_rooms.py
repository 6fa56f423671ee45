"""The rooms of the package: who may import whom."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import fedpews

PACKAGE = Path(fedpews.__file__).parent

# a room may import what stands here, and itself; every room may import errors. No room is above another that is
# above it: reading from the top, a room imports only rooms that stand higher up.
ROOMS = {
    "errors": set(),
    "seeds": set(),
    "trees": set(),
    "stopping": set(),
    "tables": set(),
    "outside": set(),
    "user_code": set(),
    "torch_private": set(),
    "tasks": {"user_code"},
    "neurons": {"seeds", "torch_private", "trees"},
    "methods": {"neurons", "seeds", "torch_private", "trees"},
    "warmup": {"methods", "neurons", "seeds", "trees"},
    "models": {"user_code"},
    "data": {"outside", "seeds", "tasks", "torch_private", "user_code"},
    "recipes": set(),
    "results": {"outside", "tasks", "trees"},
    "compose": {"methods", "user_code", "warmup"},
    "configs": {"compose", "outside"},
    "experiment": {"tables", "compose", "configs", "tasks"},
    "keys": {"compose", "configs", "experiment", "methods", "models", "tasks"},
    "engines": {
        "data",
        "methods",
        "neurons",
        "results",
        "seeds",
        "tasks",
        "torch_private",
        "trees",
        "user_code",
    },
    "observe": {"methods", "neurons", "results", "trees"},
    "server": {"data", "engines", "methods", "neurons", "observe", "results", "seeds", "tasks", "trees"},
    "report": {"outside", "results", "tasks"},
    "watching": {"experiment", "report", "results", "trees"},
    "given": {"experiment", "results"},
    "build": {
        "compose",
        "configs",
        "data",
        "engines",
        "experiment",
        "given",
        "methods",
        "models",
        "neurons",
        "results",
        "seeds",
        "server",
        "tasks",
        "torch_private",
        "trees",
    },
    "notices": {"build", "data", "experiment", "results", "tasks"},
    "resuming": {"build", "configs", "engines", "experiment", "given", "neurons", "results"},
    "saving": {"build", "engines", "neurons", "observe", "results", "resuming", "server", "trees"},
    "finetuning": {"build", "data", "engines", "methods", "server", "trees"},
    "pretraining": {"build", "engines", "finetuning", "methods", "trees"},
    "loading": {"build", "experiment", "outside", "results", "trees"},
    "result": {"experiment", "neurons", "report", "results", "tasks", "trees"},
    "running": {
        "build",
        "data",
        "engines",
        "experiment",
        "finetuning",
        "given",
        "methods",
        "neurons",
        "notices",
        "pretraining",
        "resuming",
        "result",
        "results",
        "saving",
        "server",
        "stopping",
        "tasks",
        "trees",
        "watching",
    },
    "ranks": {
        "build",
        "data",
        "engines",
        "experiment",
        "methods",
        "result",
        "results",
        "resuming",
        "running",
        "server",
        "trees",
    },
    "trackers": {"experiment", "results", "running"},
    "testing": {"methods", "neurons", "results", "seeds", "trees", "warmup"},
    "studies": {
        "build",
        "configs",
        "data",
        "engines",
        "experiment",
        "outside",
        "report",
        "results",
        "running",
        "seeds",
        "tasks",
        "tables",
        "warmup",
    },
    "flower": {
        "build",
        "data",
        "engines",
        "experiment",
        "methods",
        "neurons",
        "outside",
        "results",
        "running",
        "seeds",
        "server",
        "tables",
        "tasks",
        "torch_private",
        "trees",
        "warmup",
    },
    "cli": {
        "build",
        "compose",
        "configs",
        "keys",
        "data",
        "experiment",
        "flower",
        "models",
        "ranks",
        "report",
        "results",
        "running",
        "studies",
        "tasks",
        "trackers",
    },
    "__init__": {
        "compose",
        "data",
        "experiment",
        "loading",
        "methods",
        "neurons",
        "result",
        "running",
        "tasks",
        "warmup",
    },
    "__main__": {"cli"},
}

LIGHT = {
    "errors": {"pydantic"},
    "outside": {"fedpews", "pydantic"},
    "seeds": {"torch"},
    "user_code": set(),
    "trees": {"torch"},
}
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
            # a name that is imported may be a module itself
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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


def test_rooms_are_listed_so_that_none_imports_a_later_one() -> None:
    order = list(ROOMS)
    late = {
        (room, other) for room in order for other in ROOMS[room] if order.index(other) > order.index(room)
    }
    assert not late


def test_no_two_modules_import_each_other() -> None:
    """Nor any longer ring of modules; what is imported inside a function counts too."""
    names = {_module(path): path for path in files()}
    graph = {
        name: {_home(other, names) for other in imports(path)} & names.keys() for name, path in names.items()
    }
    for name, others in graph.items():
        # a package's own __init__ only hands out names
        graph[name] = {other for other in others if names[other].name != "__init__.py" and other != name}
    ordered: list[str] = []
    while len(ordered) < len(graph):
        ready = [name for name in graph if name not in ordered and graph[name] <= set(ordered)]
        assert ready, f"a ring among {sorted(graph.keys() - set(ordered))}"
        ordered += ready


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _home(name: str, known: Mapping[str, Path]) -> str:
    """The module that an imported name is in."""
    return name if name in known else name.rpartition(".")[0]


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    assert not [path for path in files() if len(path.read_text().splitlines()) > 400]


def test_flower_is_imported_only_by_its_room() -> None:
    users = {path for path in files() if any(name.split(".")[0] == "flwr" for name in imports(path))}
    assert all(path.is_relative_to(PACKAGE / "flower") for path in users)


def test_only_one_function_uses_torchs_global_generator() -> None:
    """Which all threads share: that function has the lock."""
    used = re.compile(r"fork_rng|rng_state|torch\.(manual_)?seed\(")
    assert [path.name for path in files() if used.search(path.read_text())] == ["seeds.py"]
