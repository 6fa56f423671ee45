"""What the paper leaves open of the learned masks, each reading worked out by hand or stated as a law."""

from __future__ import annotations

import math

import pytest
import torch

from fedpews.errors import ConfigError
from fedpews.methods.contract import ClientHalf, Cohort, Download, Work
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Batch, Network
from fedpews.testing import Playground
from fedpews.trees import Nest
from fedpews.warmup import Learned, Warmup, with_warmup
from fedpews.warmup.masks import draw_starts
from tiny import chain, targets

# the output is v₀u₀ + v₁u₁, the label 4; η = 0.1, η_s = 0.1
U, V = [1.0, 2.0], [0.5, -1.0]
ALIKE = {"start": 0.0, "start_spread": 0.0}


def begin(
    masks: Learned, theta: tuple[float, float] = (0.5, 0.5)
) -> tuple[Network, ClientHalf, Download, Nest]:
    net = chain(U, V)
    client = with_warmup(FedAvg(), 5, masks).client("warmup")
    download = Download(1, "warmup", 2, net.initial(), extra={"theta": {"neurons": torch.tensor(theta)}})
    return net, client, download, client.start(net, download, None)


def batch() -> Batch:
    return Batch(torch.ones(1, 1), torch.full((1,), 4))


@pytest.mark.parametrize("gradient", ["theta", "open", "gate"])
def test_the_gradient_of_a_score_is_the_gates_times_theta_or_the_draw_or_one(gradient: str) -> None:
    net, client, _, local = begin(Learned(0.0, gradient=gradient, **ALIKE))  # type: ignore[arg-type]
    # of the score draw neuron 0 is open, 1 closed: ∂f/∂gate = (.5 − 4)·(.5, −2) = (−1.75, 7); σ′(0) = .25
    local, _ = client.step(net, local, batch(), torch.tensor([0.4, 0.6, 0.6, 0.1]), 0.1)
    # what the gate's gradient is multiplied by, for the open neuron and for the closed one; θ is ½
    factors = {"theta": (0.5, 0.5), "open": (1.0, 0.0), "gate": (1.0, 1.0)}[gradient]
    expected = [0.1 * 1.75 * 0.25 * factors[0], -0.1 * 7 * 0.25 * factors[1]]
    assert local["scores"]["neurons"].tolist() == pytest.approx(expected)


def test_diversity_moves_the_score_of_a_closed_neuron_too() -> None:
    # θ_g is (.5, .7) and this client's θ (.5, .5), so the other's is (.5, .9)
    net, client, _, local = begin(Learned(2.0, gradient="open", **ALIKE), (0.5, 0.7))  # type: ignore[arg-type]
    local, _ = client.step(net, local, batch(), torch.tensor([0.6, 0.6, 0.6, 0.6]), 0.1)
    # both closed: only −2λ(θ − θ_others) = (0, 1.6) is left
    assert local["scores"]["neurons"].tolist() == pytest.approx([0.0, -0.1 * 1.6 * 0.25])


def test_an_upload_can_be_thresholded_instead_of_drawn() -> None:
    for how, expected in (("drawn", [False, True]), ("thresholded", [True, False])):
        net, client, download, local = begin(Learned(upload_mask=how, **ALIKE))  # type: ignore[arg-type]
        local["scores"] = {"neurons": torch.tensor([1.0, -1.0])}  # θ = (.73, .27)
        work = Work(0, 1, 1, 0.1, 0.0, torch.tensor([0.9, 0.1, 0.0, 0.0]))
        _, upload = client.finish(net, download, local, work)
        assert upload.neurons.tolist() == expected


def test_masks_drawn_once_a_round_keep_the_numbers_of_the_first_step() -> None:
    net, client, download, local = begin(
        Learned(0.0, mask_lr=1e-9, draw="round", upload_mask="drawn", **ALIKE)
    )  # type: ignore[arg-type]
    for noise in ([0.4, 0.6, 0.9, 0.1], [0.6, 0.1, 0.9, 0.1]):  # neuron 0 is open in the first draw, 1 closed
        local, _ = client.step(net, local, batch(), torch.tensor(noise), 0.1)
    params = local["inner"]["params"]["0.weight"].flatten()
    assert params[1] == U[1]
    assert params[0] != U[0]
    _, upload = client.finish(net, download, local, Work(0, 1, 2, 0.1, 0.0, torch.tensor([0.9, 0.1, 0, 0])))
    assert upload.neurons.tolist() == [True, False]


def test_a_start_has_the_mean_and_the_spread_that_were_asked_for() -> None:
    starts = draw_starts(Learned(start=-1.0, start_spread=2.0), neurons=4000, clients=range(3), seed=0)
    assert starts.shape == (3, 4000)
    # the mean of 12,000 numbers of deviation 2 is off by 2/√12000 = .018 in the mean
    assert float(starts.mean()) == pytest.approx(-1, abs=0.08)
    assert float(starts.std()) == pytest.approx(2, abs=0.08)
    assert draw_starts(Learned(start=-1.0, start_spread=0.0), 5, range(2), 0).unique().tolist() == [-1.0]


def test_a_clients_start_depends_on_its_number_and_the_seed_alone() -> None:
    masks = Learned(start_spread=1.0)
    few, many, other = (
        draw_starts(masks, 9, range(total), seed) for total, seed in ((3, 0), (50, 0), (3, 1))
    )
    assert torch.equal(few, many[:3])
    assert torch.equal(draw_starts(masks, 9, [49, 2], 0), many[[49, 2]])
    assert len({tuple(row.tolist()) for row in torch.cat([few, other])}) == 6
    common = draw_starts(Learned(start_common=True), 9, range(3), 0)
    assert torch.equal(common[0], common[1])


@pytest.mark.parametrize("newcomer", ["mean", "start"])
def test_a_newcomer_learns_the_mean_of_the_others_as_the_server_knows_them(newcomer: str) -> None:
    masks = Learned(start=-1.0, start_spread=1.0, newcomer=newcomer)  # type: ignore[arg-type]
    method = with_warmup(FedAvg(), 4, masks)
    assert isinstance(method, Warmup)
    net = chain(U, V)
    starts = draw_starts(method.masks, 2, range(3), 7)  # type: ignore[arg-type]
    state = method.init(net, net.initial(), 3)
    downloads = method.downloads(net, state, Cohort(1, (0, 1, 2), 3, seed=5, run_seed=7))
    for client, download in enumerate(downloads):
        assert torch.equal(download.extra["start"]["neurons"], starts[client])
        # σ(−1) for each of the three, Algorithm 1's common θ_g; or each one's own start
        known = torch.sigmoid(starts) if newcomer == "start" else torch.full((3, 2), 1 / (1 + math.e))
        torch.testing.assert_close(download.extra["theta"]["neurons"], known.mean(0))
        local = method.client("warmup").start(net, download, None)
        others = known[[i for i in range(3) if i != client]].mean(0)
        torch.testing.assert_close(local["others"]["neurons"], others)
        assert torch.equal(local["scores"]["neurons"], starts[client])
    ground = Playground(method, net, targets(0, 4, 1), lr=0.1, batch_size=1)
    played = ground.play(3, lambda round: (0, 2) if round < 3 else (0, 1))
    sent = [["start" in download.extra for download in downloads] for downloads in played.downloads]
    assert sent == [[True, True], [False, False], [False, True]]


def test_a_client_that_joins_late_differs_from_what_the_others_last_shared() -> None:
    method = with_warmup(FedAvg(), 4, Learned())
    net = chain(U, V)
    played = Playground(method, net, targets(0, 4), lr=0.1, batch_size=1).play(2, lambda round: (0,))
    download = method.downloads(net, played.state, Cohort(3, (0, 1), 2, 0))[1]
    local = method.client("warmup").start(net, download, None)
    shared = played.uploads[-1][0].extra["theta"]["neurons"]
    torch.testing.assert_close(local["others"]["neurons"], shared)


def test_runs_of_two_seeds_start_their_masks_apart_from_one_network() -> None:
    net, method = chain(U, V), with_warmup(FedAvg(), 1, Learned(start_spread=1.0))
    found = [
        Playground(method, net, targets(0, 4), lr=0.1, batch_size=1, seed=seed).play(1) for seed in (0, 1)
    ]
    first, second = (played.downloads[0][0].extra["start"]["neurons"] for played in found)
    assert not torch.equal(first, second)


def test_scores_start_at_the_mean_when_there_is_no_spread() -> None:
    net, _, _, local = begin(Learned(start=-1.0, start_spread=0.0))
    assert local["scores"]["neurons"].tolist() == [-1.0, -1.0]
    theta = 1 / (1 + math.e)
    method = with_warmup(FedAvg(), 5, Learned(start=-1.0, start_spread=0.0))
    sent = method.downloads(net, method.init(net, net.initial(), 2), Cohort(1, (0, 1), 2, 0))
    assert "start" not in sent[0].extra
    assert sent[0].extra["theta"]["neurons"].tolist() == pytest.approx([theta, theta])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gradient": "closed"}, "Learned.gradient: input should be 'theta', 'open' or 'gate', got 'closed'"),
        ({"upload_mask": "sampled"}, "should be 'drawn' or 'thresholded'"),
        ({"start_spread": -1.0}, "start_spread: input should be greater than or equal to 0"),
    ],
)
def test_a_reading_that_does_not_exist_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Learned(**wrong)  # type: ignore[arg-type]
