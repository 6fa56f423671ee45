"""What a neuron owns, with sizes small enough to check by hand, and graphs given by hand."""

from __future__ import annotations

import pytest
import torch
from architectures import ALL, cnn, dense, grouped, groupnorm, mlp
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedpews.errors import ConfigError
from fedpews.neurons import Hidden, NeuronGraph, trace, verify


def small_cnn() -> nn.Module:
    """Two channels on a 2×2 map, so channel c is inputs 4c … 4c + 3 of the linear layer."""
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def test_closing_a_neuron_closes_its_inputs_bias_norm_and_outputs() -> None:
    graph = trace(small_cnn(), torch.randn(2, 1, 2, 2))
    masks = graph.expand(torch.tensor([False, True]))
    assert set(masks) == {
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "4.weight",
    }  # fmt: skip
    assert masks["0.weight"].tolist() == [
        [[[False]]],
        [[[True]]],
    ]  # (2, 1, 1, 1) for a weight of (2, 1, 1, 1)
    for name in ("0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"):
        assert masks[name].tolist() == [False, True]
    assert masks["4.weight"].tolist() == [
        [False] * 4 + [True] * 4
    ]  # the flatten repeats each channel 2×2 times


def test_a_weight_is_kept_only_if_both_its_neurons_are() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    graph = trace(model, torch.randn(2, 1))
    # layer "0" is neurons 0, 1 (the columns of 2.weight), layer "2" is neurons 2, 3, 4 (its rows)
    masks = graph.expand(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]))
    assert masks["2.weight"].tolist() == [[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    assert masks["2.bias"].tolist() == [0.0, 1.0, 1.0]
    assert masks["4.weight"].tolist() == [[0.0, 1.0, 1.0]]
    assert "4.bias" not in masks


def test_gate_multiplies_only_what_is_read() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    graph = trace(model, torch.randn(2, 1))
    params = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    gated = graph.gate(params, torch.tensor([0.5, -2.0]))
    assert gated["2.weight"].tolist() == [[0.5, -2.0]]
    assert all(gated[name] is params[name] for name in ("0.weight", "0.bias", "2.bias"))
    assert params["2.weight"].tolist() == [[1.0, 1.0]]


def test_gate_leaves_out_names_that_are_not_given() -> None:
    graph = trace(small_cnn(), torch.randn(2, 1, 2, 2))
    assert list(graph.gate({"0.bias": torch.ones(2)}, torch.zeros(2))) == ["0.bias"]


def test_gate_can_be_traced_by_make_fx() -> None:
    model, _ = cnn()
    graph = trace(*cnn())
    params = {name: value.detach() for name, value in model.named_parameters()}
    traced = make_fx(lambda params, gates: graph.gate(params, gates))(params, torch.rand(graph.size))
    gates = torch.rand(graph.size)
    for name, value in traced(params, gates).items():
        assert torch.equal(value, graph.gate(params, gates)[name])


def test_a_norm_group_is_one_neuron_and_slicing_leaves_whole_groups() -> None:
    model, x = groupnorm()  # 12 channels in 4 groups of 3
    graph = trace(model, x)
    assert graph.axes["1.weight"][0].neurons.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_group_of_a_convolution_binds_its_inputs_to_its_outputs() -> None:
    model, x = grouped()  # 8 inputs and 12 outputs in 4 groups
    graph = trace(model, x)
    assert graph.axes["0.bias"][0].neurons.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert graph.axes["2.bias"][0].neurons.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [axis.dim for axis in graph.axes["2.weight"]] == [0]


def test_a_concatenation_with_the_input_leaves_the_input_out() -> None:
    model, x = dense()
    graph = trace(model, x)
    # conv3 reads 3 inputs of the model, 4 neurons of conv1, 5 of conv2; its rows are neurons 9 … 14
    rows, columns = graph.axes["conv3.weight"]
    assert columns.neurons.tolist() == [-1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert rows.neurons.tolist() == [9, 10, 11, 12, 13, 14]
    assert (rows.reads, columns.reads) == (False, True)


def same(one: NeuronGraph, other: NeuronGraph) -> bool:
    flat = [
        {
            name: [(a.dim, a.neurons.tolist(), a.reads, a.rank) for a in axes]
            for name, axes in graph.axes.items()
        }
        for graph in (one, other)
    ]
    return one.layers == other.layers and flat[0] == flat[1] and set(one.norms) == set(other.norms)


BY_HAND = {
    "mlp": [Hidden("0", ["2"]), Hidden("2", ["4"])],
    "cnn": [Hidden("0", ["3"]), Hidden("3", ["7"]), Hidden("7", ["10"])],
    "cnn_batchnorm": [Hidden("0", ["6"], through=["1", "5"])],
    "groupnorm": [Hidden("0", ["3"], through=["1"]), Hidden("3", ["7"], through=["4"])],
    "two_groupnorms": [Hidden("stem", ["head"], through=["four", "six"])],
    "dense": [
        Hidden("conv1", [("conv2", 3, 7), ("conv3", 3, 7)], through=[("norm2", 3, 7), ("norm3", 3, 7)]),
        Hidden("conv2", [("conv3", 7, 12)], through=[("norm3", 7, 12)]),
        Hidden("conv3", ["head"]),
    ],
    "transformer": [Hidden("up", ["down"])],
}


def test_a_graph_without_a_layer_is_the_graph_traced_without_it() -> None:
    model, x = ALL["dense"][0]()
    graph = trace(model, x).without({"conv1": "is not wanted"})
    assert same(graph, trace(model, x, skip=["conv1"]))
    assert graph.left_whole["conv1"] == "is not wanted"


def test_the_masked_share_counts_the_weights_that_belong_to_a_neuron() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    graph = trace(model, torch.randn(2, 2))
    # 12 weights and 4 biases of "2", 20 weights of "4"; not the 9 of "0", the 6 of the norm and the 5 last biases
    assert graph.masked_share == pytest.approx(36 / 56)
    assert graph.left_whole == {
        "0": "is mixed into one by a layer norm",
        "4": "reaches the model's output",
    }


@pytest.mark.parametrize("name", BY_HAND)
def test_a_graph_by_hand_equals_the_traced_one(name: str) -> None:
    model, x = ALL[name][0]()
    by_hand = NeuronGraph.by_hand(model, BY_HAND[name])
    verify(model, by_hand, x)
    assert same(by_hand, trace(model, x, skip=["attention"] if name == "transformer" else []))


def test_a_residual_stream_by_hand_passes_the_proof() -> None:
    model, x = ALL["residual"][0]()
    stream = Hidden(["0", "2.conv2"], ["2.conv1", "3.conv1", "3.skip"], through=["1", "2.bn2"])
    verify(model, NeuronGraph.by_hand(model, [stream]), x)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (Hidden("fc", ["2"]), "no layer 'fc'; it has '0', '2', '4'"),
        (Hidden("0", ["1"]), "'1' is a ReLU; made_by and read_by take linear layers"),
        (Hidden("0", []), "name the layers that make the neurons and those that read them"),
        (
            Hidden("0", ["4"]),
            "8 neurons do not fit evenly into input channels 0 to 5 of layer '4', which has 6",
        ),
        (Hidden("0", [("2", 4, 12)]), "input channels 4 to 11 of layer '2', which has 8"),
        (Hidden("0", ["2", "2"]), "input channels 0 to 7 of layer '2' are given twice"),
        (Hidden("0", ["4"], through=["2"]), "'2' is a Linear; through takes norms"),
        (Hidden(["0", "2"], ["4"]), "must be equally wide"),
    ],
)
def test_a_wrong_graph_by_hand_says_what_is_wrong(hidden: Hidden, message: str) -> None:
    model, _ = mlp()
    with pytest.raises(ConfigError) as error:
        NeuronGraph.by_hand(model, [hidden])
    assert message in str(error.value)


def test_the_proof_catches_a_reader_forgotten_by_hand() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x).relu()
            return self.one(hidden) + self.two(hidden)

    model = TwoHeads()
    graph = NeuronGraph.by_hand(model, [Hidden("body", ["one"])])
    with pytest.raises(ConfigError, match="closing neurons of layer 'body' is not the same as removing them"):
        verify(model, graph, torch.randn(2, 3))
