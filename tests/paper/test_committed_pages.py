"""docs/results: every page says what the runs beside it say, so that no run is added without its page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedpews.paper.cells import Runner
from fedpews.paper.page import apart_rows, number_rows
from fedpews.paper.reproduce import run_study
from fedpews.paper.study import SMALL, adapted, load_study
from fedpews.report.compare import markdown

RESULTS = Path(__file__).parents[2] / "docs" / "results"
NUMBER = re.compile(r"\d+\.\d+")
AGAIN = "stale: fedpews reproduce all --no-run --pages docs/results --out results"


def assert_alike(ours: str, committed: str) -> None:
    """The same words; numbers but for their last digit, since another processor may sum in another order."""
    assert NUMBER.sub("#", ours) == NUMBER.sub("#", committed), AGAIN
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (ours, committed)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.11), AGAIN


@pytest.mark.parametrize("name", sorted(page.stem for page in RESULTS.glob("*.json")))
def test_a_page_says_what_the_runs_beside_it_say(name: str, tmp_path: Path) -> None:
    facts = json.loads((RESULTS / f"{name}.json").read_text())
    study = adapted(load_study(name.removesuffix(SMALL)), None, {}, small=name.endswith(SMALL))
    outcome = run_study(study, Runner(tmp_path / "nothing", RESULTS / "runs"), run=False)

    page = (RESULTS / f"{name}.md").read_text()
    tables = [part.strip() for part in page.split("\n\n") if part.startswith("|")]
    both = [rows(outcome, measure) for measure in study.measures for rows in (number_rows, apart_rows)]
    measured = [markdown(rows) for rows in both if len(rows) > 1]
    for table, committed in zip(measured, tables[: len(measured)], strict=True):
        assert_alike(table, committed)
    assert len(facts["verdicts"]) == len(outcome.verdicts), AGAIN
    for verdict, written in zip(outcome.verdicts, facts["verdicts"], strict=True):
        expected = (written["claim"], written["where"], written["agrees"])
        assert (verdict.claim, verdict.where, verdict.agrees) == expected
        assert_alike(f"{verdict.ours} {verdict.finding}", f"{written['ours']} {written['finding']}")


SPREAD = re.compile(r"(\d+(?:\.\d+)?) ± (\d+(?:\.\d+)?)")


def is_rounded(value: str, text: str) -> bool:
    """Whether the text is the value, rounded to its own digits."""
    return abs(float(value) - float(text)) <= 0.501 * 10 ** -len(text.partition(".")[2])


@pytest.mark.parametrize("notes", sorted(page.name for page in RESULTS.glob("*.notes.md")))
def test_a_mean_with_its_deviation_in_the_notes_is_in_a_table(notes: str) -> None:
    pages = [page.read_text() for page in RESULTS.glob("*.md") if not page.name.endswith(".notes.md")]
    rows = "\n".join(line for page in pages for line in page.splitlines() if line.startswith("|"))
    measured = SPREAD.findall(rows)
    for sentence in re.split(r"(?<=[.:;]) ", (RESULTS / notes).read_text().replace("\n", " ")):
        if "benchmarks/" in sentence:  # measured by a script whose output is not kept
            continue
        for mean, deviation in SPREAD.findall(sentence):
            same = [is_rounded(a, mean) and is_rounded(b, deviation) for a, b in measured]
            assert any(same), f"{mean} ± {deviation} is in no table"
