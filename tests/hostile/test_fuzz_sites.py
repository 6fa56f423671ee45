"""Whatever a server or a site sends in Flower's records: an answer, or an error of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from fuzzing import cases, survives, texts
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedpews.flower.checks import ScoreCheck
from fedpews.flower.hello import Facts, hello_content, read_hello
from fedpews.flower.messages import (
    Request,
    SeedDownload,
    pack,
    read_reply,
    read_request,
    reply_content,
    request_content,
)
from fedpews.methods.wire import BadMessage
from fedpews.tasks import Classification, Regression, Segmentation
from fedpews.tasks.metrics import Sums
from fedpews.tasks.task import Task

REQUEST = Request("a" * 32, 3, 0.1, (SeedDownload(0, b"bytes", 2, 1),))
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
    return reply_content({0: b"bytes"})


@cases(150)
@given(
    request=spoilt_content(lambda: request_content(REQUEST)),
    reply=spoilt_content(_reply),
    hello=spoilt_content(lambda: hello_content(FACTS)),
)
def test_any_records_are_read_or_refused(request: RecordDict, reply: RecordDict, hello: RecordDict) -> None:
    survives(lambda: read_request(request))
    survives(lambda: read_hello(hello))
    survives(lambda: read_reply(reply, 0))


def test_what_is_not_spoilt_is_read() -> None:
    assert read_request(request_content(REQUEST)) == REQUEST
    assert read_hello(hello_content(FACTS)) == FACTS


def _forge(**changes: Any) -> RecordDict:
    """A request whose JSON is changed, with a payload under the name that its seed asks for."""
    content = request_content(REQUEST)
    about = json.loads(content["request"]["request"])
    sent = about["downloads"][0] | {key: changes.pop(key) for key in ("seed", "kept") if key in changes}
    text = json.dumps(about | {"downloads": [sent]} | changes)
    return RecordDict(
        {"request": ConfigRecord({"request": text.encode()}), f"seed-{sent['seed']}": content["seed-0"]}
    )


@pytest.mark.parametrize("seed", ["../../../home/x", -1, 0.5, True])
def test_a_server_does_not_choose_where_a_site_writes(seed: Any) -> None:
    with pytest.raises(BadMessage):
        read_request(_forge(seed=seed))


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), whole, st.floats(), texts), lambda inner: st.lists(inner, max_size=3)
)


@cases(150)
@given(
    key=st.sampled_from(["run", "round", "lr", "downloads", "scaling", "seed", "kept"]),
    value=json_values,
)
def test_any_request_in_json_is_read_or_refused(key: str, value: Any) -> None:
    survives(lambda: read_request(_forge(**{key: value})))


SCORES = [Classification(), Regression(), Segmentation(metrics=("dice",))]
NAMES = sorted({name for task in SCORES for name in task.sum_names})
sizes = st.one_of(st.integers(-2, 5), st.sampled_from([2**31, 2**40, 2**62]))
tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F64", "I8", "BOOL", "F8_E4M3", "X"]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.tuples(st.integers(0, 8), st.integers(0, 48)),
    }
)


@cases(150)
@given(
    task=st.sampled_from(SCORES),
    header=st.dictionaries(st.one_of(st.sampled_from(NAMES), texts), tensors, max_size=8),
    data=st.binary(max_size=48),
    key=st.sampled_from(["test-0", "test-1"]),
    declared=st.integers(0, 6),
)
def test_any_score_is_read_or_refused(task: Task, header: Any, data: bytes, key: str, declared: int) -> None:
    text = json.dumps(header).encode()
    content = RecordDict({key: pack(len(text).to_bytes(8, "little") + text + data)})
    survives(lambda: ScoreCheck(task, labels=4).read(content, "test", [0], declared))


numbers = st.builds(
    lambda shape, value: torch.full(shape, value, dtype=torch.float64),
    st.lists(st.integers(0, 3), max_size=3),
    st.floats(width=64),
)


@cases(150)
@given(
    spoilt=st.dictionaries(
        st.sampled_from(["loss", "weight", "correct", "seen"]), numbers, min_size=1, max_size=2
    ),
    declared=st.sampled_from([0, 3, 4]),
)
def test_a_score_that_is_spoilt_in_places_is_read_or_refused(spoilt: Sums, declared: int) -> None:
    task = Classification()
    sums = task.sums(torch.randn(4, 3), torch.arange(4) % 3) | spoilt
    content = reply_content({}, {"test": {0: sums}})
    survives(lambda: ScoreCheck(task, labels=1).read(content, "test", [0], declared))
