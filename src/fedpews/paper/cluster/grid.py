"""The cells of a study on the workers of a scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from fedpews.report.board import Board
from fedpews.paper.cells import Found, Job, RunCells, read_cell
from fedpews.paper.cluster.connect import Place, connect
from fedpews.paper.cluster.pool import Ended, open_pool
from fedpews.paper.reproduce import Elsewhere


@contextmanager
def on_cluster(address: str, console: Console, quiet: bool = False) -> Iterator[Elsewhere]:
    """Who runs cells at an address (see `Place.parse`), connected for as long as the block lasts."""
    place = Place.parse(address)
    with connect(place) as client:

        def elsewhere(root: Path, published: Path | None, data_dir: Path | None) -> RunCells:
            def run_cells(jobs: Sequence[Job]) -> Iterator[Found]:
                # rows of a study can be the same experiment: it is run once, and read for each of them
                alike: dict[str, list[Job]] = {}
                for job in jobs:
                    alike.setdefault(job[1].name, []).append(job)
                board = Board(console, quiet)
                with open_pool(client, board, root, published, data_dir, cores_each(place)) as pool:
                    labels = {same[0][0]: same for same in alike.values()}
                    for label, same in labels.items():
                        pool.send(label, same[0][1])
                    left = len(labels)
                    while left:
                        news = pool.hear()
                        if isinstance(news, Ended):
                            left -= 1
                            yield news.found
                            yield from (
                                read_cell(root, cell, published) for _, cell in labels[news.label][1:]
                            )

            return run_cells

        yield elsewhere


def cores_each(place: Place) -> int | None:
    """How many cores a worker may use: processes of this machine share them, others know their own."""
    from fedpews.engines.hardware import available_cores

    return max(1, available_cores() // place.processes) if place.processes else None
