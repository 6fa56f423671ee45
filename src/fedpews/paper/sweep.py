"""A grid over any keys of a configuration, as a study without the paper."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedpews.config import config_name, settings_by_method
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment, known_keys
from fedpews.outside import parse_toml
from fedpews.paper.study import SWEEP, Figure, Line, Study


@dataclass(frozen=True)
class Range:
    """All numbers from ``low`` to ``high``, for a search."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __str__(self) -> str:
        how = ":log" if self.log else "" if self.step is None else f":{self.step:g}"
        return f"{self.low:g}..{self.high:g}{how}"


Grid = Mapping[str, Sequence[Any] | Range]

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\.\.({_NUMBER})(?::(log|{_NUMBER}))?\s*")


def parse_grid(text: str) -> tuple[str, list[Any] | Range]:
    """``key=value,value,...`` or ``key=low..high`` from the command line; ``:log`` or a step may follow a range.

    >>> parse_grid("warmup.diversity=0.1,1,5"), parse_grid("method.name=fedavg,fedavg+pews")
    (('warmup.diversity', [0.1, 1, 5]), ('method.name', ['fedavg', 'fedavg+pews']))
    >>> parse_grid("warmup.rounds=10..100")
    ('warmup.rounds', Range(low=10, high=100, log=False, step=None))
    """
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ConfigError(f"--grid {text!r}: write key=value,value, for instance --grid train.lr=0.01,0.1")
    if match := _RANGE.fullmatch(values):
        return key.strip(), _range(text, *match.groups())
    try:
        parsed = parse_toml(f"values = [{values}]", f"--grid {key.strip()[:60]}")["values"]
    except ConfigError as error:
        # plain strings need no quotes; what is TOML but too large or too deep is no string
        if not isinstance(error.__cause__, tomllib.TOMLDecodeError):
            raise
        parsed = [value.strip() for value in values.split(",")]
    return key.strip(), parsed


def _range(text: str, low: str, high: str, how: str | None) -> Range:
    step = None if how == "log" else how
    whole = all(re.fullmatch(r"[+-]?\d+", number) for number in (low, high)) and (step or "1").isdecimal()
    number: Callable[[str], float] = int if whole else float
    parsed = Range(number(low), number(high), how == "log", None if step is None else number(step))
    if parsed.low >= parsed.high:
        raise ConfigError(f"--grid {text!r}: the range must begin below its end")
    if parsed.log and parsed.low <= 0:
        raise ConfigError(f"--grid {text!r}: a logarithmic range must begin above 0")
    if parsed.step is not None and parsed.step <= 0:
        raise ConfigError(f"--grid {text!r}: the step must be above 0")
    return parsed


def make_sweep(
    config: str, grid: Grid, seeds: Sequence[int] | None = None, fixed: Mapping[str, Any] | None = None
) -> Study:
    """A study with the last key across and all combinations of the others down.

    Args:
        fixed: keys that are changed in every cell.
    """
    fixed = dict(fixed or {})
    ranges = [f"{key}={given}" for key, given in grid.items() if isinstance(given, Range)]
    if ranges:
        raise ConfigError(f"--grid {ranges[0]}: a range has no list of values; search it: --search optuna")
    values = {key: list(given) for key, given in grid.items() if not isinstance(given, Range)}
    if not values:
        names = ", ".join(list(known_keys())[:3])
        raise ConfigError(f"a sweep needs at least one --grid key=value,value; keys are {names}, ...")
    *down, across = values
    methods = list(map(str, values.get("method.name", ())))
    methods = methods or [str(fixed.get("method.name") or Experiment.load(config).method.name)]
    by_method = dict(zip(methods, settings_by_method(fixed, methods), strict=True))
    same = {key: value for key, value in fixed.items() if key in by_method[methods[0]]}
    own = {name: {k: v for k, v in given.items() if k not in same} for name, given in by_method.items()}
    if "method.name" not in values:
        same |= own[methods[0]]

    def line(settings: dict[str, Any]) -> Line:
        # the options of a method belong to the line that names it
        return Line(set=own.get(settings.get("method.name", ""), {}) | settings)

    rows = {}
    for combination in itertools.product(*(values[key] for key in down)):
        settings = dict(zip(down, combination, strict=True))
        rows[", ".join(f"{key} = {value}" for key, value in settings.items()) or "all"] = line(settings)
    columns = {f"{across} = {value}": line({**same, across: value}) for value in values[across]}
    base = Experiment.load(config, same)
    metric = base.goal.metric
    final = "final" if metric == "accuracy" else f"final:{metric}"
    # settings are chosen on validation data, where there are any
    chosen = f"validation:{metric}" if base.data.validation else final
    name = config_name(config)
    return Study(
        name=f"sweep-{name}",
        item=SWEEP,
        title=f"{' × '.join(grid)} on {name}",
        base=config,
        seeds=list(seeds) if seeds else base.seeds,
        measures=[chosen, "rounds"],
        rows=rows,
        columns=columns,
        figures=[Figure(kind="heatmap", options={"measure": chosen})],
        command=command(config, grid, seeds, fixed),
    )


def command(
    config: str, grid: Grid, seeds: Sequence[int] | None, fixed: Mapping[str, Any] | None = None
) -> str:
    """The command that makes the sweep again.

    >>> command("synthetic-32k", {"warmup.diversity": [0.1, 5], "train.lr": Range(0.1, 1.0, log=True)}, [0, 1])
    'fedpews sweep synthetic-32k --grid warmup.diversity=0.1,5 --grid train.lr=0.1..1:log --seeds 0,1'
    """

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    def values(given: Sequence[Any] | Range) -> str:
        return str(given) if isinstance(given, Range) else ",".join(map(text, given))

    keys = [f"--grid {shlex.quote(f'{key}={values(given)}')}" for key, given in grid.items()]
    chosen = [f"--seeds {','.join(map(str, seeds))}"] if seeds else []
    # the runtime changes no number
    same = {key: value for key, value in (fixed or {}).items() if not key.startswith("runtime.")}
    changes = [f"--set {shlex.quote(f'{key}={text(value)}')}" for key, value in same.items()]
    return " ".join([f"fedpews sweep {shlex.quote(config)}", *keys, *chosen, *changes])
