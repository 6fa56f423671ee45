"""The edge where foreign bytes come in: thousands of malformed uploads, none accepted, none a crash."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn

from fedpews.compose import method as make
from fedpews.config import FlowerTable
from fedpews.engines.engine import Job, Schedule
from fedpews.errors import RunFailed
from fedpews.flower.checks import NormRule, UploadCheck, norms, sample_upload
from fedpews.methods.contract import Cohort, Method, Upload
from fedpews.methods.wire import LOSS, BadMessage, encode_upload
from fedpews.neurons.network import Network
from fedpews.server import check_update
from fedpews.warmup import Fixed, Learned, with_warmup

NET = Network(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4)), torch.zeros(1, 3))
ROUND, CLIENT = 2, 1
METHODS: dict[str, Callable[[], Method]] = {
    "fedavg": lambda: make("fedavg"),
    "fedavg+pews": lambda: with_warmup(make("fedavg"), 5),
    "masks only": lambda: with_warmup(make("fedavg"), 5, Learned(upload="masks")),
    "fedavg+pews-fixed": lambda: with_warmup(make("fedavg"), 5, Fixed()),
    "scaffold+pews": lambda: with_warmup(make("scaffold"), 5),
    "fedpm": lambda: make("fedpm"),
}
EXAMPLES = int(os.environ.get("FEDPEWS_FUZZ", "100"))
"""For each of 6 methods and 6 kinds of malformation: 3,600 uploads."""

many = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@functools.cache
def scene(name: str) -> tuple[UploadCheck, Job, Upload, bytes]:
    """A method in its second round, one of its clients, and an honest upload of that client."""
    method = METHODS[name]()
    state = method.init(NET, NET.initial(), 2)
    cohort = Cohort(ROUND, (0, CLIENT), 2, seed=0)
    download = method.downloads(NET, state, cohort)[1]
    job = Job(0, CLIENT, method.client(method.phase(state, ROUND)), download, None, lr=0.1)
    honest = sample_upload(NET, job)
    return (
        UploadCheck(NET, FlowerTable(max_samples=1000), Schedule(batch_size=2)),
        job,
        honest,
        encode_upload(NET, honest),
    )


def refused(name: str, data: bytes) -> bool:
    check, job, _, _ = scene(name)
    try:
        check.read(job, data)
    except BadMessage as error:
        return bool(str(error))
    return False


def taken_apart(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return load(data), json.loads(header["__metadata__"]["about"])


def put_together(tensors: dict[str, Tensor], about: Any) -> bytes:
    data: bytes = save({k: v.contiguous() for k, v in tensors.items()}, {"about": json.dumps(about)})
    return data


@pytest.mark.parametrize("name", METHODS)
def test_an_honest_upload_is_accepted_as_it_is(name: str) -> None:
    check, job, honest, data = scene(name)
    read = check.read(job, data)
    assert (read.client, read.round, read.samples) == (CLIENT, ROUND, honest.samples)
    owned = honest.ownership(NET) or {}
    for key, value in honest.params.items():
        kept = torch.where(owned[key].bool().expand_as(value), value, 0) if key in owned else value
        assert torch.equal(read.params[key], kept.to(value.dtype))


@pytest.mark.parametrize("name", METHODS)
@many
@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused(name: str, data: bytes) -> None:
    assert refused(name, data)


@pytest.mark.parametrize("name", METHODS)
@many
@given(data=st.data())
def test_a_cut_or_lengthened_upload_is_refused(name: str, data: st.DataObject) -> None:
    honest = scene(name)[3]
    if data.draw(st.booleans()):
        spoilt = honest[: data.draw(st.integers(0, len(honest) - 1))]
    else:
        spoilt = honest + data.draw(st.binary(min_size=1, max_size=50))
    assert refused(name, spoilt)


@pytest.mark.parametrize("name", METHODS)
@many
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_never_gets_a_wrong_upload_through(name: str, place: float, bit: int) -> None:
    """A flipped bit of a weight is another weight, which nobody can tell; but what is accepted is whole."""
    check, job, honest, data = scene(name)
    spoilt = bytearray(data)
    spoilt[int(place * len(spoilt))] ^= 1 << bit
    try:
        read = check.read(job, bytes(spoilt))
    except BadMessage:
        return
    assert (read.client, read.round) == (CLIENT, ROUND)
    assert 1 <= read.samples <= 1000
    assert 1 <= read.steps <= 10**9
    assert math.isfinite(read.loss)
    trees = {
        "params": (read.params, honest.params),
        **{k: (read.extra[k], t) for k, t in honest.extra.items()},
    }
    for given_tree, expected in trees.values():
        assert {k: (v.shape, v.dtype) for k, v in given_tree.items()} == {
            k: (v.shape, v.dtype) for k, v in expected.items()
        }
        assert all(bool(torch.isfinite(value).all()) for value in given_tree.values())


ODD_NUMBERS = st.one_of(
    st.none(), st.booleans(), st.text(max_size=5), st.lists(st.integers(), max_size=2), st.just({}), st.just(math.nan)
)  # fmt: skip
WRONG = {
    "client": st.one_of(ODD_NUMBERS, st.integers().filter(lambda n: n != CLIENT), st.floats()),
    "round": st.one_of(ODD_NUMBERS, st.integers().filter(lambda n: n != ROUND), st.floats()),
    "samples": st.one_of(ODD_NUMBERS, st.integers(max_value=0), st.integers(min_value=1001), st.floats()),
    "steps": st.one_of(ODD_NUMBERS, st.integers(max_value=0), st.integers(min_value=10**9 + 1), st.floats()),
    "loss": st.one_of(
        ODD_NUMBERS,
        st.floats(),
        st.sampled_from([math.nan, math.inf, -math.inf]).map(lambda x: LOSS.pack(x).hex()),
    ),
    "trees": st.one_of(ODD_NUMBERS, st.just({"params": 3}), st.just({"params": {"names": ["0.weight"]}})),
}


@pytest.mark.parametrize("name", METHODS)
@many
@given(data=st.data())
def test_a_wrong_number_in_the_header_is_refused(name: str, data: st.DataObject) -> None:
    tensors, about = taken_apart(scene(name)[3])
    key = data.draw(st.sampled_from(sorted(WRONG)))
    if data.draw(st.integers(0, 9)) == 0:
        del about[key]
    else:
        about[key] = data.draw(WRONG[key])
    assert refused(name, put_together(tensors, about))


DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.uint8, torch.float32)


@pytest.mark.parametrize("name", METHODS)
@many
@given(data=st.data())
def test_a_tensor_that_is_missing_renamed_resized_or_of_another_type_is_refused(
    name: str, data: st.DataObject
) -> None:
    tensors, about = taken_apart(scene(name)[3])
    key = data.draw(st.sampled_from(sorted(tensors)))
    value = tensors[key]
    what = data.draw(st.sampled_from(["drop", "rename", "add", "shorter", "longer", "type", "shape"]))
    if what == "drop":
        del tensors[key]
    elif what == "rename":
        del tensors[key]
        tensors[
            data.draw(st.text(min_size=1, max_size=8).filter(lambda k: k not in tensors and k != key))
        ] = value
    elif what == "add":
        other = st.text(min_size=1, max_size=8).filter(lambda k: k not in tensors and k != "__metadata__")
        tensors[data.draw(other)] = torch.zeros(data.draw(st.integers(0, 3)))
    elif what == "shorter":
        tensors[key] = value[: data.draw(st.integers(0, len(value) - 1))]
    elif what == "longer":
        tensors[key] = torch.cat([value, value[: data.draw(st.integers(1, len(value)))]])
    elif what == "type":
        tensors[key] = value.to(data.draw(st.sampled_from([d for d in DTYPES if d != value.dtype])))
    else:
        tensors[key] = value[None]
    assert refused(name, put_together(tensors, about))


@pytest.mark.parametrize("name", METHODS)
@many
@given(data=st.data())
def test_values_that_make_no_sense_are_refused(name: str, data: st.DataObject) -> None:
    _, _, honest, _ = scene(name)
    trees = {"params": honest.params, **honest.extra}
    floats = [(t, n) for t, tree in trees.items() for n, v in tree.items() if v.is_floating_point()]
    choices = ["names", *(["nan"] if floats else []), *(["theta"] if "theta" in honest.extra else [])]
    what = data.draw(st.sampled_from(choices))
    tree, leaf = data.draw(st.sampled_from(floats)) if floats else ("params", next(iter(honest.params)))
    if what == "theta":
        tree, leaf = "theta", "neurons"
    value = trees[tree][leaf].clone()
    position = data.draw(st.integers(0, value.numel() - 1))
    if honest.neurons is not None:  # everything is sent, so that the bad value is sent too
        honest = replace(honest, neurons=torch.ones_like(honest.neurons))
    if honest.mask is not None:
        honest = replace(honest, mask={k: torch.ones_like(m) for k, m in honest.mask.items()})
    if what == "nan":
        value.view(-1)[position] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        changed = {**trees[tree], leaf: value}
    elif what == "theta":
        outside = st.floats(1.001, 1e30) | st.floats(-1e30, -1e-30)
        value.view(-1)[position] = data.draw(outside)
        changed = {**trees[tree], leaf: value}
    else:
        changed = dict(trees[tree])
        if data.draw(st.booleans()):
            del changed[leaf]
        else:
            changed[data.draw(st.text(max_size=9).filter(lambda n: n not in changed))] = value
    if tree == "params":
        bad = replace(honest, params=changed)
    else:
        bad = replace(honest, extra={**honest.extra, tree: changed})
    assert refused(name, encode_upload(NET, bad))


def test_owning_other_neurons_than_assigned_is_refused() -> None:
    honest = scene("fedavg+pews-fixed")[2]
    assert honest.neurons is not None
    for neuron in range(NET.graph.size):
        neurons = honest.neurons.clone()
        neurons[neuron] ^= True
        assert refused("fedavg+pews-fixed", encode_upload(NET, replace(honest, neurons=neurons)))


@pytest.mark.parametrize(("name", "other"), [("fedavg", "fedavg+pews"), ("fedavg+pews", "fedavg")])
def test_an_upload_of_another_phase_is_refused(name: str, other: str) -> None:
    assert refused(name, scene(other)[3])


def test_an_upload_far_too_large_is_refused_before_it_is_read() -> None:
    check, job, _, data = scene("fedavg")
    with pytest.raises(BadMessage, match="at most"):
        check.read(job, data + bytes(10_000))


def test_a_change_above_the_norm_bound_is_refused_and_one_below_is_not() -> None:
    _, job, honest, _ = scene("fedavg")
    moved = replace(honest, params=dict(job.download.params))
    moved.params["0.bias"] = job.download.params["0.bias"] + 3.0  # six elements: a norm of 3·√6 = 7.35
    data = encode_upload(NET, moved)
    UploadCheck(NET, FlowerTable(max_norm=7.4), Schedule(batch_size=2)).read(job, data)
    with pytest.raises(BadMessage, match=r"norm 7\.34"):
        UploadCheck(NET, FlowerTable(max_norm=7.3), Schedule(batch_size=2)).read(job, data)


def changed(honest: Upload, job: Job, factor: float) -> Upload:
    """The honest upload with its change multiplied."""
    old = job.download.params
    return replace(honest, params={n: old[n] + factor * (v - old[n]) for n, v in honest.params.items()})


def a_round(factor: float, part: str = "params", method: str = "scaffold+pews") -> dict[int, str]:
    """Three honest clients and one whose upload is multiplied: who is refused."""
    _, job, honest, _ = scene(method)
    honest = replace(honest, neurons=None)
    bad = changed(honest, job, factor)
    if part != "params":
        control = {n: factor * v for n, v in honest.extra[part].items()}
        bad = replace(honest, extra={**honest.extra, part: control})
    found = {client: (norms(NET, up, job.download), 1) for client, up in enumerate([honest] * 3 + [bad])}
    return NormRule(5.0).check(found)


@pytest.mark.parametrize("part", ["params", "control"])
@pytest.mark.parametrize("factor", [1e30, 1e15, -10.0, 10.0])
def test_an_upload_far_above_the_rounds_median_is_refused_whatever_part_of_it_is(
    part: str, factor: float
) -> None:
    bad = a_round(factor, part)
    assert list(bad) == [3]
    assert f"its {part} has norm" in bad[3]


def test_an_upload_near_the_rounds_median_is_accepted() -> None:
    assert a_round(3.0) == {}
    assert a_round(-1.0) == {}


def test_of_two_the_smaller_is_the_median_and_the_run_so_far_is_remembered() -> None:
    rule = NormRule(5.0)
    assert list(rule.check({0: ({"params": 1.0}, 1), 1: ({"params": 6.0}, 1)})) == [1]
    for _ in range(3):
        rule.accept({"params": 2.0}, 1)
    # the other hardly moves any more: 6 is below 5 times the run's median of 2
    assert rule.check({0: ({"params": 0.01}, 1), 1: ({"params": 6.0}, 1)}) == {}


def test_a_site_with_much_more_data_may_move_more() -> None:
    # 100 times the steps: a change of up to 5·100 times the other's is what steps can explain
    assert NormRule(5.0).check({0: ({"params": 1.0}, 10), 1: ({"params": 90.0}, 1000)}) == {}
    assert NormRule(5.0).check({0: ({"params": 1.0}, 10), 1: ({"params": 1.0}, 1)}) == {}


def test_two_sites_that_hardly_move_are_both_accepted() -> None:
    small = {0: ({"params": 0.002}, 10), 1: ({"params": 0.014}, 10)}
    assert list(NormRule(5.0).check(small)) == [1]
    assert list(NormRule(5.0).check(small, model=5.0)) == []  # 1 % of 5 is 0.05
    assert list(NormRule(5.0).check(small | {1: ({"params": 0.06}, 10)}, model=5.0)) == [1]


def test_the_norm_bound_covers_what_a_method_adds() -> None:
    _, job, honest, _ = scene("scaffold+pews")
    control = {n: torch.full_like(v, 1e30) for n, v in honest.extra["control"].items()}
    data = encode_upload(NET, replace(honest, extra={**honest.extra, "control": control}))
    with pytest.raises(BadMessage, match="its control has norm"):
        UploadCheck(NET, FlowerTable(max_norm=1.0), Schedule(batch_size=2)).read(job, data)


def test_samples_must_be_those_declared_and_steps_those_that_follow() -> None:
    check, job, honest, data = scene("fedavg")
    check.read(job, data, samples=2)
    with pytest.raises(BadMessage, match="samples is 2, and the site declared 3"):
        check.read(job, data, samples=3)
    with pytest.raises(BadMessage, match="with 2 samples it must be 1"):
        check.read(job, encode_upload(NET, replace(honest, steps=2)))
    with pytest.raises(BadMessage, match="training loss is -"):
        check.read(job, encode_upload(NET, replace(honest, loss=-0.5)))


def test_a_broken_aggregate_is_not_kept_and_the_largest_upload_is_named() -> None:
    honest = scene("fedavg")[2]
    large = replace(honest, client=7, params={n: v + 1e30 for n, v in honest.params.items()})
    good, bad = {"params": {"w": torch.zeros(2)}}, {"params": {"w": torch.tensor([0.0, math.inf])}}
    check_update(good, good, [honest, large], seed=0)
    with pytest.raises(RunFailed, match="of client 7"):
        check_update(good, bad, [honest, large], seed=0)
    # what was not finite before is no upload's fault
    check_update({"loss": torch.tensor(math.nan)}, {"loss": torch.tensor(math.nan)}, [honest], seed=0)
