"""torch's attention runs with the weights of fewer heads, and computes what the masked heads leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedpews.errors import ConfigError
from fedpews.models import build
from fedpews.neurons import slice_module, trace
from fedpews.neurons.layers import Attention
from fedpews.neurons.network import Batch, Network

LENGTH, WIDTH, HEADS = 5, 12, 4
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

Call = Callable[[nn.Module, Tensor], Tensor]


class Attending(nn.Module):
    """A residual block with one attention layer; ``call`` says how it is called."""

    def __init__(self, call: Call, **options: bool) -> None:
        super().__init__()
        self.call, self.embed, self.head = call, nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        out: Tensor = self.head(self.after(x + self.call(self.attention, self.before(x))))
        return out


def itself(attention: nn.Module, x: Tensor, **options: Tensor | bool) -> Tensor:
    out: Tensor = attention(x, x, x, **({"need_weights": False} | options))[0]
    return out


def padding(x: Tensor) -> Tensor:
    """Of the first sample the last two positions, of the others the last."""
    return torch.arange(LENGTH) >= torch.tensor([3] + [4] * (len(x) - 1))[:, None]


def each_head(attention: nn.Module, x: Tensor) -> Tensor:
    masks = torch.arange(len(x) * HEADS)[:, None, None] * LATER.to(x) / 8
    return itself(attention, x, attn_mask=masks)


CALLS: dict[str, tuple[Call, dict[str, bool]]] = {
    "itself": (itself, {"batch_first": True}),
    "positions first": (itself, {}),
    "without bias": (itself, {"batch_first": True, "bias": False}),
    "others": (lambda a, x: a(x, x.flip(1), x.flip(1), need_weights=False)[0], {"batch_first": True}),
    "with weights": (lambda a, x: itself(a, x, need_weights=True), {"batch_first": True}),
    "causal": (lambda a, x: itself(a, x, attn_mask=LATER, is_causal=True), {"batch_first": True}),
    "padding": (lambda a, x: itself(a, x, key_padding_mask=padding(x)), {"batch_first": True}),
    "both": (
        lambda a, x: itself(a, x, attn_mask=LATER.to(x), key_padding_mask=padding(x).to(x)),
        {"batch_first": True},
    ),
    "one sample": (lambda a, x: torch.stack([itself(a, one) for one in x]), {}),
    "each head": (each_head, {"batch_first": True}),
}
CUT = [name for name in CALLS if name != "each head"]


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    call, options = CALLS[name]
    model = Attending(call, **options).double()
    for value in model.parameters():  # biases start at zero
        value.data += 0.3 * torch.randn_like(value)
    return model, torch.randn(3, LENGTH, 3).double()


@pytest.mark.parametrize("heads", [0, 1, 3])
@pytest.mark.parametrize("name", CUT)
def test_attention_with_fewer_heads_is_the_masked_attention(name: str, heads: int) -> None:
    model, x = made(name)
    graph = trace(model, x)
    assert [(layer.name, layer.size) for layer in graph.layers] == [("attention.in_proj_weight", HEADS)]
    assert not graph.uncut
    neurons = torch.tensor([False, True, True, True]) & (torch.arange(HEADS) <= heads)
    for training in (False, True):
        model.train(training)
        small = slice_module(model, graph, neurons)
        gated = graph.gate(dict(model.named_parameters()), neurons.double())
        torch.testing.assert_close(small(x), functional_call(model, gated, (x,)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CALLS)
def test_gates_at_the_inputs_of_attentions_last_layer_are_gates_at_its_weights(name: str) -> None:
    model, x = made(name)
    net = Network(model, x)
    # with its weights asked for, torch's own code runs, which never calls the last layer
    assert list(net._fed) == ([] if name == "with weights" else ["attention.out_proj"])
    gates = torch.rand(HEADS).double()
    for training in (False, True):
        at_inputs, _ = net.gated(gates)._call(net.initial(), x, training=training)
        gated = net.graph.gate(dict(model.named_parameters()), gates)
        torch.testing.assert_close(at_inputs, functional_call(model, gated, (x,)).detach())


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # torch has no attention for several clients at once
def test_the_gradient_by_the_gates_is_the_same_for_several_clients_at_once() -> None:
    model, x = made("itself")
    net = Network(model, x)

    def by_gates(gates: Tensor) -> Tensor:
        return net.gated(gates)._call(net.initial(), x, training=True)[0].pow(2).sum()

    gates = torch.rand(2, HEADS).double().round()
    by_gates(gates[0])  # traces the model, which cannot happen inside of vmap
    together = vmap(grad(by_gates))(gates)
    for row, alone in zip(gates, together, strict=True):
        leaf = row.clone().requires_grad_()
        gated = net.graph.gate(dict(model.named_parameters()), leaf)
        (wanted,) = torch.autograd.grad(functional_call(model, gated, (x,)).pow(2).sum(), leaf)
        torch.testing.assert_close(alone, wanted)


def test_masks_that_differ_among_heads_need_all_heads() -> None:
    model, x = made("each head")
    assert trace(model, x).uncut == {"attention.in_proj_weight"}


def test_weights_of_the_attention_bind_the_heads_only_where_they_are_used() -> None:
    def using(attention: nn.Module, x: Tensor) -> Tensor:
        out, weights = attention(x, x, x)
        return out + weights.sum(-1, keepdim=True)

    model, x = Attending(using, batch_first=True), torch.randn(3, LENGTH, 3)
    with pytest.raises(ConfigError, match=r"'attention\.in_proj_weight' is mixed into one by"):
        trace(model, x)
    model.call = lambda attention, x: attention(x, x, x)[0]
    assert [layer.size for layer in trace(model, x).layers] == [HEADS]


@pytest.mark.parametrize("options", [{"kdim": 6, "vdim": 6}, {"add_zero_attn": True}, {"add_bias_kv": True}])
def test_attention_with_weights_of_other_forms_stays_torchs_own(options: dict[str, bool]) -> None:
    attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
    Attention.replace(attention)
    assert type(attention) is nn.MultiheadAttention


def test_attention_with_all_heads_is_torchs_own_to_the_bit() -> None:
    model, x = made("itself")
    net = Network(model, x)
    used = net._pure(training=True).module
    assert type(used.attention) is Attention
    for own, other in ((model.train(), used), (model.eval(), used.eval())):
        assert torch.equal(own(x), other(x))
        with torch.no_grad():
            assert torch.equal(own(x), other(x))
    # the caller's model, and the one that is saved, stay what they were
    assert type(net.module(net.initial()).attention) is type(model.attention) is nn.MultiheadAttention


def test_a_network_runs_without_a_head_but_not_without_a_channel() -> None:
    sizes = {"width": 8, "depth": 1, "heads": 2, "hidden": 6}
    vit = Network(build("vit", (3, 8, 8), 3, sizes), torch.zeros(1, 3, 8, 8))
    assert [(layer.size, vit.runs_without(layer)) for layer in vit.graph.layers] == [(2, True), (6, True)]
    cnn = Network(build("cnn", (3, 8, 8), 3, {"hidden": [4, 5]}), torch.zeros(1, 3, 8, 8))
    assert not any(map(cnn.runs_without, cnn.graph.layers))


def test_without_heads_the_bias_of_the_last_layer_still_learns() -> None:
    model, x = made("itself")
    net = Network(model, x)
    none = torch.zeros(HEADS, dtype=torch.bool)
    batch = Batch(x, torch.zeros(3, LENGTH, 2).double().softmax(-1))
    net.sample_loss = lambda outputs, labels: (outputs - labels).pow(2).mean((1, 2))
    _, cut, _ = net.gradients(net.graph.slice(net.initial(), none), batch)
    _, gated, _ = net.gated(none.double()).gradients(net.initial(), batch)
    assert gated["attention.out_proj.bias"].abs().min() > 0
    for name, value in net.graph.slice(gated, none).items():
        torch.testing.assert_close(cut[name], value)
