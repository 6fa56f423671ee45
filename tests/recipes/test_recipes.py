"""Every recipe that ships, found on disk, does what its header says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedpews
from fedpews.config import override, recipes
from fedpews.experiment import Experiment
from fedpews.paper.cells import Runner
from fedpews.paper.claims import conclude
from fedpews.paper.measures import MEASURES, printed
from fedpews.paper.page import write_page
from fedpews.paper.study import adapted, cells, load_study, studies
from fedpews.running import run

PACKAGE = Path(fedpews.__file__).parent
PLAIN = sorted(path.stem for path in (PACKAGE / "recipes").glob("*.toml"))
STUDIES = sorted(path.stem for path in (PACKAGE / "paper" / "studies").glob("*.toml"))


def tiny(experiment: Experiment) -> dict[str, Any]:
    """What makes an experiment a matter of a second and leaves its kind as it is."""
    small = {"mlp": [8, 8], "cnn": [4, 4, 4]}[experiment.model.name]
    per_class = 10 if (experiment.data.clients or 0) >= 10 and "100" not in experiment.data.name else 2
    changes = {
        "rounds": 2,
        "seeds": [0],
        "train.lr_milestones": [1],
        "train.steps": 1,
        "data.train_per_class": 1 if "100" in experiment.data.name else per_class,
        "data.test_per_class": 1,
        "model.hidden": small,
        "runtime.engine": "eager",
    }
    return changes if experiment.warmup_kind == "none" else changes | {"warmup.rounds": 1}


def test_a_recipe_is_found_by_the_name_of_its_file() -> None:
    assert sorted(recipes()) == PLAIN
    assert sorted(studies()) == STUDIES


@pytest.mark.parametrize(
    ("verb", "name"), [*(("run", name) for name in PLAIN), *(("reproduce", name) for name in STUDIES)]
)
def test_a_recipe_begins_with_its_command_and_what_it_is(verb: str, name: str) -> None:
    folder = PACKAGE / ("recipes" if verb == "run" else "paper/studies")
    lines = (folder / f"{name}.toml").read_text().splitlines()

    assert lines[0] == f"# fedpews {verb} {name}"
    assert lines[1].startswith("# ")
    assert lines[1].endswith(".")
    if verb == "reproduce":
        assert lines[2].startswith("# Expected time: ")


@pytest.mark.parametrize("name", PLAIN)
def test_a_recipe_runs_a_tiny_round(name: str, images: Path) -> None:
    experiment = Experiment.load(name)

    result = run(Experiment.load(name, tiny(experiment)), data_dir=images)

    assert [record["phase"] for record in result.rounds] == ["warmup", "train"]


# lora needs peft and a base: tests/paper/test_lora_study.py
@pytest.mark.parametrize("name", [name for name in STUDIES if name != "lora"])
def test_a_study_runs_a_tiny_round_and_writes_its_page(name: str, images: Path, tmp_path: Path) -> None:
    study = adapted(load_study(name), [0], {})
    chosen = {}
    for cell in cells(study):  # the first cell of every method
        chosen.setdefault(cell.experiment.method_label, cell)

    small = [
        replace(cell, experiment=Experiment(**override(cell.experiment.to_dict(), tiny(cell.experiment))))
        for cell in chosen.values()
    ]
    found = [Runner(tmp_path, data_dir=images).run(cell) for cell in small]

    assert [(one.status, one.message) for one in found] == [("done", "")] * len(found)
    page = write_page(conclude(study, found), tmp_path)
    assert study.title in page.read_text()
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_of_a_study_is_a_valid_experiment_of_its_own(name: str) -> None:
    names = [cell.name for cell in cells(load_study(name))]

    assert len(set(names)) == len(names) > 0


@pytest.mark.parametrize("name", STUDIES)
def test_the_papers_numbers_are_numbers(name: str) -> None:
    study = load_study(name)

    numbers = [n for table in study.paper.values() for row in table.values() for n in row]

    # a row that the paper does not have leaves its place empty
    assert all(printed(number)[0] > 0 for number in numbers if number)
    assert set(study.measures) <= set(MEASURES)


def test_the_heat_map_holds_the_papers_best_cells() -> None:
    study = load_study("heatmap-cifar-mnist")

    assert study.paper_number("final", "fedavg", "t00") == "71.23 ± 0.71"
    assert study.paper_number("final", "l5", "t04") == "75.22 ± 0.33"
    assert study.paper_number("final", "l1000", "t08") == "72.52 ± 1.92"
    assert study.paper_number("final", "fixed", "t06") == "72.51 ± 3.89"


def test_wall_clock_needs_no_run_beyond_table_1() -> None:
    clock, table1 = ({cell.name for cell in cells(load_study(name))} for name in ("wall-clock", "table1"))

    assert clock < table1


def test_a_study_cannot_be_run_as_an_experiment() -> None:
    with pytest.raises(fedpews.ConfigError, match="fedpews reproduce table1"):
        Experiment.load("paper/table1")
