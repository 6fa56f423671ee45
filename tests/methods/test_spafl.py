"""SpaFL: a step, an answer to the server's thresholds and what travels, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedpews.methods.contract import Cohort, Download
from fedpews.methods.spafl import SpaFL, masked, opens
from fedpews.methods.wire import decode_upload, encode_upload
from fedpews.neurons.network import Batch, Network
from fedpews.testing import Playground, small_clients, small_network
from tiny import chain


def download(net: Network, first: float = 0.0, second: float = 0.0) -> Download:
    """The thresholds of the two hidden neurons, and 0 for the output."""
    (sent,) = SpaFL().downloads(net, SpaFL().init(net, net.initial(), 1), Cohort(1, (0,), 1, 0))
    rows = {"0.weight:rows": torch.tensor([first, second]), "1.weight:rows": torch.zeros(1)}
    return replace(sent, extra={"thresholds": rows})


def test_a_neuron_is_closed_by_its_threshold_and_a_layer_never_is() -> None:
    net = chain([1.0, 2.0], [0.5, -1.0])
    assert masked(net.initial(), download(net, 1.5).extra["thresholds"])["0.weight"].flatten().tolist() == [
        0,
        2,
    ]
    # both above their weights: all thresholds count as 0
    assert opens(net.initial(), download(net, 3.0, 3.0).extra["thresholds"])["0.weight:rows"].tolist() == [
        1,
        1,
    ]


def test_a_step_moves_open_weights_and_all_thresholds() -> None:
    net, method = chain([1.0, 2.0], [0.5, -1.0]), SpaFL(sparsity=0.1)
    local = method.start(net, download(net, 1.5), None)
    batch = Batch(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    local, loss = method.step(net, local, batch, torch.zeros(0), 0.1)
    # neuron 0 is closed: the output is −2; ∂f/∂u = −2·v = (−1, 2), ∂f/∂v = −2·(0, 2)
    assert loss.item() == pytest.approx(2.0)
    assert local["params"]["0.weight"].flatten().tolist() == pytest.approx([1.0, 2.0 - 0.1 * 2])
    assert local["params"]["1.weight"].flatten().tolist() == pytest.approx([0.5, -1.0 + 0.1 * 4])
    # −Σ g·w is 1 for neuron 0, −4 for neuron 1 and −4 for the output (−(−4·−1)); the other part is −.1·e^−τ
    expected = [1.5 - 0.1 * (1 - 0.1 * math.exp(-1.5)), 0.1 * (4 + 0.1)]
    assert local["thresholds"]["0.weight:rows"].tolist() == pytest.approx(expected)
    assert local["thresholds"]["1.weight:rows"].tolist() == pytest.approx([0.1 * (4 + 0.1)])


def test_weights_answer_a_change_of_the_common_thresholds() -> None:
    net, method = chain([1.0, 2.0], [0.5, -1.0]), SpaFL()
    memory = {"params": net.initial(), "common": download(net, 0.1, 0.1).extra["thresholds"]}
    sent = download(net, 0.3, 0.0)
    sent.extra["thresholds"]["1.weight:rows"] += 0.2
    moved = method.answered(sent, memory)
    # Δτ = .2 and −.1 with one positive weight each; the output's is .2, its weights' sum −.5 is negative, n = 2
    assert moved["0.weight"].flatten().tolist() == pytest.approx([0.8, 2.1])
    assert moved["1.weight"].flatten().tolist() == pytest.approx([0.6, -0.9])


def test_only_thresholds_travel_and_the_server_averages_them() -> None:
    net = small_network()
    played = Playground(SpaFL(), net, small_clients()).play(2)
    for upload in played.uploads[-1]:
        assert not upload.params
        assert decode_upload(net, encode_upload(net, upload)).extra.keys() == {"thresholds"}
        # 4 + 4 + 3 neurons
        assert sum(value.numel() for value in upload.extra["thresholds"].values()) == 11
    assert not any(sent.params for sent in played.downloads[-1])
    sent = [upload.extra["thresholds"]["2.weight:rows"] for upload in played.uploads[-1]]
    torch.testing.assert_close(played.state["thresholds"]["2.weight:rows"], sum(sent) / 3)
