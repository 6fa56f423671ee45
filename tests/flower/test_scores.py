"""What sites say of a model on their own samples: sums, checked before they are believed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from flwr.app import RecordDict

from fedpews.errors import ConfigError
from fedpews.flower.checks import ScoreCheck
from fedpews.flower.messages import pack, reply_content
from fedpews.methods.wire import BadMessage
from fedpews.tasks import Classification, Multilabel, Regression, Segmentation
from fedpews.tasks.metrics import Sums
from fedpews.tasks.task import Task

SAMPLES = 20


def honest(task: Task, samples: int = SAMPLES) -> Sums:
    generator = torch.Generator().manual_seed(0)
    if isinstance(task, Regression):
        return task.sums(
            torch.randn(samples, 1, generator=generator), torch.randn(samples, generator=generator)
        )
    if isinstance(task, Multilabel):
        return task.sums(torch.randn(samples, 3, generator=generator), torch.ones(samples, 3))
    if isinstance(task, Segmentation):
        return task.sums(torch.randn(samples, 3, 4, 4, generator=generator), torch.ones(samples, 4, 4).long())
    return task.sums(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 4)


def read(task: Task, sums: Sums, declared: int = SAMPLES) -> Sums:
    content = reply_content({}, {"test": {0: sums}})
    return ScoreCheck(task, labels=16).read(content, "test", [0], declared)[0]


@pytest.mark.parametrize(
    "task",
    [
        Classification(),
        Classification(metrics=("auroc", "macro_f1"), class_weights=(1.0, 2.0, 1.0, 5.0)),
        Multilabel(),
        Regression(metrics=("r2", "mae")),
        Segmentation(),
    ],
    ids=lambda task: f"{task.name}-{task.metrics[0]}",
)
def test_the_sums_of_any_task_arrive_as_they_were(task: Task) -> None:
    sums = honest(task)
    assert task.measure(read(task, sums)) == pytest.approx(task.measure(sums))


def changed(**changes: Any) -> Sums:
    return honest(Classification()) | {name: torch.as_tensor(value) for name, value in changes.items()}


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        (changed(weight=1e18), "makes no sense"),
        (changed(weight=19.0), "declared 20"),
        (changed(loss=1e30), "makes no sense"),
        (changed(loss=float("nan")), "not finite"),
        (changed(loss=-832.0), "makes no sense"),
        (changed(seen=[10**18, 5, 5, 5], correct=[10**18, 0, 0, 0]), "declared 20 samples"),
        (changed(seen=[2**62, 5, 5, 5]), "declared 20 samples"),
        (changed(seen=[4, 5, 5, 5]), "declared 20 samples"),
        (changed(correct=[6, 0, 0, 0]), "right answers"),
        (changed(correct=[-1, 0, 0, 0]), "right answers"),
        (changed(correct=[0.5, 0, 0, 0]), "right answers"),
        (changed(correct=[0, 0]), "right answers"),
        (changed(more=1.0), "made of"),
        (changed(loss=[1.0, 2.0]), "single number"),
    ],
)
def test_counts_are_bounded_by_what_the_site_declared(sums: Sums, words: str) -> None:
    read(Classification(), honest(Classification()))
    with pytest.raises(BadMessage, match=words):
        read(Classification(), sums)


def test_a_site_with_another_number_of_classes_is_refused_with_both() -> None:
    check = ScoreCheck(Classification(), labels=1)
    task = Classification()
    four = reply_content({}, {"test": {0: honest(task)}})
    three = task.sums(torch.zeros(SAMPLES, 3), torch.arange(SAMPLES) % 3)
    check.read(four, "test", [0], SAMPLES)
    with pytest.raises(BadMessage, match=r"\(3,\), others have \(4,\)"):
        check.read(reply_content({}, {"test": {0: three}}), "test", [0], SAMPLES)


def test_a_site_without_samples_says_nothing() -> None:
    assert read(Classification(), {}, declared=0) == {}
    with pytest.raises(BadMessage, match="declared no samples"):
        read(Classification(), honest(Classification()), declared=0)
    with pytest.raises(BadMessage, match="made of"):
        read(Classification(), {})


def test_a_shape_that_does_not_fit_its_bytes_is_refused_before_memory_is_allocated() -> None:
    header = json.dumps({"loss": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 8]}}).encode()
    content = RecordDict({"test-0": pack(len(header).to_bytes(8, "little") + header + bytes(8))})
    with pytest.raises(BadMessage, match="cannot be read: SafetensorError"):
        ScoreCheck(Classification(), labels=1).read(content, "test", [0], SAMPLES)
    with pytest.raises(BadMessage, match="its validation samples for seed 0: the message has no payload"):
        ScoreCheck(Classification(), labels=1).read(content, "validation", [0], SAMPLES)


def test_a_metric_that_needs_every_sample_does_not_go_with_data_at_sites() -> None:
    with pytest.raises(ConfigError, match="does not leave a site"):
        ScoreCheck(Classification(metrics=("torchmetrics.functional:cohen_kappa",)), labels=1)
