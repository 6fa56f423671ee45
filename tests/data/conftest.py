"""A machine without network, cache or settings, so that no test depends on the one it runs on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def bare_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("FEDPEWS_OFFLINE", "1")
    monkeypatch.delenv("FEDPEWS_DATA", raising=False)
