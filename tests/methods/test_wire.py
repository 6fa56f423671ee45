"""Downloads and uploads as bytes: they come back to the bit, and are as long as theory says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedpews.compose import METHODS
from fedpews.compose import method as make
from fedpews.methods.contract import Download, Method, Upload
from fedpews.methods.wire import (
    BadMessage,
    decode_download,
    decode_upload,
    encode_download,
    encode_upload,
    message_sizes,
)
from fedpews.models.networks import MLP
from fedpews.neurons.network import Network
from fedpews.testing import Playground, equal, small_clients, small_network
from fedpews.trees import Tree
from fedpews.warmup import Fixed, Learned, with_warmup

HEADER = 1500
"""What the description of a message may cost at most, whatever the size of the model."""


def upload(net: Network, **parts: object) -> Upload:
    return replace(Upload(1, 2, 3, 4, 0.5, net.initial()), **parts)


def payload(data: bytes) -> int:
    """The bytes of a message that are not its description."""
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def test_an_upload_comes_back_to_the_bit() -> None:
    net = small_network()
    sent = upload(net, extra={"control": net.initial(), "theta": {"neurons": torch.rand(8)}})
    assert equal(decode_upload(net, encode_upload(net, sent)), sent)


def test_a_loss_comes_back_to_the_bit_and_its_digits_cost_nothing() -> None:
    net = small_network()
    losses = [0.5, 1 / 3, 1e-300, 12345.678901234567]
    messages = [encode_upload(net, replace(upload(net), loss=loss)) for loss in losses]
    assert [decode_upload(net, message).loss for message in messages] == losses
    assert len({len(message) for message in messages}) == 1


def test_signs_of_zeros_infinities_and_nans_come_back_too() -> None:
    net = small_network()
    odd = {n: torch.zeros_like(v) for n, v in net.initial().items()}
    odd["0.weight"].view(-1)[:4] = torch.tensor([-0.0, float("inf"), float("nan"), 1e-45])
    back = decode_upload(net, encode_upload(net, upload(net, params=odd))).params
    for name, value in odd.items():
        assert torch.equal(value.view(torch.int32), back[name].view(torch.int32))


def test_only_owned_elements_travel_and_the_rest_arrives_as_zero() -> None:
    net = small_network()
    neurons = torch.tensor([True, False, False, False, True, True, False, False])
    data = encode_upload(net, upload(net, neurons=neurons))
    # layer 0: 1·3 + 1; layer 2: 2·1 + 2; output: 3·2 + 3; and one byte for eight neurons
    assert payload(data) == 4 * (4 + 4 + 9) + 1
    back = decode_upload(net, data)
    assert torch.equal(back.neurons, neurons)
    for name, mask in net.graph.expand(neurons).items():
        assert torch.equal(back.params[name], net.initial()[name] * mask)


def test_a_mask_of_rows_costs_a_bit_a_row_and_a_mask_of_weights_a_bit_a_weight() -> None:
    net = small_network()
    rows = {"0.weight": torch.tensor([[True], [False], [True], [True]])}
    params: Tree = {"0.weight": net.initial()["0.weight"]}
    assert payload(encode_upload(net, upload(net, params=params, mask=rows))) == 4 * 9 + 1
    single = {"0.weight": torch.arange(12).view(4, 3) % 2 == 0}
    assert payload(encode_upload(net, upload(net, params=params, mask=single))) == 4 * 6 + 2
    back = decode_upload(net, encode_upload(net, upload(net, params=params, mask=single)))
    assert torch.equal(back.mask["0.weight"], single["0.weight"])


def test_many_zeros_are_not_sent() -> None:
    net = Network(nn.Linear(100, 10), torch.zeros(1, 100))
    sparse = {"weight": torch.zeros(10, 100), "bias": torch.ones(10)}
    sparse["weight"][3, 5] = 2.0
    data = encode_download(net, Download(1, "train", 2, sparse))
    assert payload(data) == 4 * 11 + (1010 + 7) // 8
    assert torch.equal(decode_download(net, data).params["weight"], sparse["weight"])


@pytest.mark.parametrize("name", METHODS)
def test_every_message_of_every_method_comes_back(name: str) -> None:
    net = small_network()
    played = Playground(make(name), net, small_clients()).partly(3)
    for uploads, downloads in zip(played.uploads, played.downloads, strict=True):
        for sent in uploads:
            once = decode_upload(net, encode_upload(net, sent))
            assert equal(decode_upload(net, encode_upload(net, once)), once)
        for sent in downloads:
            once = decode_download(net, encode_download(net, sent))
            assert equal(decode_download(net, encode_download(net, once)), once)


MASKS = [Learned(), Learned(upload="masks"), Fixed()]
BARE = {name: make(name) for name in METHODS}
WARMED = {
    f"{name} {masks}": with_warmup(method, 1, masks)
    for name, method in BARE.items()
    if method.takes_warmup
    for masks in MASKS
}


@pytest.mark.parametrize("method", [pytest.param(value, id=name) for name, value in (BARE | WARMED).items()])
def test_a_size_is_that_of_the_tensors_that_are_not_encoded(method: Method) -> None:
    net = small_network()
    # a round of the warmup (if there is one), and two after it
    played = Playground(method, net, small_clients()).partly(3)
    for uploads, downloads in zip(played.uploads, played.downloads, strict=True):
        lengths = [payload(encode_upload(net, sent)) for sent in uploads]
        assert message_sizes(net, uploads) == lengths
        assert [message_sizes(net, [sent]) for sent in uploads] == [[length] for length in lengths]
        lengths = [payload(encode_download(net, sent)) for sent in downloads]
        assert message_sizes(net, downloads) == lengths
        assert [message_sizes(net, [sent]) for sent in downloads] == [[length] for length in lengths]


@pytest.mark.parametrize("zeros", [0, 20, 60, 61, 62, 63, 64, 200, 1000])
@pytest.mark.parametrize("owner", ["everything", "neurons", "mask"])
def test_a_size_is_exact_wherever_zeros_begin_to_pay(zeros: int, owner: str) -> None:
    net = Network(
        nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 10)), torch.zeros(2, 20)
    )
    params = {name: torch.ones_like(value) for name, value in net.initial().items()}
    params["0.weight"].view(-1)[:zeros] = 0.0
    generator = torch.Generator().manual_seed(zeros)
    parts: dict[str, object] = {"params": params}
    if owner == "neurons":
        parts["neurons"] = torch.rand(40, generator=generator) < 0.7
    elif owner == "mask":
        parts["mask"] = {
            "0.weight": torch.rand(40, 1, generator=generator) < 0.7,
            "3.weight": torch.rand(10, 40, generator=generator) < 0.5,
        }
    extra = {"control": params, "theta": {"neurons": torch.rand(40)}, "é": {'q"': torch.ones(2, 3).T}}
    sent = upload(net, **parts, extra=extra)
    assert message_sizes(net, [sent]) == [payload(encode_upload(net, sent))]
    # beside others with other parts
    others = [sent, upload(net, params=net.initial()), upload(net, params=net.initial(), extra=extra), sent]
    assert message_sizes(net, others) == [payload(encode_upload(net, other)) for other in others]
    assert message_sizes(net, [sent, sent]) == [payload(encode_upload(net, sent))] * 2
    got = Download(123, "warmup", 10_000, params, sent.neurons, extra)
    assert message_sizes(net, [got]) == [payload(encode_download(net, got))]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
def test_a_size_is_exact_for_any_type_of_number(dtype: torch.dtype) -> None:
    net = small_network()
    extra = {"mixed": {"odd": torch.ones(3, 5).to(dtype), "single": torch.tensor(1.0), "more": torch.ones(1)}}
    sent = upload(net, extra=extra)
    assert message_sizes(net, [sent]) == [payload(encode_upload(net, sent))]
    signs = {name: value > 0 for name, value in net.initial().items()}
    sent = upload(net, params=signs | {"0.bias": net.initial()["0.bias"]}, neurons=torch.arange(8) % 3 > 0)
    assert message_sizes(net, [sent]) == [payload(encode_upload(net, sent))]


def sizes(method: object, total: int = 2, filled: bool = False) -> tuple[float, float]:
    """Bytes of an upload and a download in round 2, of the paper's network with its 14,884 parameters.

    ``filled``: with the zeros that happen to be in them (dead units) made ones, since zeros are not sent.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Network(MLP(), torch.zeros(1, 5))
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(8, 5, generator=generator), torch.arange(8) % 4) for _ in range(total)]
    played = Playground(method, net, clients, lr=0.01).play(2)  # type: ignore[arg-type]
    up, down = played.uploads[1][0], played.downloads[1][0]
    if filled:
        up, down = (
            replace(m, params=_fill(m.params), extra={k: _fill(t) for k, t in m.extra.items()})
            for m in (up, down)
        )
    return len(encode_upload(net, up)), len(encode_download(net, down))


def _fill(tree: Tree) -> Tree:
    return {
        n: v if v.dtype == torch.bool else torch.where(v == 0, torch.ones_like(v), v) for n, v in tree.items()
    }


P = 5 * 32 + 32 + 32 * 64 + 64 + 64 * 128 + 128 + 128 * 32 + 32 + 32 * 4 + 4  # parameters
W = P - 32 - 64 - 128 - 32 - 4  # weights alone
HALF = (
    5 * 16 + 16 + 16 * 32 + 32 + 32 * 64 + 64 + 64 * 16 + 16 + 16 * 4 + 4
)  # of the network of half the width
NEURONS = 256


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("fedavg", 4 * P, 4 * P),
        ("fedprox", 4 * P, 4 * P),
        ("scaffold", 8 * P, 8 * P),  # a control variate beside every parameter
        ("fednova", 4 * P + 4, 4 * P),
        ("moon", 4 * P, 4 * P),
        ("ist", 4 * HALF + NEURONS / 8, 4 * HALF + NEURONS / 8),
        ("fedpm", P / 8, 4 * P + 8),  # one bit a weight up; logits and a seed down
        ("fjord", 4 * P + NEURONS / 8, 4 * P + NEURONS / 8),  # client 0 has tier 1
        ("heterofl", 4 * P + NEURONS / 8, 4 * P + NEURONS / 8 + 4),
        ("fedrolex", 4 * P + NEURONS / 8, 4 * P + NEURONS / 8 + 4),
    ],
)
def test_sizes_are_what_theory_says(name: str, up: float, down: float) -> None:
    sent, got = sizes(make(name), filled=True)
    assert up <= sent <= up + HEADER
    assert down <= got <= down + HEADER


def test_a_narrow_client_sends_and_gets_its_own_width() -> None:
    for method in (
        make("heterofl", widths=[0.5]),
        make("fedrolex", widths=[0.5]),
        make("fjord", tiers=[0.5]),
    ):
        sent, got = sizes(method)
        assert 4 * HALF <= sent <= 4 * HALF + NEURONS / 8 + HEADER
        assert 4 * HALF <= got <= 4 * HALF + NEURONS / 8 + HEADER


def test_lotteryfl_sends_what_is_left_of_its_weights() -> None:
    sent, _ = sizes(make("lotteryfl", accuracy=0.0, prune=0.4))  # pruned in both rounds: .6·.6 of each layer
    assert sent == pytest.approx(4 * (0.36 * W + P - W) + W / 8, abs=HEADER)
    _, got = sizes(make("lotteryfl", accuracy=0.0, prune=0.4))  # after one pruning, as a sparse download
    assert got == pytest.approx(4 * (0.6 * W + P - W) + P / 8, abs=HEADER)


def test_fedweit_sends_seven_tenths_of_its_rows_and_everybodys_own_part() -> None:
    sent, got = sizes(make("fedweit", sparsity=10.0), total=3)  # so large a λ₁ that nothing of A is sent
    assert sent == pytest.approx(4 * 0.7 * W + W / 8, abs=HEADER + 4 * 100)
    assert got == pytest.approx(4 * W + 2 * W / 8, abs=HEADER)


def test_the_warmup_sends_the_owned_half_and_the_preferences() -> None:
    fixed = sizes(with_warmup(make("fedavg"), 5, Fixed()))
    assert fixed == pytest.approx((4 * HALF + NEURONS / 8,) * 2, abs=HEADER)
    sent, got = sizes(with_warmup(make("fedavg"), 5, Learned()))
    assert got == pytest.approx(4 * P + 4 * NEURONS, abs=HEADER)
    assert 4 * 0.1 * P < sent - 4 * NEURONS - NEURONS / 8 < 4 * 0.5 * P  # a random half: about a quarter
    assert sizes(with_warmup(make("fedavg"), 5, Learned(upload="masks")))[0] == pytest.approx(
        sent - 4 * NEURONS, abs=400
    )


@pytest.mark.parametrize(
    "data",
    [b"", b"nonsense", b"\xff" * 40, (10**18).to_bytes(8, "little") + b"{}", b"\x02" + b"\0" * 7 + b"{}"],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_upload(small_network(), data)


def test_a_message_of_another_model_is_refused() -> None:
    other = Network(nn.Linear(3, 3), torch.zeros(1, 3))
    with pytest.raises(BadMessage, match="does not fit"):
        decode_upload(small_network(), encode_upload(other, upload(other)))


def test_a_shortened_message_is_refused() -> None:
    net = small_network()
    from safetensors.torch import load, save

    data = encode_upload(net, upload(net))
    tensors = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    with pytest.raises(BadMessage, match=r"where .* are expected"):
        decode_upload(net, save({"params": tensors["params"][:-1]}, header))
    with pytest.raises(BadMessage, match="lacks its params"):
        decode_upload(net, save({}, header))
