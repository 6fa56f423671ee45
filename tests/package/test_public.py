"""The public face: names, speed of import, docstring examples."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import fedpews

MODULES = [
    module.name
    for module in pkgutil.walk_packages(fedpews.__path__, "fedpews.")
    if ".flower" not in module.name
]


def test_public_names_are_sorted_and_unique() -> None:
    order = sorted(fedpews.__all__, key=lambda name: (not name[0].isupper(), name))
    assert list(fedpews.__all__) == order
    assert len(set(fedpews.__all__)) == len(fedpews.__all__)


@pytest.mark.parametrize("name", fedpews.__all__)
def test_a_public_name_exists_and_is_documented(name: str) -> None:
    assert getattr(fedpews, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Fedavg'"):
        fedpews.Fedavg  # noqa: B018


@pytest.mark.parametrize("module", ["fedpews", "fedpews.cli", "fedpews.experiment"])
def test_importing_the_surface_imports_nothing_heavy(module: str) -> None:
    heavy = ("torch", "flwr", "matplotlib", "dask", "distributed", "optuna")
    code = f"import {module}, sys; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_are_true(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed
