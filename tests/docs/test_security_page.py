"""SECURITY.md: every promise names tests that exist, and the limits that it quotes are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def tables(page: str) -> dict[str, list[list[str]]]:
    """The rows of every table, by its head; tables with the same head are joined."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()
        )
        found.setdefault(" | ".join(head), []).extend(rows)
    return found


def without_test(page: str, tests: set[str]) -> list[str]:
    """The promises that name no test, or one that does not exist."""
    return [
        promise
        for _, promise, named in tables(page)["who | cannot | test"]
        if not (names := set(re.findall(r"`(\w+)`", named))) or names - tests
    ]


def test_every_promise_names_tests_that_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    assert len(tables(PAGE)["who | cannot | test"]) > 30
    assert without_test(PAGE, tests) == []
    # no promise hides in a table of another form
    assert [head for head in tables(PAGE) if "cannot" in head] == ["who | cannot | test"]


def test_a_promise_without_a_test_is_found() -> None:
    page = "| who | cannot | test |\n|---|---|---|\n| a | fly | `test_wings` |\n| b | swim | – |\n"
    assert without_test(page, {"test_wings"}) == ["swim"]
    assert without_test(page, set()) == ["fly", "swim"]


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    pytest.importorskip("flwr")
    from fedpews.flower.checks import LARGEST_LOSS
    from fedpews.flower.deploy.coordinator import FLEET_PATHS
    from fedpews.flower.messages import MOST_BYTES

    found = tables(PAGE)
    sizes = {kind: text.partition(" ")[0] for kind, text in found["reply to | bytes"]}
    assert sizes == {kind: f"{most:,}" for kind, most in MOST_BYTES.items()}
    ranges = {name: (low, high) for name, low, high in found["number | from | to"]}
    largest = f"{LARGEST_LOSS:,.0f}"
    assert ranges == {
        "training loss of an upload": ("0", largest),
        "evaluation loss, mean of a sample": ("0", largest),
        "θ, and the bit of adaptive clipping": ("0", "1"),
        "personal metric that is a share": ("0", "1"),
        "personal metric of another kind": (f"-{largest}", largest),
    }
    assert sorted(set(FLEET_PATHS.values())) == ["16k", "64k", "8m"]
    assert "8 MB for a piece of an upload, 64 kB for the list of pieces, 16 kB for everything else" in PAGE
