"""Runs of several seeds share the work, never their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedpews
from fedpews.data.federation import Federation, build


class Half(nn.Module):
    """A random layer that is never trained, and one that is."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.fixed = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.last = nn.Linear(8, 4)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.relu(self.norm(self.fixed(x))))
        return outputs


def plain() -> nn.Module:
    norm = nn.BatchNorm1d(8)
    nn.init.uniform_(norm.weight)  # what stays at a client begins at random here
    return nn.Sequential(nn.Linear(5, 8), norm, nn.ReLU(), nn.Linear(8, 4))


MODELS = {"frozen": Half, "frozen and norms": lambda: Half(norm=True), "local norms": plain}
METHOD = {"frozen": "fedavg", "frozen and norms": "fedavg+fedbn", "local norms": "fedavg+fedbn"}


def data() -> Federation:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=generator), torch.arange(60) % 4
    return build(x[:40], y[:40], torch.arange(40).split([24, 16]), x[40:], y[40:], 4)


def run(seeds: list[int], kind: str, engine: str = "eager", out: Path | None = None) -> fedpews.Result:
    return fedpews.run(
        model=MODELS[kind],
        clients=data(),
        rounds=2,
        seeds=seeds,
        method=METHOD[kind],
        train={"lr": 0.1, "batch_size": 8},
        runtime={"engine": engine, "workers": 1},
        out=out,
    )


@pytest.mark.parametrize("kind", MODELS)
def test_a_seed_alone_is_the_same_as_beside_others(kind: str) -> None:
    alone, beside = run([1], kind), run([0, 1], kind)
    for name, value in alone.params[1].items():
        assert torch.equal(value, beside.params[1][name]), name
    kept = [record["accuracy"] for record in beside.rounds.of_seed(1)]
    assert kept == [record["accuracy"] for record in alone.rounds.of_seed(1)]
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(alone.model(1)(x), beside.model(1)(x))


def test_two_seeds_have_their_own_frozen_weights_and_they_are_saved(tmp_path: Path) -> None:
    result = run([0, 1], "frozen", out=tmp_path / "run")
    weights = [result.model(seed).get_parameter("fixed.weight") for seed in (0, 1)]
    assert not torch.equal(*weights)
    for seed in (0, 1):
        saved = load_file(tmp_path / "run" / f"model-{seed}.safetensors")
        model = Half()
        model.load_state_dict(saved)
        assert torch.equal(model.fixed.weight, weights[seed])


@pytest.mark.slow
def test_the_compiled_engine_gives_each_seed_its_own_frozen_weights() -> None:
    compiled, eager = run([0, 1], "frozen", "compiled"), run([0, 1], "frozen")
    for seed in (0, 1):
        for name, value in eager.params[seed].items():
            torch.testing.assert_close(compiled.params[seed][name], value, atol=1e-5, rtol=0)
