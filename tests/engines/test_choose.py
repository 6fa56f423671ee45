"""Which engine an experiment gets, by its modelled cost."""

from __future__ import annotations

import torch
from torch import nn

from fedpews.data.federation import Federation, build
from fedpews.engines.choose import COMPILE_SECONDS, choose_engine, step_seconds
from fedpews.engines.engine import Schedule
from fedpews.neurons.network import Network


def federation(*sizes: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 5, generator=generator)
    y = torch.randint(3, (sum(sizes),), generator=generator)
    return build(x, y, list(torch.arange(sum(sizes)).split(list(sizes))), x, y, 3)


def network() -> Network:
    return Network(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(1, 5))


def test_auto_compiles_a_small_model_for_a_long_run_only() -> None:
    net, data = network(), federation(4000, 4000)
    for rounds, expected in ((1, "eager"), (1000, "compiled")):
        engine, reason = choose_engine("auto", net, data, Schedule(8), 1, rounds=rounds, jobs=6)
        engine.close()
        assert engine.name == expected, reason


def test_auto_counts_a_step_of_a_warmup_twice() -> None:
    net, data = network(), federation(4000, 4000)
    plain, compiled = step_seconds(net, 8)
    # 500 steps a client and 6 jobs: enough rounds to save 0.75 of the seconds that two programs take
    rounds = round(0.75 * 2 * COMPILE_SECONDS / (500 * 6 * (plain - compiled)))
    for warmup, expected in ((1, "eager"), (rounds // 2, "compiled")):
        engine, reason = choose_engine(
            "auto", net, data, Schedule(8), 1, rounds=rounds, jobs=6, warmup_rounds=warmup
        )
        engine.close()
        assert engine.name == expected, reason


def test_auto_leaves_convolutions_to_the_eager_engine() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten(), nn.Linear(50176, 10)
    )
    net = Network(module, torch.zeros(1, 3, 32, 32))
    engine, reason = choose_engine("auto", net, federation(400), Schedule(64), 1, rounds=10**6, jobs=6)
    engine.close()
    assert engine.name == "eager"
    assert "kernels" in reason
