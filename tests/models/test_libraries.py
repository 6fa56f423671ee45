"""Models by the names of timm, torchvision and transformers, made on the spot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpews
from fedpews.errors import ConfigError
from fedpews.models import build

sys.path.append(str(Path(__file__).parents[1] / "zoo"))
INSTALL = "pip install 'fedpews[models]'"


def library(name: str) -> Any:
    from collection import import_torchvision

    if name != "transformers":
        pytest.importorskip("torch", reason=INSTALL)
    try:
        import_torchvision()
    except ModuleNotFoundError:
        if name == "torchvision":
            pytest.skip(INSTALL)
    return pytest.importorskip(name, reason=INSTALL)


def test_a_timm_model_is_built_for_the_datas_classes_and_channels() -> None:
    library("timm")
    model = build("timm:resnet18", (1, 32, 32), 7, {})
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


def test_a_torchvision_model_is_built_for_the_datas_classes() -> None:
    library("torchvision")
    model = build("torchvision:squeezenet1_1", (3, 32, 32), 7, {"dropout": 0.0})
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}


def test_a_kind_of_transformers_model_trains_on_tokens() -> None:
    library("transformers")
    x, y = torch.randint(0, 20, (12, 6)), torch.arange(12) % 2
    result = fedpews.run(
        model={"name": "transformers:bert", "vocab_size": 20, **SMALL},
        clients=[(x[:6], y[:6]), (x[6:], y[6:])],
        test=(x, y),
        method="fedavg",
        rounds=1,
    )
    assert result.params[0]["classifier.weight"].shape == (2, 8)


def test_a_folder_gives_its_weights_and_a_config_alone_a_fresh_model(tmp_path: Path) -> None:
    transformers = library("transformers")
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=5, **SMALL)
    saved = transformers.ViTForImageClassification(config)
    saved.save_pretrained(tmp_path / "saved")
    config.save_pretrained(tmp_path / "config")
    name = "vit.embeddings.patch_embeddings.projection.weight"
    known = saved.state_dict()[name]
    again = build(f"transformers:{tmp_path / 'saved'}", (1, 8, 8), 3, {})
    assert torch.equal(again.state_dict()[name], known)
    assert again(torch.zeros(2, 1, 8, 8)).logits.shape == (2, 3)
    for place in (tmp_path / "config", tmp_path / "config" / "config.json"):
        assert not torch.equal(build(f"transformers:{place}", (1, 8, 8), 3, {}).state_dict()[name], known)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("timm:resnet81", (3, 32, 32), "timm has no model 'resnet81'; did you mean 'resnet"),
        ("timm:resnet18", (5,), "needs images"),
        ("torchvision:resnet81", (3, 32, 32), "torchvision has no model 'resnet81'; did you mean 'resnet"),
        ("torchvision:resnet18", (1, 32, 32), "needs RGB images, the data has 1 channel"),
        ("transformers:brt", (6,), "no such folder or configuration; did you mean 'b"),
        ("transformers:nobody/nothing", (6,), r"is not on this machine; model\.fetch = true"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line_and_not_fetched(
    name: str, shape: tuple[int, ...], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    library(name.partition(":")[0])
    with pytest.raises(ConfigError, match=message) as refusal:
        build(name, shape, 3, {})
    assert "\n" not in str(refusal.value)
    assert "requesting" not in caplog.text


@pytest.mark.parametrize("name", ["timm", "torchvision", "transformers"])
def test_without_the_library_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"model {name}:x needs: pip install 'fedpews\[models\]'"):
        build(f"{name}:x", (3, 8, 8), 3, {})
