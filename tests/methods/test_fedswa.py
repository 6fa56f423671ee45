"""FedSWA and FedMoSWA: two rounds by hand, and in a warmup.

Everywhere w starts at 1, η = 0.1, client 0 pulls to 0 and client 1 to 4, with the gradient w − label.
"""

from __future__ import annotations

import pytest
import torch

from fedpews.errors import ConfigError
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fedswa import FedMoSWA, FedSWA
from fedpews.testing import Played, Playground, check_same, small_clients, small_network
from fedpews.warmup import Learned, with_warmup
from tiny import chain, point, targets


def play(method: FedSWA, rounds: int = 2) -> Played:
    return Playground(method, point(), targets(0, 4), lr=0.1, batch_size=1).play(rounds)


def weights(played: Played) -> list[float]:
    return [params["weight"].item() for params in played.params]


def test_the_rate_falls_within_a_round_as_soon_as_the_client_knows_its_steps() -> None:
    # round 1 is FedAvg's: .81 and 1.57, mean 1.19;  round 2 has the rates .1 and .1·(1 − 1/2) = .05
    # client 0: 1.19 − .119 = 1.071, 1.071 − .05355 = 1.01745;  client 1: 1.19 + .281 = 1.471, + .12645 = 1.59745
    assert weights(play(FedSWA(rho=0.0, alpha=1.0))) == pytest.approx([1.19, (1.01745 + 1.59745) / 2])
    # ρ = .5: the second rate is .1·(1 − .5·.5) = .075: 1.071 − .080325 and 1.471 + .189675
    assert weights(play(FedSWA(rho=0.5, alpha=1.0)))[1] == pytest.approx((0.990675 + 1.660675) / 2)


def test_the_server_goes_on_past_the_mean() -> None:
    # 1 + 1.5·(1.19 − 1)
    assert weights(play(FedSWA(alpha=1.5), 1)) == pytest.approx([1.285])


def test_a_round_with_more_steps_than_the_last_ends_at_the_lowest_rate() -> None:
    method = FedSWA(rho=0.25)
    local = {"progress": {"taken": torch.tensor(7.0), "of": torch.tensor(4.0)}}
    assert method.factor(local).item() == pytest.approx(0.25)
    assert (
        method.factor({"progress": {"taken": torch.tensor(3.0), "of": torch.tensor(torch.inf)}}).item() == 1
    )


def test_fedmoswa_corrects_steps_and_its_common_control_has_momentum() -> None:
    played = play(FedMoSWA(rho=0.0, alpha=1.0, gamma=0.5))
    # round 1: c_0 = .95, c_1 = −2.85, m = .5·(−.95) = −.475
    # round 2, client 0: 1.19 − .95 − .475 = −.235, w = 1.2135; rate .05: 1.2135 − 1.425 = −.2115, w = 1.224075
    #          client 1: −2.81 + 2.85 − .475 = −.435, w = 1.2335; −2.7665 + 2.375 = −.3915, w = 1.253075
    assert weights(played) == pytest.approx([1.19, (1.224075 + 1.253075) / 2])
    # the mean gradients, the second of which counts half: (1.19 + .5·1.2135)/1.5 and (−2.81 − .5·2.7665)/1.5
    controls = [(1.19 + 0.5 * 1.2135) / 1.5, (-2.81 - 0.5 * 2.7665) / 1.5]
    for client, control in enumerate(controls):
        assert played.memories[client]["control"]["weight"].item() == pytest.approx(control)
    assert played.state["control"]["weight"].item() == pytest.approx(0.5 * -0.475 + 0.5 * sum(controls) / 2)


def test_with_a_constant_rate_and_the_mean_it_is_fedavg() -> None:
    net, clients = small_network(), small_clients()
    ours, plain = (Playground(m, net, clients).partly(3) for m in (FedSWA(rho=1.0, alpha=1.0), FedAvg()))
    check_same(ours, plain, "it differs", deep=False)


def test_in_a_warmup_an_elements_control_is_the_mean_of_the_gradients_it_was_moved_by() -> None:
    net = chain([1.0, 0.5], [0.2, -0.3])
    trial = Playground(
        with_warmup(FedMoSWA(), 1, Learned()), net, targets(0, 4, steps=8), lr=0.01, batch_size=1
    )
    played = trial.play(1)
    for upload in played.uploads[0]:
        control = played.memories[upload.client]["inner"]["control"]["0.weight"].flatten()
        moved = (net.initial()["0.weight"] - upload.params["0.weight"]).flatten()
        for k in range(2):
            if upload.neurons is not None and upload.neurons[k] and moved[k] != 0:
                # (x_g − y)/(K·η) with K whole, between one and all eight steps
                steps = (moved[k] / control[k] / 0.01).item()
                assert steps == pytest.approx(round(steps), abs=1e-3)
                assert 1 <= round(steps) <= 8
            else:
                assert control[k] == 0


def test_fedmoswa_refuses_momentum() -> None:
    with pytest.raises(ConfigError, match="fedmoswa needs plain SGD"):
        FedMoSWA(momentum=0.9)
