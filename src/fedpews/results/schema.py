"""What the files of a run's folder look like: the schema that everything read from a folder must fit.

A folder may come from another person, or from a disk that lost some of it. Keys that are not named here are not
checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from fedpews.errors import ConfigError
from fedpews.outside import MOST_TOML, json_lines, parse_json, parse_toml, shaped
from fedpews.results.files import MOST_TEXT, read_verified

GIVEN = "given in Python"
"""The name, in a configuration, of a model and of data that ``fedpews.run`` was given."""

Whole = Annotated[int, Field(ge=0, le=2**53)]
"""As large as JSON keeps exactly."""
Seed = Annotated[int, Field(ge=0, le=2**64)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e300, le=1e300)]
Values = dict[str, Number | None]


class RecordShape(TypedDict, total=False):
    """A line of rounds.jsonl."""

    seed: Required[Seed]
    round: Required[Annotated[int, Field(ge=1, le=2**53)]]
    phase: Required[str]
    bytes_up: Required[Whole]
    bytes_down: Required[Whole]
    seconds: Required[Number]
    accuracy: Number | None
    personal_accuracy: Number | None
    dead: Whole
    metrics: Values
    validation: Values
    client_accuracy: list[Number | None]
    client_density: list[Number | None]
    client_metrics: dict[str, list[Number | None]]


class Spread(TypedDict):
    """A number over seeds."""

    mean: Number | None
    std: Number | None
    by_seed: list[Number | None]


class Reach(Spread):
    reached: Whole


class Totals(TypedDict):
    bytes_up: Whole
    bytes_down: Whole
    seconds: Number


Machines = Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=100)]


class SummaryShape(TypedDict, total=False):
    """summary.json."""

    method: Required[str]
    seeds: Required[list[Seed]]
    rounds: Required[Whole]
    rounds_to_target: Required[Reach]
    totals: Required[Totals]
    target_metric: Required[str]
    target: Required[Number | None]
    final: Required[dict[str, Spread]]
    machines: Machines


class NamedShape(TypedDict):
    name: str


class TaskShape(TypedDict, total=False):
    name: str
    metrics: list[str]


class ConfigShape(TypedDict, total=False):
    """config.toml, as far as results are read by it; what decides a run is checked by `Experiment`."""

    rounds: Required[Annotated[int, Field(ge=1, le=2**53)]]
    seeds: Required[Annotated[list[Seed], Field(min_length=1)]]
    method: Required[NamedShape]
    data: Required[dict[str, Any]]
    task: TaskShape
    target_metric: str
    target: Number
    target_accuracy: Number


class OwnershipShape(TypedDict, total=False):
    """A line of neurons.jsonl."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    seed: Required[Seed]
    round: Required[Whole]
    clients: Required[list[Whole]]
    neurons: Required[Annotated[int, Field(ge=0, le=10**9)]]
    owned: str
    owners: str
    theta: list[list[Whole]]


class LayerShape(TypedDict):
    name: str
    start: Whole
    size: Whole


class ModelShape(TypedDict):
    fingerprint: str
    weights: Whole
    base: str  # a digest of what is frozen; empty if nothing is


class FederationShape(TypedDict, total=False):
    """federation.json."""

    clients: Annotated[int, Field(ge=0, le=10**7)]
    client_names: list[str]
    class_names: list[str]
    counts: list[list[Whole]] | None
    layers: list[LayerShape]
    data: str
    model: ModelShape


class ActivationShape(TypedDict):
    """A line of activations.jsonl."""

    seed: Seed
    round: Whole


class SitesErrorShape(TypedDict):
    """flower-error.json: how a run across sites failed."""

    exit_code: Annotated[int, Field(ge=1, le=255)]
    message: str


class SeenShape(TypedDict):
    """What a site reported at first contact, in sites-seen.json."""

    key: str | None
    data: str
    samples: Whole
    test_samples: Whole


def read_lines(file: Path, schema: Any) -> list[Any]:
    """The whole lines of a JSON-lines file, each of a schema's shape."""
    return [shaped(schema, line, where) for where, line in json_lines(_read_text(file), str(file))]


def read_object(file: Path, schema: Any) -> Any:
    """A JSON file of a schema's shape."""
    return shaped(schema, parse_json(_read_text(file), str(file)), str(file))


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a run, whose numbers have one value for each seed."""
    summary: dict[str, Any] = read_object(path, SummaryShape)
    metric, seeds = summary["target_metric"], summary["seeds"]
    if metric not in summary["final"]:
        raise ConfigError(f"{path} is damaged: it has no final {metric}")
    for spread in (summary["final"][metric], summary["rounds_to_target"]):
        if len(spread["by_seed"]) != len(seeds) or not seeds:
            raise ConfigError(
                f"{path} is damaged: it has {len(seeds)} seeds and {len(spread['by_seed'])} values"
            )
    return summary


def read_config_file(path: Path) -> dict[str, Any]:
    """The configuration of a run, as nested tables."""
    config: dict[str, Any] = shaped(
        ConfigShape, parse_toml(_read_text(path, MOST_TOML), str(path)), str(path)
    )
    return config


def _read_text(path: Path, most: int = MOST_TEXT) -> str:
    try:
        return read_verified(path, most).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from error
