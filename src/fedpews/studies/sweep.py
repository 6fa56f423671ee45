"""A grid over any keys of a configuration: a study made on the spot, without the paper."""

from __future__ import annotations

import itertools
import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpews.errors import ConfigError
from fedpews.experiment import Experiment, known_keys
from fedpews.studies.study import Figure, Line, Study

Grid = Mapping[str, Sequence[Any]]


def parse_grid(text: str) -> tuple[str, list[Any]]:
    """``key=value,value,...`` from the command line.

    >>> parse_grid("warmup.diversity=0.1,1,5"), parse_grid("method.name=fedavg,fedavg+pews")
    (('warmup.diversity', [0.1, 1, 5]), ('method.name', ['fedavg', 'fedavg+pews']))
    """
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ConfigError(
            f"--grid {text!r}: give it as key=value,value, for instance --grid train.lr=0.01,0.1"
        )
    try:
        parsed = tomllib.loads(f"values = [{values}]")["values"]
    except tomllib.TOMLDecodeError:
        parsed = [value.strip() for value in values.split(",")]
    return key.strip(), parsed


def make_sweep(config: str, grid: Grid, seeds: Sequence[int] | None = None) -> Study:
    """The last key across, all combinations of the others down."""
    if not grid:
        names = ", ".join(list(known_keys())[:3])
        raise ConfigError(f"a sweep needs at least one --grid key=value,value; keys are {names}, ...")
    *down, across = grid
    rows = {
        ", ".join(f"{key} = {value}" for key, value in zip(down, values, strict=True)) or "all": Line(
            set=dict(zip(down, values, strict=True))
        )
        for values in itertools.product(*(grid[key] for key in down))
    }
    columns = {f"{across} = {value}": Line(set={across: value}) for value in grid[across]}
    base = Experiment.load(config)
    metric = base.goal.metric
    # a sweep chooses, so it looks at validation data where there is any
    chosen = f"validation:{metric}" if base.data.validation else "final"
    if chosen == "final" and metric != "accuracy":
        chosen = f"final:{metric}"
    name = Path(config).stem if config.endswith(".toml") else config.replace("/", "-")
    return Study(
        name=f"sweep-{name}",
        item="Sweep",
        title=f"{' × '.join(grid)} on {name}",
        base=config,
        seeds=list(seeds) if seeds else base.seeds,
        measures=[chosen, "rounds"],
        rows=rows,
        columns=columns,
        figures=[Figure(kind="heatmap", options={"measure": chosen})],
        command=_command(config, grid, seeds),
    )


def _command(config: str, grid: Grid, seeds: Sequence[int] | None) -> str:
    """What makes the sweep again.

    >>> _command("synthetic-32k", {"warmup.diversity": [0.1, 5], "method.name": ["fedavg"]}, [0, 1])
    'fedpews sweep synthetic-32k --grid warmup.diversity=0.1,5 --grid method.name=fedavg --seeds 0,1'
    """

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    keys = [f"--grid {shlex.quote(f'{key}=' + ','.join(map(text, values)))}" for key, values in grid.items()]
    chosen = [f"--seeds {','.join(map(str, seeds))}"] if seeds else []
    return " ".join([f"fedpews sweep {shlex.quote(config)}", *keys, *chosen])
