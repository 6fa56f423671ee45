"""The one aggregation core, by hand."""

from __future__ import annotations

import pytest
import torch

from fedpews.methods.average import BLOCK, Average, add_blocks


def test_each_element_is_averaged_over_its_owners_by_their_weights() -> None:
    masks = ({"w": torch.tensor([True, True, False])}, {"w": torch.tensor([True, False, False])})
    average = Average((1.0, 3.0), masks)
    values = [{"w": torch.tensor([1.0, 2.0, 9.0])}, {"w": torch.tensor([5.0, 9.0, 9.0])}]
    # (1·1 + 3·5)/4, client 0 alone, nobody
    assert average(values, {"w": torch.tensor([7.0, 7.0, 7.0])})["w"].tolist() == [4.0, 2.0, 7.0]
    assert average.covered({"w": torch.zeros(3)})["w"].tolist() == [True, True, False]


def test_what_is_not_owned_cannot_leak_in_even_if_it_is_not_a_number() -> None:
    average = Average((1.0, 1.0), ({"w": torch.tensor([False])}, None))
    values = [{"w": torch.tensor([float("nan")])}, {"w": torch.tensor([2.0])}]
    assert average(values, {"w": torch.zeros(1)})["w"].tolist() == [2.0]


def test_a_name_the_mask_lacks_is_owned_whole() -> None:
    average = Average((1.0, 1.0), ({"w": torch.tensor([False])}, {"w": torch.tensor([False])}))
    values = [{"w": torch.ones(1), "b": torch.tensor([1.0])}, {"w": torch.ones(1), "b": torch.tensor([2.0])}]
    result = average(values, {"w": torch.tensor([5.0]), "b": torch.zeros(1)})
    assert result["w"].tolist() == [5.0]
    assert result["b"].tolist() == [1.5]


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2, 2)])
def test_masks_that_broadcast_are_enough(shape: tuple[int, ...]) -> None:
    rows = torch.tensor([True, False, True, False]).view(4, *[1] * (len(shape) - 1))
    result = Average((1.0,), ({"w": rows},))([{"w": torch.ones(shape)}], {"w": torch.zeros(shape)})
    assert torch.equal(result["w"], rows.float().expand(shape))


def uploads(clients: int, shape: tuple[int, ...] = (7, 3)) -> tuple[list[dict[str, torch.Tensor]], Average]:
    """Random values, masks and weights of so many clients."""
    generator = torch.Generator().manual_seed(clients)
    values = [{"w": torch.randn(shape, generator=generator)} for _ in range(clients)]
    masks = tuple({"w": torch.rand(shape, generator=generator) < 0.6} for _ in range(clients))
    return values, Average(tuple(float(i % 5 + 1) for i in range(clients)), masks)


@pytest.mark.parametrize("clients", [1, 2, 5, BLOCK])
@pytest.mark.parametrize("shape", [(1,), (5,), (7, 3), (4, 3, 2, 2)])
def test_a_block_of_clients_is_summed_as_it_always_was(clients: int, shape: tuple[int, ...]) -> None:
    """Published numbers stay what they are to the bit: one sum over stacked p·m·y, one over stacked p·m."""
    values, average = uploads(clients, shape)
    shares = torch.stack(
        [p * m["w"].float() for p, m in zip(average.weights, average.masks, strict=True) if m is not None]
    )
    parts = torch.where(shares > 0, shares * torch.stack([value["w"] for value in values]), 0.0)
    old, total = torch.full(shape, 9.0), shares.sum(0)
    expected = torch.where(total > 0, parts.sum(0) / total.clamp_min(torch.finfo(total.dtype).tiny), old)
    assert torch.equal(average(values, {"w": old})["w"], expected)


@pytest.mark.parametrize("clients", [BLOCK + 1, 3 * BLOCK, BLOCK * BLOCK + 5])
def test_many_clients_are_summed_block_by_block_to_the_bit(clients: int) -> None:
    values, average = uploads(clients)
    shares = torch.stack(
        [p * m["w"].float() for p, m in zip(average.weights, average.masks, strict=True) if m is not None]
    )
    weighted = shares * torch.stack([value["w"] for value in values])
    sums, totals = (
        add_blocks([block.sum(0) for block in numbers.split(BLOCK)]) for numbers in (weighted, shares)
    )
    assert torch.equal(average(values, {"w": torch.zeros(7, 3)})["w"], sums / totals)


def test_many_clients_average_to_what_exact_sums_give() -> None:
    values, average = uploads(500)
    shares = torch.stack([p * m["w"].double() for p, m in zip(average.weights, average.masks, strict=True)])
    exact = (shares * torch.stack([value["w"] for value in values]).double()).sum(0) / shares.sum(0)
    found = average(values, {"w": torch.zeros(7, 3)})["w"].double()
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)


def test_sums_of_blocks_are_added_in_their_order() -> None:
    # 1 + 1e8 − 1e8 is 0 in single precision, 1e8 − 1e8 + 1 is 1
    sums = [torch.tensor(value) for value in (1.0, 1e8, -1e8)]
    assert float(add_blocks(sums)) == 0.0
    assert float(add_blocks(sums[::-1])) == 1.0
