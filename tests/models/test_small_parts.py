"""Training a part of a model: what is frozen neither trains nor travels, and may not change between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedpews
from adapted import A, Adapted, B, adapted_model
from fedpews.errors import CheckpointError, ConfigError
from fedpews.methods.wire import BadMessage
from fedpews.neurons.network import Batch, Network
from fedpews.result import Result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


X, Y = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3
CLIENTS = [(X[:15], Y[:15]), (X[15:], Y[15:])]


def run(model: Any = Net, **settings: Any) -> Result:
    given = {"method": "fedavg", "rounds": 2, "runtime": {"engine": "eager"}} | settings
    return fedpews.run(model=model, clients=CLIENTS, test=(X, Y), **given)


def test_what_is_frozen_neither_trains_nor_travels() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = run(model, train={"freeze": "body.*", "lr": 0.5})
    # 4·3 weights and 3 biases of the head, four bytes each, to two clients and back
    assert result.rounds[-1]["bytes_up"] == result.rounds[-1]["bytes_down"] == 2 * 15 * 4
    assert set(result.params[0]) == {"head.weight", "head.bias"}
    after = result.model().state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("body."))
    assert not torch.equal(before["head.weight"], after["head.weight"])
    # the caller's module is left as it was
    assert all(value.requires_grad for value in model.parameters())


def test_a_last_layer_alone_is_trained_and_saved_without_a_neuron_to_mask(tmp_path: Path) -> None:
    run(Net(), train={"freeze": "body"}, out=tmp_path)
    # of a frozen part that is no base under adapters the saved model has all
    assert "body.0.weight" in fedpews.load(tmp_path).params[0]


def test_a_frozen_batch_norm_trains_with_the_statistics_it_came_with() -> None:
    model = Net()
    model.body[1].requires_grad_(False)  # type: ignore[index]
    net = Network(model, X[:1])
    assert not net.buffers
    loss, _ = net.loss(net.initial(), Batch(X, Y))
    expected = nn.functional.cross_entropy(model.eval()(X), Y)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("bodi.*", r"train\.freeze: no parameter matches 'bodi\.\*'; did you mean 'body'"),
        (["body", "head"], r"train\.freeze: body, head leaves nothing to train"),
    ],
)
def test_a_pattern_that_means_nothing_is_refused(patterns: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(train={"freeze": patterns})


def test_a_start_reaches_what_is_frozen_and_leaves_what_is_fresh(tmp_path: Path) -> None:
    base = Net()
    save_file(base.state_dict() | {"head.weight": torch.zeros(9, 4)}, tmp_path / "base.safetensors")
    table = {"name": "mlp", "start": str(tmp_path / "base.safetensors")}

    def trained(**more: Any) -> Result:
        experiment = fedpews.Experiment(model=table | more, train={"freeze": "body"})
        return run(Net(), experiment=experiment)

    assert torch.equal(trained(fresh=["head"]).model().get_parameter("body.0.weight"), base.body[0].weight)
    with pytest.raises(ConfigError, match=r"model\.start: head\.weight has shape \(9, 4\)"):
        trained()


def test_a_run_is_not_resumed_on_a_base_that_differs_by_one_weight(tmp_path: Path) -> None:
    model = adapted_model()
    run(model, rounds=1, out=tmp_path)
    with torch.no_grad():
        model[0].base_layer.weight[0, 0] += 1e-6  # type: ignore
    with pytest.raises(CheckpointError, match="its frozen parameters are others"):
        run(model, rounds=2, out=tmp_path, resume=True)


def test_every_seed_counts_in_the_digest_of_what_is_frozen() -> None:
    def made(*weights: float) -> Network:
        models = {}
        for seed, weight in enumerate(weights):
            models[seed] = adapted_model()
            with torch.no_grad():
                models[seed][0].base_layer.weight[0, 0] = weight  # type: ignore
        return Network.of_seeds(models, X[:1])

    assert made(1.0, 2.0).frozen_digest() == made(1.0, 2.0).frozen_digest() != made(1.0, 3.0).frozen_digest()


def test_only_adapters_and_the_head_are_saved(tmp_path: Path) -> None:
    result = run(adapted_model(), out=tmp_path)
    saved = fedpews.load(tmp_path, model=adapted_model())
    assert set(saved.params[0]) == {A, B, "2.weight", "2.bias"}
    again = saved.model()
    assert torch.equal(again(X), result.model()(X))


def test_a_site_with_another_base_is_refused() -> None:
    hello = pytest.importorskip("fedpews.flower.hello", reason="pip install 'fedpews[flower]'")
    facts = hello.Facts(0, "1", "c", "3", 3, 15, 0, 0, "d", base="one")
    hello.Expected(2, {"base": "one"}).check(facts)
    with pytest.raises(BadMessage, match="the digest of the model's frozen parameters is one at the site"):
        hello.Expected(2, {"base": "other"}).check(facts)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedavg+pews"])
def test_the_compiled_engine_trains_adapters_of_unequal_rank_as_the_eager_one(method: str) -> None:
    def final(engine: str) -> dict[str, Tensor]:
        made = fedpews.compose.method(method, **({"warmup": {"rounds": 1}} if "pews" in method else {}))
        ranked = fedpews.warmup.ranks.Ranks(made, (3, 2))  # type: ignore[attr-defined]
        return run(adapted_model(), method=ranked, runtime={"engine": engine}).params[0]

    eager, compiled = final("eager"), final("compiled")
    assert all(torch.allclose(eager[name], compiled[name], atol=1e-5) for name in eager)


def test_the_adapter_of_these_tests_is_one_to_the_trace() -> None:
    graph = fedpews.trace(nn.Sequential(Adapted(3, 4, 2), nn.Tanh(), nn.Linear(4, 3)), X[:2])
    assert [(layer.name, layer.size) for layer in graph.layers] == [("0.lora_A.default", 2)]
