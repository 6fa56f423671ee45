"""FedAvg-M and SCAFFOLD-M: two rounds by hand, against the tutorial's lines, and in a warmup."""

from __future__ import annotations

import pytest
import torch
from test_tutorial import tutorial as tutorial

from fedpews.errors import ConfigError
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fedavg_m import FedAvgMomentum, ScaffoldMomentum
from fedpews.methods.optimizers import Adam
from fedpews.methods.scaffold import Scaffold
from fedpews.testing import Played, Playground, check_same, small_clients, small_network
from fedpews.warmup import Learned, with_warmup
from tiny import point, targets


def play(method: FedAvgMomentum, rounds: int = 2) -> Played:
    """w starts at 1, η = 0.1, two steps a round; client 0 pulls to 0 and client 1 to 4, with the gradient w − label."""
    return Playground(method, point(), targets(0, 4), lr=0.1, batch_size=1).play(rounds)


def weights(played: Played) -> list[float]:
    return [params["weight"].item() for params in played.params]


def test_fedavg_m_leans_towards_the_last_rounds_mean_step() -> None:
    played = play(FedAvgMomentum(beta=0.5))
    # round 1, v = 0 and half the gradient: .95, .9025 and 1.15, 1.2925; mean 1.0975, v = (1 − 1.0975)/(2·.1) = −.4875
    # round 2, client 0: .5·1.0975 − .24375 = .305, w = 1.067; .5·1.067 − .24375 = .28975, w = 1.038025
    #          client 1: −1.45125 − .24375 = −1.695, w = 1.267; −1.3665 − .24375 = −1.61025, w = 1.428025
    assert weights(played) == pytest.approx([1.0975, (1.038025 + 1.428025) / 2])
    # v = (1.0975 − 1.233025)/.2
    assert played.state["direction"]["weight"].item() == pytest.approx(-0.677625)


def test_scaffold_m_leans_too_and_its_controls_are_mean_gradients() -> None:
    played = play(ScaffoldMomentum(beta=0.5))
    # round 1 is fedavg-m's; c_0 = (1 + .95)/2 = .975, c_1 = (−3 − 2.85)/2 = −2.925, c = −.975
    # round 2, client 0: .5·(1.0975 − .975 − .975) − .24375 = −.67, w = 1.1645; .5·(1.1645 − 1.95) − .24375, w = 1.22815
    #          client 1: .5·(−2.9025 + 1.95) − .24375 = −.72, w = 1.1695; .5·(−2.8305 + 1.95) − .24375, w = 1.2379
    assert weights(played) == pytest.approx([1.0975, (1.22815 + 1.2379) / 2])
    assert played.memories[0]["control"]["weight"].item() == pytest.approx((1.0975 + 1.1645) / 2)
    assert played.memories[1]["control"]["weight"].item() == pytest.approx((-2.9025 - 2.8305) / 2)


def test_weight_decay_is_part_of_the_clients_own_gradient() -> None:
    # β = .5, decay .1, one step a round, one client at 0: step .5·(w + .1·w) + .5·v
    played = Playground(FedAvgMomentum(0.0, 0.1, beta=0.5), point(), targets(0, steps=1), batch_size=1).play(
        2
    )
    # round 1: .55, w = .945, v = .55;  round 2: .5·1.0395 + .275 = .79475, w = .865525
    assert weights(played) == pytest.approx([0.945, 0.865525])


def test_clients_with_more_steps_have_no_larger_part_in_the_direction() -> None:
    clients = [targets(0, steps=3)[0], targets(4, steps=1)[0]]
    played = Playground(FedAvgMomentum(beta=1.0), point(), clients, batch_size=1).play(1)
    # client 0: gradients 1, .9, .81, mean .90333;  client 1: −3
    assert played.state["direction"]["weight"].item() == pytest.approx((2.71 / 3 - 3) / 2)


def test_it_is_the_method_that_the_tutorial_writes(request: pytest.FixtureRequest) -> None:
    written = request.getfixturevalue("tutorial").FedCM(alpha=0.3)
    net, clients = small_network(), small_clients()
    ours, theirs = (Playground(m, net, clients).partly(3).params for m in (FedAvgMomentum(beta=0.3), written))
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in net.names)


@pytest.mark.parametrize(
    ("method", "plain"), [(FedAvgMomentum(beta=1.0), FedAvg()), (ScaffoldMomentum(beta=1.0), Scaffold())]
)
def test_without_the_common_direction_it_is_the_plain_method(
    method: FedAvgMomentum, plain: FedAvg | Scaffold
) -> None:
    net, clients = small_network(), small_clients()
    ours, theirs = (Playground(m, net, clients).partly(3) for m in (method, plain))
    check_same(ours, theirs, "it differs", deep=False)


def test_in_a_warmup_the_direction_is_the_mean_step_of_the_owners_that_took_one() -> None:
    net, name = small_network(), "2.weight"
    trial = Playground(with_warmup(FedAvgMomentum(), 1, Learned()), net, small_clients())
    played, old = trial.play(1), net.initial()[name]
    uploads = played.uploads[0]
    masks = [net.graph.expand(upload.neurons)[name] for upload in uploads]  # type: ignore[arg-type]
    unequal = 0
    for row in range(4):
        for column in range(4):
            steps = []
            for upload, mask in zip(uploads, masks, strict=True):
                way = float(upload.extra["work_each"][name][row, column])  # K·η
                unequal += 0 < way < upload.steps * 0.1 - 1e-6
                if mask[row, column] and way > 0:
                    steps.append(float(old[row, column] - upload.params[name][row, column]) / way)
            expected = sum(steps) / len(steps) if steps else 0.0
            assert played.state["inner"]["direction"][name][row, column].item() == pytest.approx(
                expected, abs=1e-6
            )
    assert unequal


@pytest.mark.parametrize("method", [FedAvgMomentum, ScaffoldMomentum])
@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimizer": Adam()}])
def test_another_momentum_beside_its_own_is_refused(
    method: type[FedAvgMomentum], options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="momentum of their own around plain SGD"):
        method(**options)  # type: ignore[arg-type]


def test_scaffold_names_the_variant_that_has_momentum() -> None:
    with pytest.raises(ConfigError, match="scaffold-m has a momentum of its own"):
        Scaffold(momentum=0.9)
