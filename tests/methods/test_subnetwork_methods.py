"""IST, HeteroFL, FedRolex, FjORD, FedPM, LotteryFL and FedWeIT: two clients, two steps, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import nn

from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Download, Method, Work
from fedpews.methods.fedpm import FedPM
from fedpews.methods.fedweit import FedWeIT
from fedpews.methods.partial_training import IST, FedRolex, FjORD, HeteroFL, window
from fedpews.methods.personal_masks import LotteryFL
from fedpews.neurons.network import Batch, Network
from fedpews.testing import Playground
from tiny import chain, half_square, point, targets, train_chain

# two hidden neurons: the output is v₀u₀ + v₁u₁; client 0 pulls it to 0, client 1 to 4; η = 0.1
U, V = [1.0, 2.0], [0.5, -1.0]


def ground(method: Method, net: Network | None = None) -> Playground:
    return Playground(method, net or chain(U, V), targets(0, 4), lr=0.1, batch_size=1)


def weights(params: dict[str, torch.Tensor]) -> tuple[list[float], list[float]]:
    return params["0.weight"].flatten().tolist(), params["1.weight"].flatten().tolist()


def test_ist_clients_train_their_own_neuron_alone_and_overwrite_it() -> None:
    played = ground(IST()).play(1)
    owners = [int(upload.neurons.nonzero()) for upload in played.uploads[0]]
    assert sorted(owners) == [0, 1]
    u, v = weights(played.params[0])
    for client, k in enumerate(owners):
        # the other neuron is closed, so the client sees the output v_k·u_k
        assert (u[k], v[k]) == pytest.approx(train_chain(U[k], V[k], 4.0 * client, steps=2, lr=0.1))


def test_ist_deals_every_neuron_once_and_anew_in_every_round() -> None:
    graph = chain([0.0] * 7, [0.0] * 7).graph
    drawn = [IST().assign(graph, Cohort(t, (0, 1, 2), 3, seed=t)) for t in (1, 2)]
    for assigned in drawn:
        assert torch.stack(assigned).sum(0).tolist() == [1] * 7
        assert sorted(int(part.sum()) for part in assigned) == [2, 2, 3]
    assert not torch.equal(drawn[0][0], drawn[1][0])


def test_ist_says_when_there_are_too_few_neurons() -> None:
    with pytest.raises(ConfigError, match="2 neurons, too few for 3"):
        IST().assign(chain(U, V).graph, Cohort(1, (0, 1, 2), 3, seed=0))


def train_pair(label: float, steps: int = 2, lr: float = 0.1) -> tuple[list[float], list[float]]:
    """Both neurons: the slope is Σ v_k u_k − label."""
    u, v = list(U), list(V)
    for _ in range(steps):
        slope = sum(a * b for a, b in zip(u, v, strict=True)) - label
        u, v = (
            [a - lr * slope * b for a, b in zip(u, v, strict=True)],
            [b - lr * slope * a for a, b in zip(u, v, strict=True)],
        )
    return u, v


def test_heterofl_averages_what_both_cover_and_scales_the_narrow_one() -> None:
    u, v = weights(ground(HeteroFL(widths=(1.0, 0.5))).play(1).params[0])
    wide_u, wide_v = train_pair(0.0)
    # client 1 has neuron 0 alone, read at 1/r = 2 times its value: its output is 2·v₀·u₀
    narrow_u, narrow_v = train_chain(U[0], V[0], 4.0, steps=2, lr=0.1, scale=2.0)
    assert u == pytest.approx([(wide_u[0] + narrow_u) / 2, wide_u[1]])
    assert v == pytest.approx([(wide_v[0] + narrow_v) / 2, wide_v[1]])


def test_fedrolex_gives_the_narrow_client_the_next_neuron_in_round_two() -> None:
    played = ground(FedRolex(widths=(1.0, 0.5))).play(3)
    seen = [[upload.neurons.tolist() for upload in uploads] for uploads in played.uploads]
    assert [narrow for _, narrow in seen] == [[True, False], [False, True], [True, False]]
    # round 1 is HeteroFL's
    wide_u, _ = train_pair(0.0)
    narrow_u, _ = train_chain(U[0], V[0], 4.0, steps=2, lr=0.1, scale=2.0)
    assert weights(played.params[0])[0] == pytest.approx([(wide_u[0] + narrow_u) / 2, wide_u[1]])


def test_a_window_rounds_up_and_wraps_around() -> None:
    graph = chain([0.0] * 5, [0.0] * 5).graph
    assert window(graph, 0.5).tolist() == [True, True, True, False, False]
    assert window(graph, 0.6).tolist() == [True, True, True, False, False]  # 0.6·5 is 3 and no more
    assert window(graph, 0.4, offset=4).tolist() == [True, False, False, False, True]
    assert window(graph, 0.01).sum() == 1


def test_fjord_draws_a_width_for_every_batch_up_to_the_clients_tier() -> None:
    method, net = FjORD(tiers=(1.0, 0.5)), chain(U, V)
    state = method.init(net, net.initial(), 2)
    wide, narrow = method.downloads(net, state, Cohort(1, (0, 1), 2, 0))
    assert narrow.neurons.tolist() == [True, False]
    half = method.client("train")
    batch = Batch(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    # noise .4·2 → the first width (one neuron): output .5, so u₀ = 1 − .1·.5·.5 and v₀ = .5 − .1·.5·1
    local, _ = half.step(net, half.start(net, wide, None), batch, torch.tensor([0.4]), 0.1)
    assert local["inner"]["params"]["0.weight"].flatten().tolist() == pytest.approx([0.975, 2.0])
    # noise .6·2 → both: output .975·.45 − 2 = −1.56125
    local, loss = half.step(net, local, batch, torch.tensor([0.6]), 0.1)
    assert loss.item() == pytest.approx(0.5 * 1.56125**2)
    assert local["inner"]["params"]["0.weight"].flatten().tolist() == pytest.approx(
        [0.975 + 0.156125 * 0.45, 2.0 - 0.156125 * 1.0]
    )
    # the narrow client has one width, whatever the noise
    local, loss = half.step(net, half.start(net, narrow, None), batch, torch.tensor([0.99]), 0.1)
    assert loss.item() == pytest.approx(0.5 * 0.5**2)


def test_fjord_averages_the_outer_neuron_over_the_clients_that_carry_it() -> None:
    played = ground(FjORD(tiers=(1.0, 0.5))).play(1)
    wide, narrow = (weights(upload.params)[0] for upload in played.uploads[0])
    assert weights(played.params[0])[0] == pytest.approx([(wide[0] + narrow[0]) / 2, wide[1]])
    assert narrow[0] == pytest.approx(train_chain(U[0], V[0], 4.0, steps=2, lr=0.1)[0])


def test_fjord_distils_from_its_widest_output() -> None:
    body, head = nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        body.weight.copy_(torch.tensor([[1.0], [1.0]]))
        head.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    net = Network(nn.Sequential(body, head), torch.ones(1, 1))
    method = FjORD(tiers=(1.0, 0.5), distill=1.0)
    half = method.client("train")
    download = method.downloads(net, method.init(net, net.initial(), 1), Cohort(1, (0,), 1, 0))[0]
    batch = Batch(torch.ones(1, 1), torch.ones(1, dtype=torch.long))
    local, _ = half.step(net, half.start(net, download, None), batch, torch.tensor([0.0]), 0.1)
    # one neuron: outputs (1, 0), p = σ(1); both: outputs (3, 0), q = σ(3).
    # With α = 1 the label does not count: ∂KL(q‖p)/∂output₀ = p − q, times the hidden value 1
    p, q = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-3))
    assert local["inner"]["params"]["1.weight"][0].tolist() == pytest.approx([1 - 0.1 * (p - q), 2.0])


def test_fedpm_learns_scores_sends_masks_and_averages_them() -> None:
    method, net = FedPM(scores="sgd", score_lr=2.0), point()
    state = method.init(net, net.initial(), 2)
    w = state["weights"]["weight"].item()
    assert abs(w) == pytest.approx(math.e)  # fan-in 1
    state = state | {"theta": {"weight": torch.tensor([[0.5]])}}
    download = method.downloads(net, state, Cohort(1, (0, 1), 2, 0))[0]
    assert download.params["weight"].item() == 0  # the logit of 1/2
    local = method.start(net, download, None)
    assert local["weights"]["weight"].item() == pytest.approx(w)  # made from the seed alone
    batch = Batch(torch.ones(1, 1), torch.full((1,), 4))
    # step 1, noise .3 < .5: the weight is in, slope w − 4; s = 0 − 2·(w − 4)·w·.25
    local, _ = method.step(net, local, batch, torch.tensor([0.3]), 0.1)
    s = -2 * (w - 4) * w * 0.25
    assert local["scores"]["weight"].item() == pytest.approx(s, rel=1e-5)
    # step 2, noise 1 − 1e-6: the weight is out, slope 0 − 4, and the score learns all the same
    local, _ = method.step(net, local, batch, torch.tensor([1 - 1e-6]), 0.1)
    theta = 1 / (1 + math.exp(-s))
    assert local["scores"]["weight"].item() == pytest.approx(s + 2 * 4 * w * theta * (1 - theta), rel=1e-5)


def test_fedpms_scores_take_the_steps_of_its_authors_program() -> None:
    method, net = FedPM(), point()
    state = method.init(net, net.initial(), 1)
    w = state["weights"]["weight"].item()
    batch = Batch(torch.ones(1, 1), torch.full((1,), 4))
    # torch's Adam at rate 0.1, never made anew; the derivative of a draw by its probability θ is taken for θ
    wanted = torch.zeros(1, 1, requires_grad=True)
    adam = torch.optim.Adam([wanted], lr=0.1)
    memory = None
    for logit in (0.0, 0.5):  # two rounds
        state = state | {"theta": {"weight": torch.tensor([[logit]]).sigmoid()}}
        wanted.data.fill_(logit)
        download = method.downloads(net, state, Cohort(1, (0,), 1, 0))[0]
        local = method.start(net, download, memory)
        for noise in (0.3, 0.9, 0.1):
            local, _ = method.step(net, local, batch, torch.tensor([noise]), 0.1)
            theta = wanted.sigmoid()
            drawn = (noise < theta).float().detach() + theta.detach() * (theta - theta.detach())
            adam.zero_grad()
            (0.5 * (w * drawn - 4) ** 2).sum().backward()
            adam.step()
            torch.testing.assert_close(local["scores"]["weight"], wanted.detach())
        memory, _ = method.finish(net, download, local, Work(0, 1, 3, 0.1, 0.0, torch.tensor([0.5])))


@pytest.mark.parametrize(
    ("scores", "masks", "theta"),
    [
        ("adam", (1, 1, 1), 0.99),
        ("adam", (1, 0, 0), 0.01 + 0.98 / 3),
        ("adam", (0, 0, 0), 0.01),
        ("sgd", (1, 0, 0), 1 / 3),
        ("sgd", (0, 0, 0), 0.01),
    ],
)
def test_fedpms_probability_is_the_mean_of_the_masks_within_bounds(
    scores: Literal["adam", "sgd"], masks: tuple[int, ...], theta: float
) -> None:
    method, trial = FedPM(scores=scores), ground(FedPM(), point())
    uploads = [
        replace(trial.play(1).uploads[0][0], client=client, params={"weight": torch.tensor([[bool(mask)]])})
        for client, mask in enumerate(masks)
    ]
    state = method.init(trial.net, trial.net.initial(), 3)
    state = method.update(trial.net, state, uploads, Average((1.0,) * 3, (None,) * 3))
    assert state["theta"]["weight"].item() == pytest.approx(theta)


def test_lotteryfl_prunes_rewinds_and_trains_what_is_left() -> None:
    # one layer of four weights, inputs 1: the output is their sum
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -0.1, 2.0, 3.0]]))
    net = Network(layer, torch.ones(1, 4), sample_loss=half_square)
    method = LotteryFL(prune=0.25, remaining=0.5)
    start = net.initial()
    now = {"weight": torch.tensor([[0.5, -4.0, 2.5, 3.5]])}  # the global model at this round
    download = Download(round=2, phase="train", total=2, params=now, extra={"initial": start})
    local = method.start(net, download.with_accuracy(0.21), None)
    # a quarter of four weights is one: the smallest now is .5; the others go back to where they started
    assert local["params"]["weight"].tolist() == [pytest.approx([0.0, -0.1, 2.0, 3.0])]
    batch = Batch(torch.ones(1, 4), torch.full((1,), 4))
    local, _ = method.step(net, local, batch, torch.zeros(0), 0.1)  # slope 4.9 − 4
    local, _ = method.step(net, local, batch, torch.zeros(0), 0.1)  # then 4.63 − 4
    assert local["params"]["weight"].tolist() == [pytest.approx([0.0, -0.253, 1.847, 2.847])]


@pytest.mark.parametrize(("accuracy", "left", "prunes"), [(0.2, 4, False), (0.3, 2, False), (0.3, 4, True)])
def test_lotteryfl_prunes_only_good_tickets_that_are_still_large(
    accuracy: float, left: int, prunes: bool
) -> None:
    net = Network(nn.Linear(4, 1, bias=False), torch.ones(1, 4), sample_loss=half_square)
    method = LotteryFL(prune=0.25)
    mask = {"weight": torch.arange(4)[None] < left}
    download = Download(2, "train", 2, net.initial())
    memory = {"mask": mask, "initial": net.initial()}
    local = method.start(net, download.with_accuracy(accuracy), memory)
    assert int(local["mask"]["weight"].sum()) == left - prunes


def test_lotteryfl_averages_a_weight_over_those_who_keep_it() -> None:
    net = Network(nn.Linear(2, 1, bias=False), torch.ones(1, 2), sample_loss=half_square)
    played = Playground(LotteryFL(accuracy=1.0), net, [(torch.ones(2, 2), torch.tensor([0, 0]))] * 2).play(1)
    sent = [
        replace(upload, params={"weight": torch.tensor([values])}, mask={"weight": torch.tensor([mask])})
        for upload, values, mask in zip(
            played.uploads[0], ([2.0, 5.0], [4.0, 7.0]), ([True, False], [True, False]), strict=True
        )
    ]
    old = net.initial()
    state = LotteryFL().init(net, old, 2)
    ground_ = Playground(LotteryFL(), net, targets(0, 4))
    new = LotteryFL().update(net, state, sent, ground_.average(sent))
    assert new["params"]["weight"][0].tolist() == pytest.approx([3.0, old["weight"][0, 1].item()])


def test_fedweit_trains_four_kinds_of_parameters() -> None:
    method, net = FedWeIT(sparsity=0.01, drift=0.5), point(3.0)
    # the server's B is 3; the client had m = 0, A = 1, α = .5, and the other client's A is 2
    memory = {
        "gates": {"weight": torch.zeros(1)},
        "adaptive": {"weight": torch.ones(1, 1)},
        "attention": {"weight": torch.tensor([0.5])},
        "rest": {},
    }
    extra = {"adaptive-0": {"weight": torch.full((1, 1), 2.0)}}
    local = method.start(net, Download(2, "train", 2, net.initial(), extra=extra), memory)
    batch = Batch(torch.ones(1, 1), torch.full((1,), 4))
    local, loss = method.step(net, local, batch, torch.zeros(0), 0.1)
    # θ = 3·.5 + 1 + .5·2 = 3.5, slope −.5
    assert loss.item() == pytest.approx(0.125)
    assert _values(local) == pytest.approx(
        {
            "base": 3 + 0.1 * 0.5 * 0.5,  # no drift yet
            "gates": 0 + 0.1 * 0.5 * 3 * 0.25,
            "adaptive": 1 + 0.1 * (0.5 - 0.01),
            "attention": 0.5 + 0.1 * 0.5 * 2,
        }
    )
    # step 2: B = 3.025, m = .0375, A = 1.049, α = .6
    s = 1 / (1 + math.exp(-0.0375))
    slope = 3.025 * s + 1.049 + 1.2 - 4
    local, _ = method.step(net, local, batch, torch.zeros(0), 0.1)
    assert _values(local) == pytest.approx(
        {
            "base": 3.025 - 0.1 * (slope * s + 2 * 0.5 * 0.025),
            "gates": 0.0375 - 0.1 * slope * 3.025 * s * (1 - s),
            "adaptive": 1.049 - 0.1 * (slope + 0.01),
            "attention": 0.6 - 0.1 * slope * 2,
        },
        rel=1e-4,
    )


def _values(local: dict[str, dict[str, torch.Tensor]]) -> dict[str, float]:
    return {key: local[key]["weight"].item() for key in ("base", "gates", "adaptive", "attention")}


def test_fedweit_sends_the_rows_with_the_largest_gates_and_a_sparse_own_part() -> None:
    net = chain([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    method = FedWeIT(keep=0.5, sparsity=0.1)
    ground_ = ground(method, net)
    download = method.downloads(net, method.init(net, net.initial(), 2), Cohort(1, (0, 1), 2, 0))[0]
    local = method.start(net, download, None)
    local["gates"]["0.weight"] = torch.tensor([0.1, -3.0, 2.0, 0.5])
    local["adaptive"]["0.weight"] = torch.tensor([[0.05], [-0.2], [0.1], [0.3]])
    from fedpews.methods.contract import Work

    _, upload = method.finish(net, download, local, Work(0, 2, 2, 0.1, 0.0, torch.zeros(0)))
    assert upload.mask["0.weight"].flatten().tolist() == [False, True, True, False]
    sent = upload.extra["adaptive"]["0.weight"].flatten().tolist()
    assert sent == pytest.approx([0.0, -0.2, 0.0, 0.3])
    assert ground_.play(2).downloads[1][0].extra["adaptive-0"].keys() == {"0.weight", "1.weight"}
