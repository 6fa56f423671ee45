"""The learned and the fixed warmup, worked out by hand on two hidden neurons."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedpews.errors import ConfigError
from fedpews.methods.contract import Cohort, Download, Work
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.partial_training import IST
from fedpews.methods.scaffold import Scaffold
from fedpews.neurons.network import Batch
from fedpews.testing import Playground
from fedpews.warmup import Fixed, Learned, with_warmup
from fedpews.warmup.masks import contiguous
from tiny import chain, targets, train_chain

# the output is v₀u₀ + v₁u₁; client 0 pulls it to 0, client 1 to 4; η = 0.1, η_s = 0.1
U, V = [1.0, 2.0], [0.5, -1.0]


def sigmoid(s: float) -> float:
    return 1 / (1 + math.exp(-s))


def test_a_step_first_moves_the_scores_and_then_the_weights_of_a_fresh_draw() -> None:
    net = chain(U, V)
    client = with_warmup(
        FedAvg(), 5, Learned(2.0, gradient="gate", start_spread=0.0, upload_mask="drawn")
    ).client("warmup")
    download = Download(1, "warmup", 2, net.initial(), extra={"theta": {"neurons": torch.tensor([0.5, 0.7])}})
    local = client.start(net, download, None)
    # of two clients with mean θ (.5, .7), of which this one has (.5, .5), the other has (.5, .9)
    assert local["others"]["neurons"].tolist() == pytest.approx([0.5, 0.9])
    # score draw: .4 and .6 against θ = .5, so neuron 0 is open and 1 is closed; the output is .5, the label 4
    # ∂f/∂gate = (.5 − 4)·v_k·u_k = −3.5·(.5, −2) = (−1.75, 7): a closed neuron learns too
    # s = 0 − .1·((−1.75 − 0), (7 − 2·2·(.5 − .9)))·.25
    scores = [0.1 * 1.75 * 0.25, -0.1 * (7 + 1.6) * 0.25]
    # weight draw: .6 and .1 against σ(s) = (.511, .447), so neuron 0 is closed and 1 is open: output −2
    batch = Batch(torch.ones(1, 1), torch.full((1,), 4))
    local, loss = client.step(net, local, batch, torch.tensor([0.4, 0.6, 0.6, 0.1]), 0.1)
    assert local["scores"]["neurons"].tolist() == pytest.approx(scores)
    assert loss.item() == pytest.approx(0.5 * 6**2)
    assert local["inner"]["params"]["0.weight"].flatten().tolist() == pytest.approx([1.0, 2 + 0.1 * 6 * -1])
    assert local["inner"]["params"]["1.weight"].flatten().tolist() == pytest.approx([0.5, -1 + 0.1 * 6 * 2])
    # the upload is a fresh draw too, and tells θ
    memory, upload = client.finish(
        net, download, local, Work(0, 2, 1, 0.1, 0.0, torch.tensor([0.5, 0.9, 0, 0]))
    )
    assert upload.neurons.tolist() == [True, False]
    assert upload.extra["theta"]["neurons"].tolist() == pytest.approx([sigmoid(s) for s in scores])
    assert memory["scores"]["neurons"].tolist() == pytest.approx(scores)


def test_fixed_masks_give_each_client_its_own_neuron() -> None:
    method = with_warmup(FedAvg(), 1, Fixed())
    played = Playground(method, chain(U, V), targets(0, 4), lr=0.1, batch_size=1).play(1)
    u, v = (played.params[0][name].flatten().tolist() for name in ("0.weight", "1.weight"))
    for k in range(2):
        assert (u[k], v[k]) == pytest.approx(train_chain(U[k], V[k], 4.0 * k, steps=2, lr=0.1))


def test_scaffold_in_a_warmup_learns_controls_where_it_owns_and_by_the_steps_it_took_there() -> None:
    method = with_warmup(Scaffold(), 1, Fixed())
    played = Playground(method, chain(U, V), targets(0, 4), lr=0.1, batch_size=1).play(1)
    u0, _ = train_chain(U[0], V[0], 0.0, steps=2, lr=0.1)
    control = played.memories[0]["inner"]["control"]["0.weight"].flatten().tolist()
    assert control == pytest.approx([(U[0] - u0) / (2 * 0.1), 0.0])  # nothing is known of neuron 1
    # each neuron has one client, so c there is that client's c_i in the warmup, and half of it afterwards
    state, cohort = played.state["inner"], Cohort(2, (0, 1), 2, 0)
    for masked, part in ((True, 1.0), (False, 0.5)):
        server = Scaffold().mean_control(state, "0.weight", replace(cohort, masked=masked)).flatten().tolist()
        assert server[0] == pytest.approx(part * control[0])


def test_scaffold_under_learned_masks_divides_by_the_steps_an_element_was_open() -> None:
    net = chain(U, V)
    client = with_warmup(Scaffold(), 5, Learned(mask_lr=1e-9, start=0.0, start_spread=0.0)).client("warmup")
    control = {name: torch.zeros(net.shapes[name]) for name in net.trainable}
    extra = {"theta": {"neurons": torch.full((2,), 0.5)}, "control": control}
    download = Download(1, "warmup", 2, net.initial(), extra=extra)
    local = client.start(net, download, None)
    batch = Batch(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    for draw in ([0.9, 0.9, 0.1, 0.9], [0.9, 0.9, 0.9, 0.9]):  # neuron 0 is open in the first step only
        local, _ = client.step(net, local, batch, torch.tensor(draw), 0.1)
    memory, _ = client.finish(net, download, local, Work(0, 2, 2, 0.1, 0.0, torch.zeros(4)))
    # its gradient there was .5·v₀ = .25; neuron 1 is uploaded but took no step, so nothing is known of it
    assert memory["inner"]["control"]["0.weight"].flatten().tolist() == pytest.approx([0.25, 0.0])


def test_shares_cut_every_layer_as_asked() -> None:
    graph = chain([0.0] * 8, [0.0] * 8).graph
    assert [int(contiguous(graph, i, 2, (1, 3)).sum()) for i in range(2)] == [2, 6]
    with pytest.raises(ConfigError, match="3 numbers for 2 clients"):
        contiguous(graph, 0, 2, (1, 1, 1))


def test_a_method_with_masks_of_its_own_takes_no_warmup() -> None:
    with pytest.raises(ConfigError, match="does not support a warmup"):
        with_warmup(IST(), 5)
