"""Laws that hold for every method, each of which can be false."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedpews.compose import METHODS, PERSONAL, find_class
from fedpews.compose import method as make
from fedpews.engines.compiled.program import check_padding, trace_step
from fedpews.methods.contract import Cohort, Method
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fednova import FedNova
from fedpews.methods.fedprox import FedProx
from fedpews.methods.partial_training import IST, FedRolex, FjORD, HeteroFL
from fedpews.methods.representations import Moon
from fedpews.methods.scaffold import Scaffold
from fedpews.running import run
from fedpews.testing import (
    Playground,
    Samples,
    Whole,
    check_alone,
    check_laws,
    check_method,
    check_same,
    small_clients,
    small_network,
)
from fedpews.warmup import Fixed, Learned, Random, with_warmup

BASES = [name for name in METHODS if find_class("method", name).takes_warmup]
OTHERS = [name for name in METHODS if not find_class("method", name).takes_warmup]


def ground(method: Method, clients: Sequence[Samples] | None = None) -> Playground:
    return Playground(method, small_network(), small_clients() if clients is None else clients)


def check_close(a: Playground, b: Playground, rounds: int = 3) -> None:
    for one, other in zip(a.play(rounds).params, b.play(rounds).params, strict=True):
        for name, value in one.items():
            assert torch.allclose(value, other[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("name", OTHERS)
def test_every_method_keeps_the_contract(name: str) -> None:
    check_method(make(name))


@pytest.mark.parametrize("name", ["fedper", "fedrep", "ditto", "local", "fedper+pews", "ditto+pews"])
def test_every_way_to_models_of_clients_own_keeps_the_contract(name: str) -> None:
    options = {"warmup": {"rounds": 2}} if "pews" in name else {}
    check_laws(ground(make(name, **options)))


@pytest.mark.parametrize("name", BASES)
def test_every_base_optimiser_keeps_the_contract_bare(name: str) -> None:
    check_laws(ground(make(name)))


@pytest.mark.parametrize(
    "masks",
    [
        Learned(),
        Learned(upload="masks", gradient="gate", start_spread=0.0),
        Learned(upload_mask="thresholded", draw="round", start_common=True),
        Fixed(),
        Random(),
        Random(density=0.5, redraw=True),
    ],
    ids=["learned", "masks", "thresholded", "fixed", "random", "redrawn"],
)
@pytest.mark.parametrize("name", BASES)
def test_every_base_optimiser_keeps_the_contract_in_a_warmup(
    name: str, masks: Learned | Fixed | Random
) -> None:
    check_laws(ground(with_warmup(make(name), 2, masks)))


@pytest.mark.parametrize("name", BASES)
def test_what_one_client_alone_owns_moves_as_if_there_were_no_other(name: str) -> None:
    check_alone(make(name), rounds=4)


def test_scaffold_moves_an_element_with_one_owner_as_fedavg_does_in_every_round() -> None:
    scaffold, fedavg = (
        ground(with_warmup(method, 4, Fixed()), small_clients(4)).play(4) for method in (Scaffold(), FedAvg())
    )
    net = small_network()
    # four neurons a layer and four clients: a weight between two layers has one owner, or none
    owned = torch.eye(4, dtype=torch.bool)
    for one, other in zip(scaffold.params[:2], fedavg.params[:2], strict=True):
        moved, expected = (after["2.weight"] - net.initial()["2.weight"] for after in (one, other))
        assert bool((moved[~owned] == 0).all())
        # shared biases of the output differ a little from round 2 on, a quarter of the step would be 0.25
        assert float((moved[owned].norm() / expected[owned].norm()).log().abs()) < 0.2


def test_scaffolds_server_control_is_the_mean_of_the_clients_again_after_a_warmup() -> None:
    played = ground(with_warmup(Scaffold(), 2, Learned())).partly(4)
    controls = [memory["inner"]["control"] for memory in played.memories.values()]
    cohort = Cohort(5, (0, 1, 2), 3, seed=0)
    for name in controls[0]:
        mean = torch.stack([control[name] for control in controls]).mean(0)
        sent = Scaffold().mean_control(played.state["inner"], name, cohort)
        torch.testing.assert_close(sent, mean, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", BASES)
def test_zero_warmup_rounds_equal_the_bare_method(name: str) -> None:
    bare, wrapped = ground(make(name)), ground(with_warmup(make(name), 0))
    check_same(bare.partly(3), wrapped.partly(3), "no warmup is a warmup", deep=False)


@pytest.mark.parametrize("name", BASES)
def test_all_ones_masks_equal_the_bare_method(name: str) -> None:
    bare, whole = ground(make(name)), ground(Whole(make(name)))
    check_same(bare.partly(3), whole.partly(3), "open masks mask", deep=False)


@pytest.mark.parametrize("name", BASES)
def test_a_warmup_is_not_the_bare_method(name: str) -> None:
    with pytest.raises(AssertionError, match="differ"):
        check_same(
            ground(make(name)).play(1), ground(with_warmup(make(name), 1)).play(1), "differ", deep=False
        )


@pytest.mark.parametrize("name", ["scaffold", "moon"])
def test_client_memory_survives_the_end_of_the_warmup(name: str) -> None:
    """After the switch the method goes on with what it learnt in the warmup: forgetting it changes the model."""
    whole = ground(with_warmup(make(name), 2, Fixed()))
    forgetful = replace(
        whole, keep=lambda nest: nest if "warmup" in nest else {"inner": _blank(nest["inner"])}
    )
    with pytest.raises(AssertionError, match="differ"):
        check_same(whole.play(3), forgetful.play(3), "differ", deep=False)


def _blank(memory: dict[str, object]) -> dict[str, object]:
    return {k: _blank(v) if isinstance(v, dict) else torch.zeros_like(v) for k, v in memory.items()}  # type: ignore[call-overload]


def test_fedprox_without_strength_is_fedavg() -> None:
    check_same(ground(FedProx(mu=0.0)).partly(3), ground(FedAvg()).partly(3), "", deep=False)


def test_fednova_with_equal_steps_is_fedavg() -> None:
    equal = [(x[:8], y[:8]) for x, y in small_clients()]
    check_close(ground(FedNova(), equal), ground(FedAvg(), equal))
    with pytest.raises(AssertionError):  # with unequal steps it is not
        check_close(
            ground(FedNova(), [equal[0], (equal[1][0][:4], equal[1][1][:4])]),
            ground(FedAvg(), [equal[0], (equal[1][0][:4], equal[1][1][:4])]),
        )


# with θ near 1 every neuron is open in every step, so that all elements take equal steps
@pytest.mark.parametrize(
    "masks", [Learned(start=20.0, start_spread=0.0), Fixed()], ids=["learned, all open", "fixed"]
)
def test_fednova_with_equal_steps_is_fedavg_in_a_warmup_too(masks: Learned | Fixed) -> None:
    equal = [(x[:8], y[:8]) for x, y in small_clients()]
    check_close(
        ground(with_warmup(FedNova(), 2, masks), equal), ground(with_warmup(FedAvg(), 2, masks), equal)
    )


@pytest.mark.parametrize("base", [FedNova(), FedNova(momentum=0.5), FedNova(mu=0.5)], ids=repr)
def test_fednova_in_a_warmup_normalises_every_element_by_the_steps_it_took(base: FedNova) -> None:
    trial = ground(with_warmup(base, 1, Learned()))
    played, old, name = trial.play(1), trial.net.initial(), "2.weight"
    uploads = played.uploads[0]
    masks = [trial.net.graph.expand(upload.neurons)[name] for upload in uploads]  # type: ignore[arg-type]
    unequal = 0
    for row in range(4):
        for column in range(4):
            owners = [u for u, mask in zip(uploads, masks, strict=True) if mask[row, column]]
            x = old[name][row, column]
            work = [float(u.extra["work_each"][name][row, column]) for u in owners]
            unequal += len(set(work)) > 1
            steps = [
                (x - u.params[name][row, column]) / a for u, a in zip(owners, work, strict=True) if a > 0
            ]
            wanted = x - sum(steps) / len(steps) * sum(work) / len(work) if steps else x
            torch.testing.assert_close(played.params[0][name][row, column], torch.as_tensor(wanted))
    assert unequal


def test_scaffold_is_fedavg_in_its_first_round_only() -> None:
    check_same(ground(Scaffold()).play(1), ground(FedAvg()).play(1), "", deep=False)
    with pytest.raises(AssertionError, match="differ"):
        check_same(ground(Scaffold()).play(2), ground(FedAvg()).play(2), "differ", deep=False)


def test_scaffold_with_one_client_is_local_sgd() -> None:
    alone = small_clients(1)
    check_close(ground(Scaffold(), alone), ground(FedAvg(), alone))


@pytest.mark.parametrize(
    "method", [FjORD(tiers=(1.0,)), HeteroFL(widths=(1.0,)), FedRolex(widths=(1.0,)), Moon(mu=0.0)]
)
def test_at_full_width_or_no_strength_it_is_fedavg(method: Method) -> None:
    check_same(ground(method).partly(3), ground(FedAvg()).partly(3), "", deep=False)


def test_fedrolex_at_full_width_is_heterofl_at_full_width() -> None:
    a, b = FedRolex(widths=(1.0,)), HeteroFL(widths=(1.0,))
    check_same(ground(a).partly(3), ground(b).partly(3), "")


def test_ist_with_one_client_is_local_sgd() -> None:
    alone = small_clients(1)
    check_same(ground(IST(), alone).play(3), ground(FedAvg(), alone).play(3), "", deep=False)


@pytest.mark.parametrize("name", [*BASES, "lotteryfl", "fedweit"])
def test_it_does_not_matter_which_client_is_called_first(name: str) -> None:
    clients = small_clients()
    method = make(name)
    check_close(ground(method, clients), ground(method, clients[::-1]))


def data(count: int = 3) -> tuple[list[Samples], Samples]:
    clients = [(torch.cat([x] * 3), torch.cat([y] * 3)) for x, y in small_clients(count)]
    return clients, (torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]))


SETTINGS = {"seeds": [0, 1], "participation": 0.67, "train": {"lr": 0.1, "batch_size": 4}}
ALL = [
    *METHODS,
    *(name for name in PERSONAL if name != "fedbn"),
    "fedavg+pews-random",
    *(f"{base}+{kind}" for base in BASES for kind in ("pews", "pews-fixed")),
]


def settings(name: str, rounds: int, **more: object) -> dict[str, object]:
    warmup = {"warmup": {"rounds": 2}} if "pews" in name else {}
    return {"method": name, "rounds": rounds, **SETTINGS, **warmup, **more}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize("name", ALL)
def test_the_number_of_workers_changes_nothing(name: str) -> None:
    clients, test = data()
    one, two = (
        run(
            model=model,
            clients=clients,
            test=test,
            **settings(name, 3, runtime={"workers": n, "engine": "eager"}),
        )
        for n in (1, 2)
    )
    for a, b in zip(one.rounds, two.rounds, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }


@pytest.mark.parametrize("name", ALL)
def test_a_run_that_stops_and_goes_on_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    clients, test = data()

    class Stop(Exception):
        pass

    def stop(records: object) -> None:
        if records[0]["round"] == 3:  # type: ignore[index]
            raise Stop

    from fedpews.callbacks import Callback

    given = {"model": model, "clients": clients, "test": test}
    options = settings(name, 4, runtime={"engine": "eager", "checkpoint_every": 2})
    with pytest.raises(Stop):
        run(**given, out=tmp_path / "run", callbacks=[Callback(round=stop)], **options)
    resumed = run(**given, out=tmp_path / "run", resume=True, **options)
    straight = run(**given, **options)
    for seed, params in straight.params.items():
        for tensor in params:
            assert torch.equal(params[tensor], resumed.params[seed][tensor]), tensor
    for a, b in zip(straight.rounds, resumed.rounds, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }


@pytest.mark.parametrize(
    "name", [*METHODS, *(f"{base}+{kind}" for base in BASES for kind in ("pews", "pews-fixed"))]
)
def test_every_step_can_be_compiled(name: str) -> None:
    """Traced for two clients at once, and padding a batch changes nothing, as the compiled engine needs it."""
    base, _, warmup = name.partition("+")
    method = make(base)
    if warmup:
        method = with_warmup(method, 3, Learned() if warmup == "pews" else Fixed())
    place = ground(method)
    net, (x, y) = place.net, (torch.cat(parts) for parts in zip(*place.clients, strict=True))
    state = method.init(net, net.initial(), 3)
    half = method.client(method.phase(state, 1))
    download = method.downloads(net, state, Cohort(1, (0, 1, 2), 3, seed=0))[0]
    local, _, noise = place.begin(half, 0, download, None)
    check_padding(net, half, local, x, y, noise[0], 0.1)
    program = trace_step(net, half, local, 2, 4, x, y)
    assert any(program.changes)
