"""Runs to look at, and a browser to look with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_runs import HOSTILE, federation, tiny

from fedpews.running import run


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, three seeds each, among clients with names of their own."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fedavg+pews"):
        run(tiny(method), clients=federation(), out=folder / method)
    return folder


@pytest.fixture(scope="session")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose client, method, folder and configuration are named to break a page."""
    folder = tmp_path_factory.mktemp("hostile") / "a<b>&$$"
    run(tiny(), clients=federation((HOSTILE, "$$x$$", "{{ data }}")), out=folder)
    for name in ("summary.json", "config.toml"):
        file = folder / name
        text = file.read_text().replace('"fedavg+pews"', '"<b id=bad>fed</b>{{ script }}"')
        file.write_text(text.replace('"parity"', '"<img src=x onerror=alert(2)>"'))
    # an attacker writes digests that fit
    (folder / "SHA256SUMS").unlink()
    return folder


# not for the session: tests of deployments in the same process end all processes below it
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium through Playwright; the tests say why they are skipped where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    missing = "no chromium here (apt-get install chromium)" if program is None else ""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "playwright is not installed (pip install 'fedpews[dev]')"
    if missing:
        if os.environ.get("FEDPEWS_BROWSER") == "required":
            pytest.fail(f"FEDPEWS_BROWSER=required, but {missing}")
        pytest.skip(missing)
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as tools:
        opened = tools.chromium.launch(executable_path=program, args=quiet)
        yield opened
        opened.close()
