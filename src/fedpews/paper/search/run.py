"""Run a search: trials one after the other here, or as many at once as there are workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedpews.errors import Interrupted
from fedpews.experiment import Experiment
from fedpews.report.board import Board
from fedpews.results.records import Record
from fedpews.paper.cells import MakeWatcher, read_cell, run_cell
from fedpews.paper.search.trials import Begun, Trials
from fedpews.paper.validation import Values

if TYPE_CHECKING:
    from fedpews.running import Watcher


class Hopeless(Interrupted):
    """A trial is given up: its run stays where it is, and could go on."""


def search_here(
    trials: Trials,
    root: Path,
    data_dir: Path | None,
    tell: Callable[[str], None],
    watch: MakeWatcher,
) -> None:
    """Trials one after the other in this process."""
    while (begun := trials.next()) is not None:
        tell(begun.label)
        try:
            found = run_cell(root, begun.cell, data_dir, _judging(trials, begun, watch))
        except Hopeless:
            found = read_cell(root, begun.cell)
        tell(f"  {trials.end(begun, found)}")


def _judging(trials: Trials, begun: Begun, watch: MakeWatcher) -> MakeWatcher:
    """The same watcher, which also reports every round and ends a run that is hopeless."""

    @contextmanager
    def judge(experiment: Experiment) -> Iterator[Watcher]:
        values = Values(experiment.goal.metric, experiment.seeds)
        with watch(experiment) as watcher:

            def round(records: Sequence[Record]) -> bool | None:
                answer = watcher.round(records)
                if trials.report(begun, values.add(records)):
                    raise Hopeless("given up")
                return answer

            yield replace(watcher, round=round)

    return judge


def search_on(
    address: str, trials: Trials, root: Path, data_dir: Path | None, console: Console, quiet: bool
) -> None:
    """As many trials at once as the scheduler at an address has workers."""
    from fedpews.paper.cluster.connect import Place, connect
    from fedpews.paper.cluster.grid import cores_each
    from fedpews.paper.cluster.pool import Ended, open_pool

    place = Place.parse(address)
    board = Board(console, quiet)
    with (
        connect(place) as client,
        open_pool(client, board, root, None, data_dir, cores_each(place)) as pool,
    ):
        running: dict[str, Begun] = {}
        # of trials that came to the same settings as one that runs: they end with it
        twins: dict[str, list[Begun]] = {}
        while True:
            while len(running) < max(1, pool.size) and (begun := trials.next()) is not None:
                same = next((one for one in running.values() if one.cell.name == begun.cell.name), None)
                if same is not None:
                    twins.setdefault(same.label, []).append(begun)
                    continue
                running[begun.label] = begun
                pool.send(begun.label, begun.cell)
            if not running:
                return
            news = pool.hear()
            if news.label not in running:
                continue
            one = running[news.label]
            if isinstance(news, Ended):
                del running[news.label]
                for each in (one, *twins.pop(one.label, [])):
                    each.is_hopeless = one.is_hopeless
                    board.say(f"  {trials.end(each, news.found)}")
            elif not one.is_hopeless and trials.report(one, _values(news.told)):
                pool.stop(one.label)


def _values(told: Mapping[str, Any]) -> list[tuple[int, float]]:
    return [(int(round), float(value)) for round, value in told.get("values", [])]
