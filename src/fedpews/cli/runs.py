"""What commands that run experiments share: the runs that a command line asks for, and how they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedpews.cli.console import out
from fedpews.cli.options import parse_seeds
from fedpews.errors import ConfigError
from fedpews.results.layout import legal_name

SHORT_NAME = 12
"""Characters of a method's name that stay on one line, however narrow the window."""


def resolve_runs(
    config: str,
    method: list[str] | None,
    rounds: int | None,
    seeds: str | None,
    folder: Path | None,
    set_: list[str] | None,
) -> list[tuple[Any, Path]]:
    """The experiments that a command line asks for, each with its folder; the options of all methods are checked."""
    from fedpews.config import parse_setting, settings_by_method
    from fedpews.experiment import Experiment

    changes: dict[str, Any] = {}
    if rounds is not None:
        changes["rounds"] = rounds
    if seeds is not None:
        changes["seeds"] = parse_seeds(seeds)
    settings = dict(parse_setting(text) for text in set_ or [])
    name = Path(config).stem if config.endswith(".toml") else config.replace("/", "-")
    named = [{"method.name": wanted} for wanted in method or []] or [{}]
    names = method or [str(settings.get("method.name") or Experiment.load(config).method.name)]
    own = settings_by_method(settings, names)
    experiments = [
        Experiment.load(config, changes | one | mine) for one, mine in zip(named, own, strict=True)
    ]
    folders = [_folder(folder, name, experiment.method_label, len(experiments)) for experiment in experiments]
    if len(set(folders)) < len(folders):
        raise ConfigError("the same method is given twice")
    _check_methods(experiments, settings)
    return list(zip(experiments, folders, strict=True))


def _check_methods(experiments: list[Any], settings: dict[str, Any]) -> None:
    """Refuse a wrong option before the first method is trained."""
    from fedpews.build import build_method

    for experiment in experiments:
        try:
            build_method(experiment)
        except ConfigError as error:
            if len(experiments) == 1:
                raise
            shared = [key for key in settings if key.startswith("method.")]
            hint = "; for one method of several write its name: --set fedprox.mu=0.1" if shared else ""
            raise ConfigError(f"--method {experiment.method_label}: {error}{hint}") from error


def show_runs(folders: list[Path]) -> None:
    """How runs did, and where they are."""
    show_table(folders)
    out.print(escape(f"results in {', '.join(str(place) for place in folders)}"), soft_wrap=True)


def show_table(folders: list[Path], plot: Path | None = None) -> None:
    """Runs side by side, and a picture of them if one is asked for."""
    from fedpews.report.compare import columns, find_runs, goal_text, remarks, table, verdicts

    runs = find_runs(folders)
    goal = runs[0].goal
    reach = "" if goal.value is None else f"rounds to reach {goal_text(goal)}; "
    target, heads = f"{reach}mean ± standard deviation over seeds", columns(runs)
    grid = Table(title=escape(target), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    rows = table(runs)
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    # in a narrow window a name is folded, and what is still too wide runs on: a number that is cut is another number
    grid.add_column(escape(heads[0]), overflow="fold", min_width=min(SHORT_NAME, widths[0]))
    for column, width in zip(heads[1:], widths[1:], strict=True):
        grid.add_column(escape(column), no_wrap=True, justify="right", min_width=width)
    for row in rows:
        grid.add_row(*map(escape, row))
    for sentence in remarks(runs):
        out.print(escape(sentence), soft_wrap=True)
    needed = min(SHORT_NAME, widths[0]) + sum(widths[1:]) + 3 * len(widths)
    Console(highlight=False, emoji=False, width=max(out.width, needed)).print(grid)
    for sentence in verdicts(runs):
        out.print(escape(sentence), soft_wrap=True)
    if plot is not None:
        from fedpews.report.figures import draw

        draw(runs, "curves", plot)
        out.print(escape(f"drawn to {plot}"), soft_wrap=True)


def _folder(given: Path | None, config: str, label: str, count: int) -> Path:
    if given is None:
        return Path("runs") / legal_name(f"{config}-{label}")
    return given if count == 1 else given / legal_name(label)
