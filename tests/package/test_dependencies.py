"""What the package imports is what pyproject.toml declares."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedpews
from fedpews import flower
from fedpews.errors import ConfigError

PACKAGE = Path(fedpews.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"PIL": "pillow", "mlflow": "mlflow-skinny"}
"""Packages that are installed under another name than they are imported by."""
FLOWER = PACKAGE / "flower"


def test_what_importing_a_module_imports_is_declared() -> None:
    core, extra = _names(PROJECT["dependencies"]), _names(PROJECT["optional-dependencies"]["flower"])
    undeclared = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in PACKAGE.rglob("*.py")
        for name in _third_party(ast.parse(path.read_text()), inside_functions=False)
        if name not in (core | extra if path.is_relative_to(FLOWER) else core)
    }
    assert not undeclared


def test_what_a_function_imports_is_declared_with_the_package_or_an_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    # dev is what the tests need: a user does not install it
    declared = _names(PROJECT["dependencies"]).union(*(_names(extras[key]) for key in extras if key != "dev"))
    undeclared = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in PACKAGE.rglob("*.py")
        for name in _third_party(ast.parse(path.read_text()), inside_functions=True)
        if name not in declared
    }
    assert not undeclared


def test_an_extra_that_a_message_tells_to_install_has_the_package_that_is_missing() -> None:
    asked = {
        (path.name, *(argument.value for argument in node.args[:2]))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "need_extra"
        if all(isinstance(argument, ast.Constant) for argument in node.args[:2])
    }
    assert asked
    extras = PROJECT["optional-dependencies"]
    wrong = {
        (file, extra, module)
        for file, extra, module in asked
        if module.replace("_", "-") not in _names(extras[extra])
    }
    assert not wrong


def _names(requirements: list[str]) -> set[str]:
    """
    >>> sorted(_names(["flwr>=1.41,<1.43", "psycopg[binary]"]))
    ['flwr', 'psycopg']
    """
    return {re.split(r"[^\w.-]", text)[0].lower().replace("_", "-") for text in requirements}


def _third_party(tree: ast.AST, inside_functions: bool) -> Iterator[str]:
    """The distributions of the packages that a module imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"fedpews"}:
            yield DISTRIBUTIONS.get(name, name).replace("_", "-")
        yield from _third_party(node, inside_functions)


def test_the_versions_of_flwr_that_are_allowed_are_those_that_the_code_supports() -> None:
    (requirement,) = (text for text in PROJECT["optional-dependencies"]["flower"] if text.startswith("flwr"))
    first, last = flower.SUPPORTED[0], flower.SUPPORTED[-1]
    major, minor = map(int, last.split("."))
    assert requirement == f"flwr>={first},<{major}.{minor + 1}"


@pytest.mark.parametrize("installed", ["1.40.0", "1.43.0", "2.0.0"])
def test_a_flwr_that_was_never_tried_is_refused_with_the_versions_that_were(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "version", lambda name: installed)
    with pytest.raises(
        ConfigError, match=f"^fedpews site needs flwr 1.41 or 1.42, and {installed} is installed: pip"
    ):
        flower.check_flwr("fedpews site")


def test_undocumented_parts_of_flwr_are_imported_in_one_file() -> None:
    documented = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
    users = {
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr"
        if node.module not in documented
    }
    assert users == {"flwr_private.py"}
