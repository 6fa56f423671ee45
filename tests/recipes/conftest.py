"""Tiny images in the published layouts, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_files


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    tiny_files.write_mnist(root, per_class=10)
    tiny_files.write_cifar(root, classes=10, per_class=2)
    tiny_files.write_cifar(root, classes=100, per_class=1)
    for name in ("pathmnist", "octmnist", "tissuemnist"):
        tiny_files.write_medmnist(root, name)
    return root


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPEWS_OFFLINE", "1")
    monkeypatch.delenv("FEDPEWS_DATA", raising=False)


@pytest.fixture(autouse=True)
def _no_html(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of single runs have tests of their own, and take most of a tiny run's time."""
    monkeypatch.setattr("fedpews.report.html.write_report", lambda folders, path: path)
