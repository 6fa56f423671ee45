"""Statistics across sites: the same as in one process, and a clear line where sites do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import MessageType
from memory_grid import MemoryGrid
from test_site_data import clinic, two_sites

from fedpews.data import load
from fedpews.data.statistics import Privacy, gather
from fedpews.errors import ConfigError, RunFailed
from fedpews.flower.app import serve
from fedpews.flower.messages import Request
from fedpews.flower.site import Site
from fedpews.flower.statistics import read_statistics
from fedpews.results.records import read_rounds

SHAPE = {"input_shape": [2], "classes": 2}


def table(start: int) -> str:
    return "age,bmi,label\n" + "".join(f"{start + row},{20 + row % 7},{row % 2}\n" for row in range(20))


def clinics(tmp_path: Path, **data: Any) -> tuple[Path, dict[int, Any], list[str]]:
    folders = [clinic(tmp_path / "north", table(30)), clinic(tmp_path / "south", table(60))]
    config, nodes = two_sites(tmp_path, folders, data=data, flower=SHAPE)
    return config, nodes, folders


def in_one_process(tmp_path: Path, **options: Any) -> Any:
    for name, start in (("site-0", 30), ("site-1", 60), ("test", 30)):
        (tmp_path / "all").mkdir(exist_ok=True)
        (tmp_path / "all" / f"{name}.csv").write_text(table(start))
    return load(f"folder:{tmp_path / 'all'}", **options)


def test_statistics_across_sites_are_those_of_one_process(tmp_path: Path, grid: MemoryGrid) -> None:
    config, grid.nodes, _ = clinics(tmp_path)
    serve(config, grid, {"out": str(tmp_path / "out"), "stats": True})
    found, alone = read_statistics(tmp_path / "out"), gather(in_one_process(tmp_path), Privacy())
    assert (found.sites, found.histograms) == (alone.sites, alone.histograms)
    # on the wire there are Flower's objects around the sums
    assert all(alone.bytes_sent[name] < found.bytes_sent[name] < 4000 for name in found.sites)
    kinds = {message.metadata.message_type for message in grid.sent}
    assert kinds == {MessageType.QUERY, f"{MessageType.QUERY}.statistics"}


def test_sites_with_frozen_parameters_are_asked_for_statistics_too(tmp_path: Path, grid: MemoryGrid) -> None:
    folders = [clinic(tmp_path / "north", table(30)), clinic(tmp_path / "south", table(60))]
    config, grid.nodes = two_sites(tmp_path, folders, flower=SHAPE, train={"freeze": ["hidden.0.*"]})
    assert Site(config, {"site": 0, "data": folders[0]}).facts().base
    serve(config, grid, {"out": str(tmp_path / "out"), "stats": True})
    assert list(read_statistics(tmp_path / "out").sites) == ["site-0", "site-1"]


def test_a_site_with_other_columns_stops_the_statistics_with_who_has_what(
    tmp_path: Path, grid: MemoryGrid
) -> None:
    other = table(60).replace("bmi", "weight")
    folders = [clinic(tmp_path / "north", table(30)), clinic(tmp_path / "south", other)]
    config, grid.nodes = two_sites(tmp_path, folders, flower=SHAPE)
    with pytest.raises(ConfigError) as stopped:
        serve(config, grid, {"out": str(tmp_path / "out"), "stats": True})
    assert (
        "site-1 is refused: its table lacks bmi (number) and has weight (number) in addition; site-0 has age"
        in str(stopped.value)
    )


def test_statistics_of_too_few_sites_say_how_many_are_connected(tmp_path: Path, grid: MemoryGrid) -> None:
    config, nodes, _ = clinics(tmp_path)
    grid.nodes = {0: nodes[0]}
    with pytest.raises(RunFailed, match=r"needs at least 2 sites .*, but only 1 of 2 came"):
        serve(config, grid, {"out": str(tmp_path / "out"), "stats": True})


def test_federated_scaling_at_sites_gives_the_inputs_of_one_process(tmp_path: Path, grid: MemoryGrid) -> None:
    config, grid.nodes, folders = clinics(tmp_path, scaling="federated")
    serve(config, grid, {"out": str(tmp_path / "run")})
    assert [record["round"] for record in read_rounds(tmp_path / "run")] == [1]
    scaling = read_statistics(tmp_path / "run").scaling()
    alone = in_one_process(tmp_path, scaling="federated")
    for number, folder in enumerate(folders):
        site = Site(config, {"site": number, "data": folder}).scaled(scaling)
        assert torch.equal(site.data.x, alone.x[alone.clients[number]])


def test_a_site_does_not_train_unscaled_when_scaling_was_agreed(tmp_path: Path) -> None:
    config, _, folders = clinics(tmp_path, scaling="federated")
    site = Site(config, {"site": 0, "data": folders[0]})
    with pytest.raises(ConfigError, match="the server sent no statistics to scale by"):
        site.scaled(Request("a" * 32, 1, 0.1, ()).scaling)


def test_a_resumed_run_scales_by_the_statistics_it_began_with(tmp_path: Path, grid: MemoryGrid) -> None:
    config, grid.nodes, _ = clinics(tmp_path, scaling="federated")
    serve(config, grid, {"out": str(tmp_path / "run")})
    before = (tmp_path / "run" / "statistics.json").read_bytes()
    grid.sent.clear()
    serve(config, grid, {"out": str(tmp_path / "run"), "resume": True})
    assert not [m for m in grid.sent if m.metadata.message_type == f"{MessageType.QUERY}.statistics"]
    assert (tmp_path / "run" / "statistics.json").read_bytes() == before
