"""The layers of the package: which may import which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import fedpews

PACKAGE = Path(fedpews.__file__).parent

CORE = {
    "errors", "options", "registry", "seeds", "trees", "outside", "user_code", "torch_private",
    "tasks", "neurons", "methods", "warmup", "models", "data",
}  # fmt: skip
"""The methods and what they are made of: they know nothing of configurations, folders or commands."""

SHELL = {"cli", "flower", "paper", "ranks", "trackers", "testing"}
"""What uses the library: nothing else imports it."""

LIGHT = {
    "errors": {"pydantic"},
    "outside": {"fedpews", "pydantic"},
    "registry": set(),
    "seeds": {"torch"},
    "user_code": set(),
    "trees": {"torch"},
}
"""Modules that may only use the standard library, and these."""


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide what is meant"
            # a name that is imported may be a module itself
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def users(wanted: set[str]) -> set[str]:
    """The parts of the package that import one of these, themselves aside."""
    found = {
        (part(path), name.split(".")[1])
        for path in files()
        for name in imports(path)
        if name.startswith("fedpews.")
    }
    return {user for user, used in found if used in wanted and user != used}


def test_the_core_imports_only_the_core() -> None:
    everything = {part(path) for path in files()}
    assert not users(everything - CORE) & CORE


def test_the_shell_is_imported_by_nothing_below_it() -> None:
    assert users(SHELL) <= {*SHELL, "__main__", "__init__"}


@pytest.mark.parametrize("name", LIGHT)
def test_a_light_module_stays_light(name: str) -> None:
    import sys

    used = {module.split(".")[0] for module in imports(PACKAGE / f"{name}.py")}
    assert used <= sys.stdlib_module_names | LIGHT[name] | {"__future__"}


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


def test_flower_is_imported_only_by_its_folder() -> None:
    importers = {path for path in files() if any(name.split(".")[0] == "flwr" for name in imports(path))}
    assert all(path.is_relative_to(PACKAGE / "flower") for path in importers)


def test_only_one_function_uses_torchs_global_generator() -> None:
    """Which all threads share: that function has the lock."""
    used = re.compile(r"fork_rng|rng_state|torch\.(manual_)?seed\(")
    assert [path.name for path in files() if used.search(path.read_text())] == ["seeds.py"]
