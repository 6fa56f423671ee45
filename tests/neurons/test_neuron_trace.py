"""What tracing leaves out, what it refuses, and that it leaves the model as it was."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from architectures import ALL, Transformer, cnn_batchnorm, mlp
from torch import Tensor, nn

from fedpews.errors import ConfigError
from fedpews.neurons import Hidden, NeuronGraph, trace


def names(model: nn.Module, x: Tensor, **options: list[str]) -> list[str]:
    return [layer.name for layer in trace(model, x, **options).layers]


class Model(nn.Module):
    """Layers by name and a forward pass given as a function."""

    def __init__(self, forward: object, **layers: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> object:
        return self._forward(self, x)  # type: ignore[operator]


@pytest.mark.parametrize(
    "end",
    [
        lambda x: x,
        lambda x: F.log_softmax(x, 1),
        lambda x: x.flatten(1).relu() * 2,
        lambda x: {"logits": x, "sum": x.sum()},
        lambda x: x[:, :2],
    ],
    ids=["bare", "log_softmax", "chain", "dict", "slice"],
)
def test_the_output_is_never_masked_whatever_follows_the_last_layer(end: object) -> None:
    model = Model(lambda m, x: end(m.b(m.a(x).relu())), a=nn.Linear(3, 4), b=nn.Linear(4, 5))  # type: ignore[operator]
    assert names(model, torch.randn(2, 3)) == ["a"]


def test_features_that_are_returned_are_outputs_too() -> None:
    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        features = m.b(m.a(x).relu()).relu()
        return m.c(features), features

    model = Model(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 2))
    assert names(model, torch.randn(2, 3)) == ["a"]


def test_what_is_added_to_the_input_is_never_masked() -> None:
    model = Model(
        lambda m, x: m.c(x + m.b(m.a(x).relu())), a=nn.Linear(3, 4), b=nn.Linear(4, 3), c=nn.Linear(3, 2)
    )
    assert names(model, torch.randn(2, 3)) == ["a"]


def test_a_depthwise_first_layer_belongs_to_the_input() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    assert names(model, torch.randn(2, 3, 5, 5)) == ["1"]


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(6), nn.RMSNorm(6), nn.GroupNorm(1, 6)], ids=lambda n: type(n).__name__
)
def test_a_stream_that_a_norm_mixes_as_a_whole_is_left_out(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 6), norm, nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    assert names(model, torch.randn(2, 3)) == ["2"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_a_recurrent_layer_reads_and_makes_is_left_out(kind: type[nn.RNNBase]) -> None:
    model = Model(
        lambda m, x: m.c(m.b(m.rnn(m.a(x))[0]).relu()),
        a=nn.Linear(3, 4),
        rnn=kind(4, 5, batch_first=True),
        b=nn.Linear(5, 6),
        c=nn.Linear(6, 2),
    )
    assert names(model, torch.randn(2, 7, 3)) == ["b"]


def test_of_a_transformer_only_the_feed_forward_units_are_neurons() -> None:
    assert names(Transformer(), torch.randint(0, 11, (2, 6))) == ["up"]


def test_a_layer_used_twice_is_one_layer() -> None:
    model = Model(
        lambda m, x: m.c(m.b(m.b(m.a(x).relu()).relu()).relu()),
        a=nn.Linear(3, 6),
        b=nn.Linear(6, 6),
        c=nn.Linear(6, 2),
    )
    assert names(model, torch.randn(2, 3)) == ["a + b"]


def test_skip_leaves_out_a_layer_and_all_that_is_bound_to_it() -> None:
    model, x = ALL["residual"][0]()
    assert names(model, x, skip=["3.skip", "2"]) == ["3.conv1", "4.conv1"]
    with pytest.raises(ConfigError, match="skip: the model has no layer 'nope'"):
        trace(model, x, skip=["nope"])


@pytest.mark.parametrize("name", ["attention", "softmax", "size"])
def test_a_layer_that_cannot_be_removed_is_named_with_both_ways_out(name: str) -> None:
    def attention(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, 6, 2, 4).transpose(1, 2) for layer in (m.q, m.k, m.v))
        mixed = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
        return m.head(m.ffn(mixed.transpose(1, 2).reshape(2, 6, 8)).relu())

    heads = {name: nn.Linear(3, 8) for name in ("q", "k", "v")}
    models = {
        "attention": Model(attention, **heads, ffn=nn.Linear(8, 5), head=nn.Linear(5, 2)),
        "softmax": Model(
            lambda m, x: m.head(m.ffn(m.q(x).softmax(-1)).relu()),
            q=nn.Linear(3, 8),
            ffn=nn.Linear(8, 5),
            head=nn.Linear(5, 2),
        ),
        "size": Model(
            lambda m, x: m.head(m.ffn(m.q(x).view(-1, 8)).relu()),
            q=nn.Linear(3, 8),
            ffn=nn.Linear(8, 5),
            head=nn.Linear(5, 2),
        ),
    }
    model, x = models[name], torch.randn(2, 6, 3)
    with pytest.raises(ConfigError) as error:
        trace(model, x)
    assert "'q" in str(error.value)
    assert 'skip=["q"' in str(error.value)
    assert "NeuronGraph.by_hand(" in str(error.value)
    assert names(model, x, skip=["q", "k", "v"] if name == "attention" else ["q"]) == ["ffn"]


def test_a_model_that_does_not_run_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(
        ConfigError, match=r"does not run on the example \(last layer entered: '2'\): RuntimeError"
    ):
        trace(model, torch.randn(2, 3))


def test_a_model_the_tracer_cannot_read_names_the_layer_and_shows_the_way_by_hand() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"out": super().forward(x)}

    model = Model(lambda m, x: m.b(m.a(x)["out"].relu()), a=Pair(3, 4), b=nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"cannot be traced \(last layer entered: 'a'\)") as error:
        trace(model, torch.randn(2, 3))
    assert "NeuronGraph.by_hand(" in str(error.value)
    assert NeuronGraph.by_hand(model, [Hidden("a", ["b"])]).size == 4


def test_a_model_without_maskable_neurons_says_why() -> None:
    with pytest.raises(
        ConfigError, match=r"no hidden neuron that could be masked .*'0' reaches the model's output"
    ):
        trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3))


def test_computed_weights_are_refused() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    with pytest.raises(ConfigError, match="'0' computes its weight from other parameters"):
        trace(nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3))


def test_tracing_leaves_model_example_and_random_state_as_they_were() -> None:
    model, x = cnn_batchnorm()
    model.train()
    model[0].eval()
    model[6].weight.requires_grad_(False)
    model(x).sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    random, before = torch.get_rng_state(), x.clone()
    trace(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, before)
    assert not x.requires_grad
    assert [module.training for module in model] == [False, True, True, True, True, True, True]
    assert not model[6].weight.requires_grad
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name] is None or torch.equal(parameter.grad, gradients[name])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_tracing_works_without_gradients_and_on_frozen_models() -> None:
    model, x = mlp()
    with torch.no_grad():
        assert names(model.requires_grad_(False), x) == ["0", "2"]


def test_zero_initialised_layers_are_proved_all_the_same() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Softmax(1), nn.Linear(8, 2))
    nn.init.zeros_(model[2].weight)
    with pytest.raises(ConfigError, match="layer '0'"):
        trace(model, torch.randn(2, 3))


def test_importing_the_room_does_not_import_torch_pruning() -> None:
    code = "import fedpews.neurons, sys; sys.exit('torch_pruning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
