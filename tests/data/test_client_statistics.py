"""Federated statistics: right numbers, bounded memory, and nothing of a single row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpews.data import load
from fedpews.data.federation import Federation, build, from_clients
from fedpews.data.inputs import Lazy
from fedpews.data.loading import data_table, hold_out_and_scale
from fedpews.data.statistics import (
    CHUNK,
    Privacy,
    Statistics,
    describe,
    gather,
    histograms,
    histograms_from_bytes,
    sums_from_bytes,
    to_bytes,
)
from fedpews.errors import ConfigError
from fedpews.tasks import Regression

OPEN = Privacy(min_count=1)


def two(columns: int = 2, rows: int = 40) -> Federation:
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(rows, columns, generator=generator) * 3 + client for client in range(2)]
    y = torch.arange(rows) % 2
    return from_clients([(draw[0], y), (draw[1], y)], (draw[0][:4], y[:4]), client_names=("north", "south"))


def test_the_pooled_mean_and_deviation_are_those_of_all_rows_together() -> None:
    data = two()
    for index, pooled in enumerate(gather(data, Privacy()).pooled()):
        assert pooled == pytest.approx(
            (float(data.x[:, index].mean()), float(data.x[:, index].std(correction=0)))
        )


def test_what_leaves_a_client_is_a_fixed_list_of_sums_whose_size_does_not_depend_on_the_rows() -> None:
    sent = {}
    for rows in (40, 4000):
        found = gather(two(rows=rows), Privacy())
        sums = json.loads(to_bytes(found.sites["north"]))
        assert list(sums) == ["samples", "shape", "classes", "features", "vocabulary"]
        assert [list(feature) for feature in sums["features"]] == [
            ["name", "mean", "squares", "values", "missing", "low", "high"]
        ] * 2
        assert (len(sums["classes"]), sums["vocabulary"]) == (2, [])
        assert [feature["values"] for feature in sums["features"]] == [1, 1]
        cells = json.loads(to_bytes(found.histograms["north"]))
        assert [len(row) for row in cells] == [len(edges) + 1 for edges in found.edges]
        assert max(map(len, cells)) <= 43
        sent[rows] = found.bytes_sent["north"]
    assert max(sent.values()) < 1000
    # a hundred times the rows, more digits in the counts
    assert sent[4000] < 1.3 * sent[40]


def test_no_value_of_any_row_is_among_what_is_sent() -> None:
    data = two()
    found = gather(data, Privacy())
    sent = to_bytes(found.sites["north"]) + to_bytes(found.histograms["north"])
    numbers = [feature.mean for feature in found.sites["north"].features]
    numbers += [edge for edges in found.edges for edge in edges]
    values = {round(float(value), 6) for value in data.x.flatten()}
    assert not values & {round(number, 6) for number in numbers if number is not None}
    assert all(str(float(value)).encode() not in sent for value in data.x.flatten())


def test_the_smallest_and_the_largest_value_of_a_client_cannot_be_read_off_the_edges() -> None:
    x = torch.randn(200, 1, generator=torch.Generator().manual_seed(1))
    far = x.clone()
    far[7] = 8.0
    both = [
        from_clients([(rows, torch.zeros(200).long())], (x[:2], torch.zeros(2).long()), 1)
        for rows in (x, far)
    ]
    plain, moved = (gather(data, Privacy()) for data in both)
    assert max(moved.edges[0]) < 8.0
    # the row itself is alone beyond the last edge, and so is suppressed
    assert moved.histograms["0"][0][-1] is None
    assert plain.sites["0"].features[0].mean is not None


def test_cells_of_fewer_samples_than_min_count_are_suppressed_and_so_is_what_would_give_them_away() -> None:
    x, y = torch.randn(50, 2), torch.tensor([0] * 30 + [1] * 18 + [2] * 2)
    data = from_clients([(x, y)], (x[:2], y[:2]), 4)
    assert describe(data, 0, OPEN).classes == [30, 18, 2, 0]
    # 50 − 30 − 18 = 2 is no secret if class 1 is shown
    assert describe(data, 0, Privacy(5)).classes == [30, None, None, 0]
    # 18 + 2 are hidden together, and are too few
    assert describe(data, 0, Privacy(21)).classes == [None, None, None, 0]


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        ([1.0] * 4 + [0.0] * 96, False),  # a rare flag: the mean would say how many have it
        ([1.0] * 5 + [0.0] * 95, True),
        ([1e9] + [float(i) for i in range(99)], False),  # one row makes the mean
        ([7.0] * 100, True),
    ],
)
def test_a_mean_that_a_few_rows_decide_is_suppressed(column: list[float], shown: bool) -> None:
    x = torch.tensor(column)[:, None]
    data = from_clients([(x, torch.zeros(100).long())], (x[:2], torch.zeros(2).long()), 1)
    feature = describe(data, 0, Privacy(5)).features[0]
    assert (feature.mean is not None, feature.squares is not None) == (shown, shown)


def test_a_cell_of_many_pixels_of_one_image_is_suppressed() -> None:
    x = torch.zeros(40, 1, 4, 4, dtype=torch.uint8)
    x[::2] = 100
    x[3] = 255  # sixteen pixels, one image
    data = from_clients([(x, torch.zeros(40).long())], (x[:2], torch.zeros(2).long()), 1)
    edges = [[-1.0, -0.5, 0.5, 1.0]]
    assert histograms(data, 0, edges, OPEN) == [[0, 304, 320, 0, 16]]
    assert histograms(data, 0, edges, Privacy(5)) == [[0, None, 320, 0, None]]


def test_noise_changes_counts_and_keeps_them_whole_and_not_negative() -> None:
    data, noisy = two(rows=400), Privacy(5, noise=20.0)
    drawn = [describe(data, 0, noisy).classes for _ in range(5)]
    assert len({tuple(row) for row in drawn}) > 1
    assert all(isinstance(cell, int) and cell >= 0 for row in drawn for cell in row)
    # 400 / 2 samples; the deviation of the mean of ten draws is 20·√2/√10 = 9
    assert abs(np.mean(drawn) - 200) < 60


class Endless(Lazy):
    """Ten million rows that are never in memory together."""

    def __init__(self, rows: int) -> None:
        self.rows, self.most = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, rows: torch.Tensor | slice) -> Any:
        if isinstance(rows, slice):
            rows = torch.arange(self.rows)[rows]
        self.most = max(self.most, len(rows))
        return torch.stack([rows % 10, rows % 4], 1).float()


def test_ten_million_rows_are_read_in_parts_that_do_not_grow_with_them() -> None:
    rows = 10**7
    x = Endless(rows)
    y = torch.zeros(1, dtype=torch.int64).expand(rows)
    data = Federation(x, y, (torch.arange(rows),), x, y[:1], 1)
    found = describe(data, 0, Privacy())
    assert x.most <= CHUNK // 2
    # 0 … 9 have mean 4.5 and variance 8.25; 0 … 3 have 1.5 and 1.25
    assert [feature.mean for feature in found.features] == pytest.approx([4.5, 1.5])
    assert [(feature.squares or 0) / rows for feature in found.features] == pytest.approx([8.25, 1.25])


def test_tokens_have_lengths_and_a_vocabulary_without_rare_words() -> None:
    x = torch.tensor([[5, 6, 0, 0], [5, 7, 8, 0]] * 5 + [[9, 9, 9, 9]] * 4)
    data = from_clients([(x, torch.zeros(14).long())], (x[:2], torch.zeros(2).long()), 1)
    found = describe(data, 0, Privacy(5))
    assert found.vocabulary == [(0, 10), (5, 10), (6, 5), (7, 5), (8, 5)]
    assert [feature.name for feature in found.features] == ["tokens"]
    assert found.features[0].mean == pytest.approx((5 * 2 + 5 * 3 + 4 * 4) / 14)


def test_several_inputs_and_regression_targets_are_features_too() -> None:
    x = {"pixels": torch.zeros(30, 2, 3, 3), "age": torch.arange(30.0)[:, None]}
    data = from_clients(
        [(x, torch.arange(30.0))],
        ({key: value[:2] for key, value in x.items()}, torch.zeros(2)),
        task=Regression(),
    )
    found = describe(data, 0, Privacy())
    assert [feature.name for feature in found.features] == [
        "input 0: channel 0",
        "input 0: channel 1",
        "input 1: column 0",
        "target",
    ]
    assert (found.classes, found.features[-1].mean) == ([], 14.5)


def test_missing_values_of_tables_are_counted_and_few_of_them_suppressed(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    lines = [f"{'' if row < 6 else row},{'' if row < 2 else row},{row % 2}" for row in range(30)]
    for name in ("north", "test"):
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,bmi,label", *lines]) + "\n")
    data = load(f"folder:{tmp_path}", missing="mean")
    assert [feature.missing for feature in describe(data, 0, Privacy(5)).features] == [6, None]


@pytest.mark.parametrize(
    "sent", [b"", b"[]", b'{"samples": -1}', b'{"samples":1e999}', to_bytes([[1, 2]]), b"[[-1]]"]
)
def test_what_is_no_sum_is_refused_in_one_line(sent: bytes) -> None:
    for read in (lambda: sums_from_bytes(sent), lambda: histograms_from_bytes(sent, [[0.0]] * 2)):
        with pytest.raises(ConfigError, match=r"its (statistics|histograms)"):
            read()


def test_a_client_with_other_features_or_classes_is_named_with_both_lists() -> None:
    one, other = describe(two(2), 0, Privacy()), describe(two(3), 0, Privacy())
    with pytest.raises(
        ConfigError, match=r"its features are column 0, .*column 2; the first client has column 0, col"
    ):
        sums_from_bytes(to_bytes(other), one)
    assert sums_from_bytes(to_bytes(one), one) == one


def test_a_client_without_rows_is_refused_by_its_name() -> None:
    data = two()
    none = Federation(
        data.x, data.y, (torch.arange(4), torch.arange(0)), data.x, data.y, 2, client_names=("a", "b")
    )
    with pytest.raises(ConfigError, match="b has no samples"):
        gather(none, Privacy())


def test_federated_scaling_gives_all_clients_together_mean_0_and_deviation_1(tmp_path: Path) -> None:
    data = two()
    for name, rows in zip(("north", "south"), data.clients, strict=True):
        np.savez(tmp_path / f"{name}.npz", x=data.x[rows], y=data.y[rows])
    np.savez(tmp_path / "test.npz", x=data.test_x, y=data.test_y)
    scaled = load(f"folder:{tmp_path}", scaling="federated")
    assert torch.allclose(scaled.x.mean(0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(scaled.x.std(0, correction=0), torch.ones(2), atol=1e-5)
    # one map for all: clients stay as different as they were
    plain = load(f"folder:{tmp_path}")
    factor = (scaled.test_x[0] - scaled.test_x[1]) / (plain.test_x[0] - plain.test_x[1])
    assert torch.allclose(factor, 1 / plain.x.std(0, correction=0), atol=1e-5)


def test_federated_scaling_of_images_is_by_channel_and_of_bytes_too() -> None:
    x = torch.randint(0, 255, (60, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(60) % 2
    made = build(x, y, [torch.arange(30), torch.arange(30, 60)], x[:4], y[:4])
    data = hold_out_and_scale(made, data_table(scaling="federated"))
    assert torch.allclose(data.x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.equal(data.x[:4], data.test_x)


def test_flags_stay_0_and_1_and_a_column_that_no_client_shows_stays_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    lines = [f"{row},{row % 2 == 0},{1 if row == 3 else 0},{row % 2}" for row in range(30)]
    for name in ("north", "test"):
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,smokes,rare,label", *lines]) + "\n")
    data = load(f"folder:{tmp_path}", scaling="federated")
    assert [column.partition(" ")[0] for column in data.columns[:3]] == ["age", "rare", "smokes"]
    assert torch.equal(data.x[:, 1:].unique(), torch.tensor([0.0, 1.0]))
    assert float(data.x[:, 0].std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_statistics_survive_a_file() -> None:
    from dataclasses import asdict

    from pydantic import TypeAdapter

    found = gather(two(), Privacy())
    assert TypeAdapter(Statistics).validate_json(json.dumps(asdict(found))) == found
