"""Clients of unequal rank: who has which component of an adapter, and how components are averaged."""

from __future__ import annotations

import pytest
import torch

from adapted import A, B, adapted_model
from fedpews.compose import method
from fedpews.errors import ConfigError
from fedpews.methods.contract import Method
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.partial_training import HeteroFL
from fedpews.methods.scaffold import Scaffold
from fedpews.methods.wire import message_sizes
from fedpews.neurons.network import Network
from fedpews.testing import Playground, check_laws, small_clients, small_network
from fedpews.testing.playground import Played
from fedpews.warmup import Fixed, Learned, with_warmup
from fedpews.warmup.ranks import Ranks


@pytest.fixture(scope="module")
def net() -> Network:
    return Network(adapted_model(), torch.zeros(1, 3))


def play(net: Network, made: Method, rounds: int = 1, clients: int = 2) -> Played:
    return Playground(made, net, small_clients(clients)).play(rounds)


def test_a_component_is_a_row_of_a_with_its_column_of_b(net: Network) -> None:
    assert net.graph.size == 3
    mask = net.graph.expand(torch.tensor([True, False, True]))
    assert mask[A].expand(3, 3).tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert mask[B].expand(4, 3).tolist() == [[True, False, True]] * 4


def test_a_component_is_averaged_over_the_clients_that_have_it(net: Network) -> None:
    played = play(net, Ranks(FedAvg(), (3, 1)))
    first, second = (upload.params for upload in played.uploads[0])
    torch.testing.assert_close(played.params[0][A][0], (first[A][0] + second[A][0]) / 2)
    assert torch.equal(played.params[0][A][1:], first[A][1:])
    assert torch.equal(played.params[0][B][:, 1:], first[B][:, 1:])


def test_with_padding_a_client_of_smaller_rank_counts_as_zero(net: Network) -> None:
    played = play(net, Ranks(FedAvg(), (3, 1), padding=True))
    first = played.uploads[0][0].params
    torch.testing.assert_close(played.params[0][A][1:], first[A][1:] / 2)
    torch.testing.assert_close(played.params[0][B][:, 1:], first[B][:, 1:] / 2)


def test_padding_leaves_a_component_that_no_client_trained_as_it_was(net: Network) -> None:
    # of three components and two clients Fixed gives the first two to client 0, and the third to client 1, whose
    # rank is too small for it
    played = play(net, Ranks(with_warmup(FedAvg(), 1, Fixed()), (3, 2), padding=True))
    assert [upload.neurons.tolist() for upload in played.uploads[0]] == [  # type: ignore[union-attr]
        [True, True, False],
        [False, False, False],
    ]
    assert torch.equal(played.params[0][A][2], net.initial()[A][2])


def test_with_equal_ranks_nothing_changes(net: Network) -> None:
    plain, ranked, padded = (
        play(net, made, 2).params[-1]
        for made in (FedAvg(), Ranks(FedAvg(), (3,)), Ranks(FedAvg(), (3, 3), padding=True))
    )
    for other in (ranked, padded):
        assert all(torch.allclose(plain[name], other[name]) for name in plain)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("masks", [Learned(), Fixed()])
def test_no_client_sends_a_component_beyond_its_rank(
    net: Network, masks: Learned | Fixed, padding: bool
) -> None:
    made = Ranks(with_warmup(FedAvg(), 2, masks), (3, 2), padding)
    played = play(net, made, rounds=4)
    for uploads in played.uploads:
        assert all(upload.neurons is not None for upload in uploads)
        assert not uploads[1].neurons[2]  # type: ignore[index]
    # after the warmup each has all of its own rank
    assert [upload.neurons.tolist() for upload in played.uploads[3]] == [  # type: ignore[union-attr]
        [True, True, True],
        [True, True, False],
    ]


def test_a_smaller_rank_sends_and_receives_fewer_bytes(net: Network) -> None:
    played = play(net, Ranks(FedAvg(), (3, 1)))
    large, small = message_sizes(net, played.downloads[0])
    # two components of 3 + 4 numbers of 4 bytes each
    assert large - small == 2 * (3 + 4) * 4
    large, small = message_sizes(net, played.uploads[0])
    assert large - small == 2 * (3 + 4) * 4


@pytest.mark.parametrize(
    "made",
    [
        Ranks(FedAvg(), (3, 1)),
        Ranks(FedAvg(), (3, 1), padding=True),
        Ranks(Scaffold(), (3, 1)),
        Ranks(with_warmup(FedAvg(), 2, Learned()), (3, 2)),
    ],
    ids=["fedavg", "padded", "scaffold", "learned"],
)
def test_a_method_with_ranks_keeps_the_laws(net: Network, made: Method) -> None:
    check_laws(Playground(made, net, small_clients(3)), rounds=3)


def test_ranks_refuse_a_method_that_trains_parts_by_a_rule_of_its_own() -> None:
    for made in (HeteroFL(), method("fedavg+ditto")):
        with pytest.raises(ConfigError, match=r"model\.lora\.ranks goes with methods that train all"):
            Ranks(made, (2,))


def test_ranks_refuse_a_model_without_adapters() -> None:
    with pytest.raises(ConfigError, match="no component of an adapter can be masked"):
        play(small_network(), Ranks(FedAvg(), (2,)))
