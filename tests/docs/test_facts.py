"""Facts about the software in the README and docs that can be read off the code."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from fedpews.build import build_method
from fedpews.compose import METHODS, PERSONAL, SERVERS
from fedpews.data.catalogue import SOURCES
from fedpews.data.partition import PARTITIONS
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.options import option_types
from fedpews.registry import registered
from fedpews.tasks import make
from fedpews.tasks.names import TASKS

ROOT = Path(__file__).parents[2]
NUMBERS = dict(zip(["five", "seven", "nine", "twelve", "sixteen"], (5, 7, 9, 12, 16), strict=True))
LOCAL = {"momentum", "weight_decay", "clip_norm"}
"""Options of the local steps, which are keys of ``train``."""


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text().split())


def table(name: str, head: str) -> list[list[str]]:
    """The rows of the table that begins with this header."""
    lines = (ROOT / name).read_text().split(head, 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(
    ("file", "pattern", "count"),
    [
        ("README.md", r"(\w+) methods, five", len(METHODS)),
        ("README.md", r"22 methods, (\w+) server optimisers", len(SERVERS)),
        ("README.md", r"(\w+) partitions", len(PARTITIONS)),
        ("CHANGELOG.md", r"and (\w+) partitions", len(PARTITIONS)),
        ("CHANGELOG.md", r"your own task; (\w+) metrics", 16),
        ("README.md", r"comparison with (\w+) libraries", len(table("docs/compare.md", "| for |")) - 1),
    ],
)
def test_a_number_of_things_is_their_number(file: str, pattern: str, count: int) -> None:
    (written,) = re.findall(pattern, page(file))
    assert NUMBERS.get(written, written) in (count, str(count))


def test_the_sixteen_metrics_are_sixteen() -> None:
    metrics = {metric for name in TASKS for metric in make(name).METRICS}
    assert len(metrics) == 16


def test_the_table_of_methods_has_every_method_and_its_options() -> None:
    rows = {names(row[0])[0]: set(names(row[2])) for row in table("docs/methods.md", "name | method")}
    for name, path in registered("method").items():
        module, _, cls = path.partition(":")
        assert rows[name] == set(option_types(getattr(import_module(module), cls))) - LOCAL, name
    assert rows.keys() == METHODS.keys()


def test_the_table_of_personalised_models_is_complete() -> None:
    rows = table("docs/methods.md", "name | local parts")
    assert {names(row[0])[0] for row in rows} == PERSONAL.keys()


def test_the_first_twelve_methods_take_a_warmup_and_the_others_refuse_it() -> None:
    assert "Each of the first twelve methods can have a warmup" in page("docs/methods.md")
    methods = [names(row[0])[0] for row in table("docs/methods.md", "name | method")]
    for name in methods[:12]:
        build_method(Experiment(method={"name": f"{name}+pews"}))
    for name in methods[12:]:
        with pytest.raises(ConfigError):
            build_method(Experiment(method={"name": f"{name}+pews"}))


def test_every_method_but_fedpm_and_spafl_takes_a_server_optimiser() -> None:
    assert "Every method except FedPM and SpaFL accepts a server optimiser" in page("docs/methods.md")
    refused = set()
    for name in METHODS:
        try:
            build_method(Experiment(method={"name": f"{name}+fedadam"}))
        except ConfigError:
            refused.add(name)
    assert refused == {"fedpm", "spafl"}


def test_the_table_of_partitions_is_complete() -> None:
    rows = [names(row[0])[0] for row in table("docs/data.md", "partition |")]
    assert {*rows} == {*PARTITIONS, "flwr:NAME"}


@pytest.mark.parametrize("name", ["synthetic-32k", "mnist", "cifar10", "cifar-mnist", "path-oct-tissue"])
def test_the_table_of_data_sets_has_the_catalogues_shapes_and_classes(name: str) -> None:
    (row,) = [row for row in table("docs/data.md", "`data.name`") if name in names(row[0])]
    source = SOURCES[name]
    assert row[2] == "×".join(map(str, source.shape))
    assert row[3].split(",")[0] == str(source.classes)


@pytest.mark.parametrize(
    ("file", "sentence", "key", "value"),
    [
        ("docs/faq.md", "Every 5 rounds (`runtime.checkpoint_every`)", "runtime.checkpoint_every", 5),
        ("docs/idea.md", "cosine of 0.1 or more", "warmup.agree_at", 0.1),
        ("docs/idea.md", "less than a fifth of its steepest fall", "warmup.flat_at", 0.2),
        ("docs/methods.md", "ρ = 0.1, α = 1.5, γ = 0.2", "fedmoswa", (0.1, 1.5, 0.2)),
    ],
)
def test_a_default_is_what_the_page_says(file: str, sentence: str, key: str, value: object) -> None:
    assert sentence in page(file)
    if key == "fedmoswa":
        method = build_method(Experiment(method={"name": key}))
        assert (method.rho, method.alpha, method.gamma) == value  # type: ignore[attr-defined]
    elif key.startswith("warmup."):
        from fedpews.warmup.masks import Auto

        assert getattr(Auto(), key.removeprefix("warmup.")) == value
    else:
        head, _, last = key.partition(".")
        assert getattr(getattr(Experiment(), head), last) == value


def test_the_versions_in_the_readme_are_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, last, low, high = re.findall(
        r"Python (3\.\d+) to (3\.\d+), torch (2\.\d+) to (2\.\d+)", page("README.md")
    )[0]
    assert project["requires-python"] == f">={first}"
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert (pythons[0], pythons[-1]) == (first, last)
    (torch,) = [entry for entry in project["dependencies"] if entry.startswith("torch>")]
    assert torch == f"torch>={low},<2.{int(high.split('.')[1]) + 1}"
