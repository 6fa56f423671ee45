"""What tracing leaves out, what it refuses, and that it leaves the model as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import ALL, Transformer, cnn_batchnorm, mlp
from torch import Tensor, nn
from torch.nn.utils import prune

from fedpews.errors import ConfigError
from fedpews.neurons import slice_module, trace


def names(model: nn.Module, x: Tensor, **options: Any) -> list[str]:
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
def test_the_units_of_a_recurrent_layer_are_neurons(kind: type[nn.RNNBase]) -> None:
    model = Model(
        lambda m, x: m.c(m.b(m.rnn(m.a(x))[0]).relu()),
        a=nn.Linear(3, 4),
        rnn=kind(4, 5, batch_first=True),
        b=nn.Linear(5, 6),
        c=nn.Linear(6, 2),
    )
    graph = trace(model, torch.randn(2, 7, 3))
    assert [layer.size for layer in graph.layers] == [4, 5, 6]
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    rows, columns = graph.axes["rnn.weight_hh_l0"]
    assert rows.neurons.tolist() == list(range(4, 9)) * gates
    assert (columns.neurons.tolist(), columns.reads) == (list(range(4, 9)), True)


def test_of_a_transformer_heads_and_feed_forward_units_are_neurons() -> None:
    graph = trace(Transformer(), torch.randint(0, 11, (2, 6)))
    assert [layer.name for layer in graph.layers] == ["attention.in_proj_weight", "up"]
    # two heads of four: rows of the queries, then of the keys, then of the values; columns of what reads them
    (rows,) = graph.axes["attention.in_proj_weight"]
    assert rows.neurons.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] * 3
    (columns,) = graph.axes["attention.out_proj.weight"]
    assert (columns.neurons.tolist(), columns.reads) == ([0, 0, 0, 0, 1, 1, 1, 1], True)


def test_a_model_can_say_what_is_never_masked() -> None:
    model = Transformer()
    model.unmasked = ("attention",)
    assert names(model, torch.randint(0, 11, (2, 6))) == ["up"]


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


def test_attention_written_by_hand_has_its_heads_for_neurons() -> None:
    def attention(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, 6, 2, 4).transpose(1, 2) for layer in (m.q, m.k, m.v))
        mixed = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
        return m.head(m.ffn(mixed.transpose(1, 2).reshape(2, 6, 8)).relu())

    heads = {name: nn.Linear(3, 8) for name in ("q", "k", "v")}
    model = Model(attention, **heads, ffn=nn.Linear(8, 5), head=nn.Linear(5, 2))
    graph = trace(model, torch.randn(2, 6, 3))
    assert [(layer.name, layer.size) for layer in graph.layers] == [("q + k + v", 2), ("ffn", 5)]
    assert graph.uncut == {"q + k + v"}


def test_a_size_written_into_the_code_is_masked_but_not_cut() -> None:
    model = Model(lambda m, x: m.b(m.a(x).relu().view(-1, 8)), a=nn.Linear(3, 8), b=nn.Linear(8, 2))
    graph = trace(model, torch.randn(2, 3))
    assert ([layer.name for layer in graph.layers], graph.uncut) == (["a"], {"a"})
    neurons = torch.arange(8) < 4
    with pytest.raises(ConfigError, match="'a' can be masked but not removed"):
        slice_module(model, graph, neurons)


def test_what_a_softmax_mixes_is_left_whole() -> None:
    model = Model(
        lambda m, x: m.head(m.ffn(m.q(x).softmax(-1)).relu()),
        q=nn.Linear(3, 8),
        ffn=nn.Linear(8, 5),
        head=nn.Linear(5, 2),
    )
    graph = trace(model, torch.randn(2, 3))
    assert [layer.name for layer in graph.layers] == ["ffn"]
    assert graph.left_whole["q"] == "is mixed into one by a softmax"


def hidden_way(m: nn.Module, x: Tensor) -> Tensor:
    """Past the dispatcher, where no tracer can see it: the proof has to."""
    hidden = m.a(x).relu()
    secret = torch.from_numpy(hidden.detach().numpy().sum(1, keepdims=True))
    return m.c(m.b(hidden).relu()) + secret


def test_the_proof_drops_the_layer_the_tracer_was_wrong_about(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(hidden_way, a=nn.Linear(3, 8), b=nn.Linear(8, 5), c=nn.Linear(5, 2))
    with caplog.at_level("INFO", logger="fedpews"):
        graph = trace(model, torch.randn(2, 3))
    assert [(layer.name, layer.start, layer.size) for layer in graph.layers] == [("b", 0, 5)]
    assert "is not independent of the rest" in graph.left_whole["a"]
    assert "whole for every client: a (is not independent" in caplog.text
    assert graph.axes["b.weight"][0].dim == 0  # its columns read the layer that is whole


def test_strict_tracing_refuses_what_the_proof_would_drop_and_shows_both_ways_out() -> None:
    model, x = Model(hidden_way, a=nn.Linear(3, 8), b=nn.Linear(8, 5), c=nn.Linear(5, 2)), torch.randn(2, 3)
    with pytest.raises(ConfigError) as error:
        trace(model, x, strict=True)
    assert "closing neurons of layer 'a' is not the same as removing them" in str(error.value)
    assert 'skip=["a"' in str(error.value)
    assert "NeuronGraph.by_hand(" in str(error.value)
    assert [layer.name for layer in trace(model, x, ["a"], strict=True).layers] == ["b"]


def test_what_decides_the_path_by_its_values_is_left_whole() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        choice = m.router(x).argmax(1)
        hidden = m.a(x).relu()
        if bool(hidden.sum() > 1e9):
            hidden = hidden * 2
        return m.c(m.b(x).relu()) * choice[:, None] + m.d(hidden)

    layers = {name: nn.Linear(3, 4) for name in ("router", "a", "b")}
    model = Model(forward, **layers, c=nn.Linear(4, 2), d=nn.Linear(4, 2))
    graph = trace(model, torch.randn(2, 3))
    assert [layer.name for layer in graph.layers] == ["b"]
    assert {"a", "router"} <= set(graph.left_whole)


def mlp_of(*sizes: int) -> nn.Module:
    first, hidden, last = sizes
    return nn.Sequential(nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, last))


def test_what_a_branch_not_taken_may_read_is_left_whole_and_said(caplog: pytest.LogCaptureFixture) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = m.a(x).relu()
        return m.b(hidden) if bool(x.sum() < 1e9) else m.c(hidden)

    model = Model(forward, a=mlp_of(3, 5, 8), b=mlp_of(8, 6, 2), c=mlp_of(8, 6, 2))
    graph = trace(model, torch.randn(2, 3))
    # what stays inside a and b cannot be read by c
    assert [layer.name for layer in graph.layers] == ["a.0", "b.0"]
    assert graph.left_whole["a.2"] == "may be read by 'c.0', which the example does not reach"
    assert "whole for every client: a.2 (may be read by 'c.0'" in caplog.text
    assert "c.0, c.2 (is not reached by the example)" in caplog.text


def test_what_experts_not_chosen_may_read_is_left_whole() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden, mixed = m.a(x).relu(), torch.zeros(len(x), 4)
        for number, expert in enumerate(m.experts):
            rows = (m.router(x).argmax(1) == number).nonzero().squeeze(1)
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(hidden[rows]))
        return m.head(mixed)

    model = Model(
        forward,
        a=nn.Linear(3, 8),
        router=nn.Linear(3, 3),
        experts=nn.ModuleList(mlp_of(8, 6, 4) for _ in range(3)),
        head=nn.Linear(4, 2),
    )
    nn.init.constant_(model.router.bias[1:2], 1e9)
    graph = trace(model, torch.randn(2, 3))
    assert [layer.name for layer in graph.layers] == ["experts.1.0"]
    assert graph.left_whole["a"] == "may be read by 'experts.0.0', which the example does not reach"
    assert graph.left_whole["experts.2.2"] == "is not reached by the example"


def test_a_parameter_not_used_in_a_layer_leaves_only_that_layer_whole() -> None:
    model = nn.Sequential(mlp_of(3, 5, 4), nn.ReLU(), mlp_of(4, 6, 2))
    model[2].spare = nn.Parameter(torch.ones(6))
    assert names(model, torch.randn(2, 3)) == ["0.0"]


def test_neurons_that_a_frozen_weight_computes_are_left_whole_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(
        *mlp_of(3, 5, 4), nn.ReLU(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)
    )
    model[2].requires_grad_(False)
    model[5].requires_grad_(False)  # a frozen scale goes with the neuron that it scales
    graph = trace(model, torch.randn(2, 3))
    assert [layer.name for layer in graph.layers] == ["0", "4"]
    assert graph.left_whole["2"] == "has neurons with frozen weights"
    assert caplog.records[-1].levelname == "WARNING"  # shown without setting up logging
    assert "whole for every client: 2 (has neurons with frozen weights)" in caplog.text


class WithAuxiliaryHead(nn.Module):
    """In training a second head reads the hidden layer too, as GoogLeNet's does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head, self.auxiliary = nn.Linear(3, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden = self.a(x).relu()
        return (self.head(hidden), self.auxiliary(hidden)) if self.training else self.head(hidden)


def test_what_reads_neurons_only_in_training_is_found_too() -> None:
    graph = trace(WithAuxiliaryHead(), torch.randn(2, 3))
    assert [axis.reads for axis in graph.axes["auxiliary.weight"]] == [True]


def test_a_model_that_does_not_run_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(
        ConfigError, match=r"does not run on the example \(last layer entered: '2'\): RuntimeError"
    ):
        trace(model, torch.randn(2, 3))


def test_a_layer_that_returns_a_dict_is_followed_like_any_other() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"out": super().forward(x)}

    model = Model(lambda m, x: m.b(m.a(x)["out"].relu()), a=Pair(3, 4), b=nn.Linear(4, 2))
    assert names(model, torch.randn(2, 3)) == ["a"]


def test_a_model_without_maskable_neurons_says_why() -> None:
    with pytest.raises(
        ConfigError, match=r"no hidden neuron that could be masked .*'0' reaches the model's output"
    ):
        trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "norm",
    [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.parametrizations.spectral_norm],
    ids=["weight_norm", "old weight_norm", "spectral_norm"],
)
def test_a_computed_weight_can_make_neurons_row_by_row_but_not_read_them(norm: object) -> None:
    first, second = (norm(nn.Linear(4, 4)) for _ in range(2))  # type: ignore[operator]
    by_rows = norm is not nn.utils.parametrizations.spectral_norm
    model, x = nn.Sequential(first, nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 4)
    model(x)  # old weight_norm now keeps a computed weight, which a plain deep copy refuses
    assert len(trace(model, x).layers) == (2 if by_rows else 1)
    with pytest.raises(ConfigError, match="no hidden neuron that could be masked"):
        trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), second), x)


def test_a_pruned_layer_is_masked_with_its_pruning_mask() -> None:
    model, x = mlp()
    prune.random_unstructured(model[2], "weight", 0.5)
    graph = trace(model, x)
    assert [(layer.name, layer.size) for layer in graph.layers] == [("0", 8), ("2.weight_orig", 6)]
    assert [axis.dim for axis in graph.axes["2.weight_mask"]] == [0, 1]


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
        assert names(model.requires_grad_(False), x, frozen=True) == ["0", "2"]


def test_zero_initialised_layers_are_proved_all_the_same() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Softmax(1), nn.Linear(8, 2))
    nn.init.zeros_(model[2].weight)
    with pytest.raises(ConfigError, match="'0' is mixed into one by a softmax"):
        trace(model, torch.randn(2, 3))
