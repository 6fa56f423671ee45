"""The page of a federation's statistics, and its advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from page_runs import HOSTILE

from command_line import fedpews
from fedpews.data.federation import from_clients
from fedpews.data.statistics import Privacy, Statistics, gather
from fedpews.report.statistics import advise, document, input_distances, label_distances, write_page

WHEN_NOT = Path(__file__).parents[2] / "docs" / "how-to" / "when-not.md"


def sites(labels: list[list[int]], shift: float = 0.0, names: tuple[str, ...] = ()) -> Statistics:
    """A site for each list of labels; the inputs of each site are further away."""
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(len(y), 2, generator=generator) + shift * number, torch.tensor(y))
        for number, y in enumerate(labels)
    ]
    return gather(from_clients(clients, clients[0], 4, client_names=names), Privacy())


DISJOINT = [[0] * 200 + [1] * 200, [2] * 200 + [3] * 200]
ALIKE = [[0, 1, 2, 3] * 100, [0, 1, 2, 3] * 90]
PARTLY = [[0] * 300 + [1] * 100, [0] * 100 + [1] * 300]


@pytest.mark.parametrize(
    ("statistics", "words"),
    [
        (sites(DISJOINT), "Label sets are disjoint: a warmup is worth trying."),
        (sites(ALIKE), "Alike: plain FedAvg."),
        (sites(ALIKE, shift=3), "Labels are alike and inputs differ"),
        (sites(PARTLY), "Sites share classes in unequal parts (0.50 to 0.50 apart)"),
        (sites([[0, 1] * 10] * 60), "60 sites: start with plain FedAvg."),
        (sites([[0, 1] * 10]), "One site: there is nothing to compare."),
    ],
)
def test_the_advice_follows_from_the_distances(statistics: Statistics, words: str) -> None:
    assert advise(statistics)[0].startswith(words)


def test_the_numbers_of_the_advice_are_those_of_the_measured_rules() -> None:
    rules = " ".join(WHEN_NOT.read_text().split())
    for number in ("61 ± 5 %", "90 ± 7 %", "89 ± 7 %", "97 ± 4 %", "97 ± 5 %"):
        assert number in rules
        assert f"{number.partition(' ')[0]} %" in advise(sites(DISJOINT))[1]


def test_distances_are_0_between_equal_and_1_between_disjoint_sites() -> None:
    assert label_distances(sites(DISJOINT)) == [[0, 1], [1, 0]]
    # ½ (|0.75 − 0.25| + |0.25 − 0.75|)
    assert label_distances(sites(PARTLY)) == [[0, 0.5], [0.5, 0]]
    near, far = input_distances(sites(ALIKE)), input_distances(sites(ALIKE, shift=8))
    assert near is not None
    assert far is not None
    assert near[0][1] < 0.2 < 0.95 < far[0][1]


def test_the_document_of_the_page_has_no_suppressed_number(tmp_path: Path) -> None:
    labels = [[0] * 100 + [1] * 3 + [2] * 9, [2] * 112]
    shown = document(sites(labels))
    assert shown["sites"][0]["classes"] == [100, None, None, 0]
    json.dumps(shown, allow_nan=False)


def test_the_edges_of_all_features_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics, computed = sites(ALIKE), []
    edges = statistics.edges
    monkeypatch.setattr(Statistics, "edges", property(lambda _: computed.append(1) or edges))

    assert [feature["edges"] for feature in document(statistics)["features"]] == edges
    assert len(computed) == 1


def test_the_command_prints_tables_and_advice_and_writes_the_page(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        '[data]\nname = "synthetic-3.2k"\npartition = "parity"\ntrain_per_class = 40\ntest_per_class = 5\n'
    )
    page = tmp_path / "page.html"
    ended = fedpews("stats", str(tmp_path / "my.toml"), "--out", str(page))
    assert ended.code == 0
    assert "Label sets are disjoint: a warmup is worth trying." in ended.stdout
    assert "bytes sent" in ended.stdout
    assert "Content-Security-Policy" in page.read_text()


def test_names_from_outside_stay_text_on_the_page(browser: Any, tmp_path: Path) -> None:
    path = write_page(sites(DISJOINT, names=(HOSTILE, "{{ data }}")), tmp_path / "page.html")
    wrong: list[str] = []
    page = browser.new_page(reduced_motion="reduce")
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.goto(path.as_uri())
    page.wait_for_selector("#feature-charts svg path")
    assert page.locator("#class-view tbody tr").count() == 4
    assert page.locator("#distance-view table").count() == 2
    assert page.locator("#numbers").inner_text().count(HOSTILE) == 1
    page.locator("#theme").click()
    page.wait_for_selector("#feature-charts svg path")
    page.close()
    assert wrong == []
