"""Messages between ranks: every value comes back to the bit."""

from __future__ import annotations

import pytest
import torch

from fedpews.methods.contract import Download, Upload
from fedpews.ranks.group import Message, pack, unpack

TYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 1, 5)], ids=str)
def test_a_tensor_of_any_type_and_shape_comes_back_as_it_was(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    sent = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    got = unpack(pack(Message("x", {"a": torch.ones(1, dtype=torch.bool), "b": {"c": sent}}), CPU))
    assert got.body["b"]["c"].dtype == dtype
    assert torch.equal(got.body["b"]["c"], sent)


def test_words_empty_dicts_and_their_order_come_back() -> None:
    body = {"loss": 0.1 + 0.2, "who": [[0, 1]], "z": {}, "a": {"m": {}}}
    got = unpack(pack(Message("x", body), CPU))
    assert (got.kind, got.body) == ("x", body)
    assert list(got.body) == ["loss", "who", "z", "a"]


def test_nan_and_minus_zero_keep_their_bits() -> None:
    sent = torch.tensor([float("nan"), -0.0, float("inf")])
    got = unpack(pack(Message("x", {"a": sent}), CPU)).body["a"]
    assert torch.equal(got.view(torch.int32), sent.view(torch.int32))


def test_a_tensor_that_occurs_twice_is_sent_once() -> None:
    big = torch.ones(10_000)
    once = pack(Message("x", {"a": big}), CPU)
    twice = pack(Message("x", {"a": big, "b": big}), CPU)
    assert twice.numel() - once.numel() < 100


def test_a_view_of_a_larger_tensor_sends_only_itself() -> None:
    part = torch.arange(10_000.0).view(100, 100)[:, 3]
    data = pack(Message("x", {"a": part}), CPU)
    assert data.numel() < 1_000
    assert torch.equal(unpack(data).body["a"], part)


def test_an_upload_and_a_download_come_back_whole() -> None:
    params = {"w": torch.randn(3, 2), "b": torch.randn(3)}
    neurons = torch.tensor([True, False])
    upload = Upload(3, 7, 20, 5, 0.1 + 0.2, params, neurons, {"w": neurons}, {"theta": {"n": torch.rand(2)}})
    again = Upload(**unpack(pack(Message("x", {"upload": upload}), CPU)).body["upload"])
    assert (again.client, again.round, again.samples, again.steps, again.loss) == (3, 7, 20, 5, 0.1 + 0.2)
    # also what the client does not own: the server's numbers are those of one process, whatever it does with them
    assert torch.equal(again.params["w"], params["w"])
    assert torch.equal(again.extra["theta"]["n"], upload.extra["theta"]["n"])
    assert again.neurons is not None
    assert again.mask is not None
    download = Download(2, "warmup", 9, params, None, {})
    got = Download(**unpack(pack(Message("x", {"download": download}), CPU)).body["download"])
    assert (got.round, got.phase, got.total, got.neurons, got.extra) == (2, "warmup", 9, None, {})
    assert torch.equal(got.params["w"], params["w"])
