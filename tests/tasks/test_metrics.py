"""Metrics made of sums are what torchmetrics finds on all samples, and add up over parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.tasks import Classification, Multilabel, Regression, Segmentation, Task, Tokens, make
from fedpews.tasks.metrics import add
from fedpews.tasks.names import TASKS

G = torch.Generator().manual_seed(0)
OUTPUTS, LABELS = 2 * torch.randn(400, 5, generator=G), torch.randint(0, 5, (400,), generator=G)
MANY = (torch.rand(400, 5, generator=G) < 0.3).float()


def measure(task: Task, outputs: Tensor, labels: Tensor) -> dict[str, float | None]:
    """In two parts, as chunks and clients are."""
    parts = [task.sums(outputs[rows], labels[rows]) for rows in (slice(0, 150), slice(150, None))]
    return task.measure(add(*parts))


def test_classification_agrees_with_torchmetrics() -> None:
    other = pytest.importorskip("torchmetrics.functional.classification")
    task = Classification(metrics=tuple(Classification.METRICS))
    p, settings = OUTPUTS.softmax(1), {"num_classes": 5, "average": "macro"}

    values = measure(task, OUTPUTS, LABELS)

    assert values["accuracy"] == pytest.approx(
        float(other.multiclass_accuracy(p, LABELS, num_classes=5, average="micro"))
    )
    assert values["balanced_accuracy"] == pytest.approx(
        float(other.multiclass_accuracy(p, LABELS, **settings))
    )
    assert values["macro_f1"] == pytest.approx(float(other.multiclass_f1_score(p, LABELS, **settings)))
    assert values["sensitivity"] == pytest.approx(float(other.multiclass_recall(p, LABELS, **settings)))
    assert values["specificity"] == pytest.approx(float(other.multiclass_specificity(p, LABELS, **settings)))
    assert values["auroc"] == pytest.approx(float(other.multiclass_auroc(p, LABELS, **settings)), abs=1e-3)
    assert values["auprc"] == pytest.approx(
        float(other.multiclass_average_precision(p, LABELS, **settings)), abs=1e-3
    )
    assert values["calibration_error"] == pytest.approx(
        float(other.multiclass_calibration_error(p, LABELS, num_classes=5)), abs=1e-6
    )


def test_multilabel_agrees_with_torchmetrics() -> None:
    other = pytest.importorskip("torchmetrics.functional.classification")
    task = Multilabel(metrics=tuple(Multilabel.METRICS))
    p, truth = OUTPUTS.sigmoid(), MANY.long()

    values = measure(task, OUTPUTS, MANY)

    assert values["auroc"] == pytest.approx(float(other.multilabel_auroc(p, truth, num_labels=5)), abs=1e-3)
    assert values["auprc"] == pytest.approx(
        float(other.multilabel_average_precision(p, truth, num_labels=5)), abs=1e-3
    )
    assert values["macro_f1"] == pytest.approx(float(other.multilabel_f1_score(p, truth, num_labels=5)))
    assert values["accuracy"] == pytest.approx(float(other.multilabel_accuracy(p, truth, num_labels=5)))
    assert values["exact_match"] == pytest.approx(float(other.multilabel_exact_match(p, truth, num_labels=5)))
    assert values["sensitivity"] == pytest.approx(float(other.multilabel_recall(p, truth, num_labels=5)))
    assert values["specificity"] == pytest.approx(float(other.multilabel_specificity(p, truth, num_labels=5)))


def test_a_metric_of_torchmetrics_is_measured_by_its_name() -> None:
    other = pytest.importorskip("torchmetrics.functional.classification")
    name = "torchmetrics.functional.classification:multiclass_cohen_kappa"

    values = measure(Classification(metrics=("accuracy", name)), OUTPUTS, LABELS)

    kappa = other.multiclass_cohen_kappa(OUTPUTS.softmax(1), LABELS, num_classes=5)
    assert values["multiclass_cohen_kappa"] == pytest.approx(float(kappa))


def test_areas_by_hand() -> None:
    outputs = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 2.0], [0.0, -1.0]])
    values = measure(Classification(metrics=("auroc", "auprc")), outputs, torch.tensor([1, 1, 0, 0]))
    # of four pairs of a 1 and a 0 three are in order
    assert values["auroc"] == pytest.approx(0.75)
    # class 1 ranks 3, 2*, 1: (1/1 + 2/3) / 2; class 0, from its own side, -1, 1*, 2: the same
    assert values["auprc"] == pytest.approx((1 + 2 / 3) / 2)


def test_regression_by_hand() -> None:
    y = torch.tensor([1.0, 2.0, 3.0, 6.0])
    task = Regression(metrics=("mae", "mse", "rmse", "r2"))

    parts = [task.sums((y + 1)[rows, None], y[rows]) for rows in (slice(0, 1), slice(1, 4))]
    values = task.measure(add(*parts))

    # total variance: mean 3, squares 4 + 1 + 0 + 9 = 14, residual 4
    assert values == pytest.approx({"mae": 1, "mse": 1, "rmse": 1, "r2": 1 - 4 / 14})
    assert task.measure(task.sums(torch.ones(2, 1), torch.ones(2)))["r2"] is None


def test_segmentation_by_hand_leaves_out_ignored_pixels() -> None:
    y = torch.tensor([[[0, 1], [1, 9]]])
    said = torch.tensor([[[0, 0], [1, 1]]])
    outputs = torch.nn.functional.one_hot(said, 2).movedim(-1, 1).float()
    task = Segmentation(metrics=("dice", "iou", "accuracy"), ignore_index=9)

    values = task.measure(task.sums(outputs, y))

    # class 0: 1 right, 2 said, 1 true; class 1: 1 right, 1 said, 2 true
    assert values == pytest.approx({"dice": 2 / 3, "iou": 0.5, "accuracy": 2 / 3})
    without = Segmentation(metrics=("dice",), ignore_index=9, background=False)
    assert without.measure(without.sums(outputs, y)) == pytest.approx({"dice": 2 / 3})


def test_perplexity_of_a_uniform_guess_is_the_number_of_words() -> None:
    task = Tokens(metrics=("perplexity", "accuracy"), ignore_index=0)
    values = task.measure(task.sums(torch.zeros(2, 3, 7), torch.tensor([[1, 2, 0], [0, 0, 0]])))
    assert values["perplexity"] == pytest.approx(7)


def test_shifted_tokens_are_compared_with_the_next_token() -> None:
    ids = torch.tensor([[3, 1, 2]])
    outputs = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0]]), 4).float()
    task = Tokens(shift=True)
    assert task.measure(task.sums(outputs, ids)) == {"accuracy": 1.0}
    assert task.weigh(ids).tolist() == [2]


def test_undefined_metrics_are_none() -> None:
    only = measure(Classification(metrics=("auroc",)), OUTPUTS[:, :2], torch.zeros(400, dtype=torch.int64))
    assert only == {"auroc": None}


@pytest.mark.parametrize(
    ("task", "outputs", "labels"),
    [
        (Classification(), OUTPUTS, LABELS),
        (Classification(label_smoothing=0.1), OUTPUTS, LABELS),
        (Multilabel(), OUTPUTS, MANY),
        (Regression(loss_kind="huber"), OUTPUTS[:, :1], OUTPUTS[:, 1]),
        (Segmentation(), OUTPUTS.view(40, 2, 5, 5), (LABELS % 2)[:1000].repeat(3)[:1000].view(40, 5, 5)),
        (Tokens(), OUTPUTS.view(40, 10, 5), LABELS.view(40, 10)),
    ],
)
def test_a_task_gives_one_finite_loss_per_sample(task: Task, outputs: Tensor, labels: Tensor) -> None:
    losses = task.sample_loss(outputs, task.labels(labels, "here"))
    assert losses.shape == (len(labels),)
    assert bool(torch.isfinite(losses).all())


def test_class_weights_give_torchs_weighted_mean() -> None:
    weights = (1.0, 2.0, 0.5, 1.0, 3.0)
    task = Classification(class_weights=weights)
    losses, weigh = task.loss(OUTPUTS, LABELS), task.weigh(LABELS)
    expected = torch.nn.functional.cross_entropy(OUTPUTS, LABELS, torch.tensor(weights))
    assert float((losses * weigh).sum() / weigh.sum()) == pytest.approx(float(expected), rel=1e-5)


def test_a_sample_of_ignored_pixels_only_has_no_loss_and_no_weight() -> None:
    task = Segmentation(ignore_index=9, loss_kind="dice")
    y = torch.full((1, 2, 2), 9)
    assert task.weigh(y).tolist() == [0]
    assert math.isfinite(float(task.loss(torch.zeros(1, 2, 2, 2), y)))


@pytest.mark.parametrize("name", TASKS)
def test_the_main_metric_of_a_task_is_one_of_its_own(name: str) -> None:
    task = make(name)
    assert task.metrics[0] in task.METRICS


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("clasification", {}, "did you mean 'classification'"),
        ("classification", {"metrics": ["acuracy"]}, "did you mean 'accuracy'"),
        ("regression", {"metrics": ["auroc"]}, "regression has no metric 'auroc'"),
        ("regression", {"options": {"los_kind": "mae"}}, "did you mean 'loss_kind'"),
        ("regression", {"options": {"loss_kind": "l3"}}, "task.loss_kind"),
        (
            "classification",
            {"options": {"label_smoothing": 1.5}},
            "task.label_smoothing: input should be less",
        ),
        ("nowhere:Task", {}, "cannot be loaded"),
        ("math:sqrt", {}, "part of Python itself"),
    ],
)
def test_a_task_that_does_not_exist_is_refused(task: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(task, **settings)


def test_a_task_made_in_python_checks_its_options() -> None:
    assert Classification(class_weights=[1, 2]).class_weights == (1.0, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Classification\.label_smoothing: input should be less than 1"):
        Classification(label_smoothing=1.5)
    with pytest.raises(ConfigError, match=r"Tokens\.shift: input should be a valid boolean"):
        Tokens(shift="yes")  # type: ignore[arg-type]
