"""The one aggregation core, by hand."""

from __future__ import annotations

import pytest
import torch

from fedpews.methods.average import Average


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
