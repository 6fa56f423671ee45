"""Whatever a server or a site sends in Flower's records: an answer, or an error of ours."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from fuzzing import cases, survives, texts
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedpews.flower.messages import (
    Request,
    SeedDownload,
    read_reply,
    read_request,
    reply_content,
    request_content,
)
from fedpews.flower.roster import Facts, hello_content, read_hello
from fedpews.flower.scores import FORMAT, ScoreCheck, score_records
from fedpews.methods.wire import BadMessage
from fedpews.tasks import Classification, Regression, Segmentation
from fedpews.tasks.task import Task

REQUEST = Request("a" * 32, 3, 0.1, (SeedDownload(0, b"bytes", 2, 1),), True)
FACTS = Facts(0, "0.1.0", "f" * 16, "3", 2, 10, 5, 0, "d" * 16)
whole = st.integers(-(2**63), 2**63 - 1)
single = st.one_of(whole, st.floats(), texts, st.binary(max_size=8), st.booleans())
values = st.one_of(
    single, st.lists(whole, max_size=3), st.lists(texts, max_size=3), st.lists(st.booleans(), max_size=2)
)
payloads = st.builds(
    lambda key, stype, data: ArrayRecord(
        {key: Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)}
    ),
    st.sampled_from(["payload", "x"]),
    st.sampled_from(["fedpews.wire", "numpy.ndarray"]),
    st.binary(max_size=8),
)


@st.composite
def spoilt_content(draw: st.DrawFn, make: Any) -> RecordDict:
    content = make()
    for name in list(content):
        how = draw(st.integers(0, 5))
        if how == 0:
            del content[name]
        elif how == 1:
            content[name] = draw(payloads)
        elif isinstance(content[name], ConfigRecord) and how < 5:
            key = draw(st.sampled_from(sorted(content[name])))
            kept = {k: v for k, v in content[name].items() if k != key}
            content[name] = ConfigRecord(kept | ({key: draw(values)} if how > 2 else {}))
    return content


def _reply() -> RecordDict:
    return reply_content({0: b"bytes"}, {})


@cases(150)
@given(
    request=spoilt_content(lambda: request_content(REQUEST)),
    reply=spoilt_content(_reply),
    hello=spoilt_content(lambda: hello_content(FACTS)),
)
def test_any_records_are_read_or_refused(request: RecordDict, reply: RecordDict, hello: RecordDict) -> None:
    survives(lambda: read_request(request))
    survives(lambda: read_hello(hello))
    survives(lambda: list(read_reply(reply, [0])))


def test_what_is_not_spoilt_is_read() -> None:
    assert read_request(request_content(REQUEST)) == REQUEST
    assert read_hello(hello_content(FACTS)) == FACTS


@pytest.mark.parametrize("seeds", [["../../../home/x"], [-1], [0.5], [True]])
def test_a_server_does_not_choose_where_a_site_writes(seeds: list[Any]) -> None:
    content = request_content(REQUEST)
    about = ConfigRecord(dict(content["request"]) | {"seeds": seeds})
    forged = RecordDict({"request": about, f"seed-{seeds[0]}": content["seed-0"]})
    with pytest.raises(BadMessage):
        read_request(forged)


SCORES = [Classification(), Regression(), Segmentation(metrics=("dice",))]
NAMES = sorted({name for task in SCORES for name in task.sum_names()})
sizes = st.one_of(st.integers(-2, 5), st.sampled_from([2**31, 2**40, 2**62]))
packed = st.builds(
    lambda shape, stype, dtype, data: Array(dtype=dtype, shape=tuple(shape), stype=stype, data=data),
    st.lists(sizes, max_size=3),
    st.sampled_from([FORMAT, "numpy.ndarray"]),
    st.sampled_from(["float64", "int8"]),
    st.one_of(
        st.binary(max_size=40),
        st.lists(st.floats(width=64), max_size=5).map(
            lambda numbers: struct.pack(f"<{len(numbers)}d", *numbers)
        ),
    ),
)


@cases(150)
@given(
    task=st.sampled_from(SCORES),
    arrays=st.dictionaries(st.one_of(st.sampled_from(NAMES), texts), packed, max_size=8),
    key=st.sampled_from(["test-0", "test-1"]),
    declared=st.integers(0, 6),
)
def test_any_score_is_read_or_refused(task: Task, arrays: dict[str, Array], key: str, declared: int) -> None:
    content = RecordDict({key: ArrayRecord(arrays)})
    survives(lambda: ScoreCheck(task, labels=4).read(content, "test", [0], declared))


@cases(150)
@given(
    spoilt=st.dictionaries(
        st.sampled_from(["loss", "weight", "correct", "seen"]), packed, min_size=1, max_size=2
    ),
    declared=st.sampled_from([0, 3, 4]),
)
def test_a_score_that_is_spoilt_in_places_is_read_or_refused(spoilt: dict[str, Array], declared: int) -> None:
    task = Classification()
    (whole,) = score_records({"test": {0: task.sums(torch.randn(4, 3), torch.arange(4) % 3)}}).values()
    content = RecordDict({"test-0": ArrayRecord(dict(whole) | spoilt)})
    survives(lambda: ScoreCheck(task, labels=1).read(content, "test", [0], declared))
