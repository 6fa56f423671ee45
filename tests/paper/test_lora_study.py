"""The study of adapters, at a tiny scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedpews
import tiny_files
from fedpews.errors import ConfigError
from fedpews.paper.cells import Runner
from fedpews.paper.pretrained import vit
from fedpews.paper.reproduce import reproduce
from fedpews.paper.study import cells, load_study

TINY = {
    "rounds": 2,
    "warmup.rounds": 1,
    "data.train_per_class": 1,
    "data.test_per_class": 1,
    "model.epochs": 1,
    "runtime.engine": "eager",
}


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_files.write_cifar(tmp_path, classes=100, per_class=1)
    for name in ("pathmnist", "octmnist", "bloodmnist"):
        tiny_files.write_medmnist(tmp_path, name, per_class=1)
    monkeypatch.setenv("FEDPEWS_DATA", str(tmp_path))
    monkeypatch.setattr("fedpews.paper.pretrained.cache_dir", lambda: tmp_path / "cache")
    return tmp_path


@pytest.mark.usefixtures("images")
def test_the_base_is_pretrained_once_and_only_its_last_layer_is_new() -> None:
    torch.manual_seed(0)
    first = vit(epochs=1)
    torch.manual_seed(1)
    second = vit(epochs=1, classes=4)
    assert torch.equal(first.blocks[0].up.weight, second.blocks[0].up.weight)  # type: ignore[union-attr]
    assert second.classifier.weight.shape == (4, 64)


def test_a_row_of_adapters_needs_a_tenth_of_the_bytes_of_full_fine_tuning(images: Path) -> None:
    pytest.importorskip("peft", reason="pip install 'fedpews[peft]'")
    runner = Runner(images / "out")
    only = "full,owners,padded-pews"
    (outcome,) = reproduce("lora", runner, seeds=[0], changed=TINY, only=only)
    done = {row: result for (row, _), result in outcome.table.items() if result.status == "done"}
    assert set(done) == set(only.split(","))
    sent = {row: result.records[-1]["bytes_up"] for row, result in done.items()}
    assert 10 * sent["owners"] < sent["full"]
    assert sent["owners"] == pytest.approx(sent["padded-pews"], rel=0.01)
    _change_one_weight(next((images / "cache" / "pretrained").glob("*.safetensors")))
    run = fedpews.load(done["owners"].folders[0], trust=True)
    with pytest.raises(ConfigError, match="was run on another base model"):
        run.model()
    assert "LoRA, ranks 8, 4, 2, owners" in (images / "out" / "lora.md").read_text()


def _change_one_weight(path: Path) -> None:
    values = load_file(path)
    values["norm.weight"][0] += 1e-6
    save_file(values, path)


def test_every_row_is_an_experiment() -> None:
    study = load_study("lora")
    assert len(cells(study)) == len(study.rows) == 8
