"""LoRA through peft: what trains, what is sent and saved, and what is refused."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedpews
from fedpews.errors import ConfigError
from fedpews.models import build
from fedpews.models.table import LoraTable
from fedpews.result import Result

peft = pytest.importorskip("peft", reason="pip install 'fedpews[peft]'")

SIZES = {"patch": 4, "width": 8, "depth": 1, "heads": 2, "hidden": 6}
X = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3
CLIENTS = [(X[:12], Y[:12]), (X[12:], Y[12:])]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a small ViT for five classes."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file(build("vit", (1, 8, 8), 5, SIZES).state_dict(), path)
    return path


def run(start: Path, lora: dict[str, Any], **settings: Any) -> Result:
    table = {"name": "vit", **SIZES, "start": str(start), "fresh": ["classifier"], "lora": lora}
    given = {"method": "fedavg", "rounds": 2, "runtime": {"engine": "eager"}} | settings
    return fedpews.run(fedpews.Experiment(model=table), clients=CLIENTS, test=(X, Y), **given)


def test_only_adapters_and_the_last_layer_train_travel_and_are_saved(start: Path, tmp_path: Path) -> None:
    result = run(start, {"rank": 2}, out=tmp_path)
    trained = {
        f"blocks.0.{layer}.lora_{side}.default.weight" for layer in ("up", "down") for side in ("A", "B")
    } | {"classifier.weight", "classifier.bias"}
    assert set(result.params[0]) == set(fedpews.load(tmp_path).params[0]) == trained
    # rank 2 on 8→6 and 6→8, and 8→3 with its bias: four bytes a number, two clients
    assert result.rounds[-1]["bytes_up"] == 2 * 4 * (2 * (8 + 6) + 2 * (6 + 8) + 3 * 8 + 3)
    # the saved run is the model again, on the base that the configuration names
    assert torch.equal(result.model()(X), fedpews.load(tmp_path, model=result.model()).model()(X))


def test_components_are_the_neurons_that_a_warmup_masks(start: Path) -> None:
    result = run(start, {"rank": 4, "ranks": [4, 2]}, method="fedavg+pews", warmup={"rounds": 2})
    layers = {layer.name: layer.size for layer in result._net.graph.layers}
    assert layers == {"blocks.0.up.lora_A.default": 4, "blocks.0.down.lora_A.default": 4}
    assert not result.neurons[0][1].view(2, 4)[:, 2:].any()


def test_an_adapter_starts_as_nothing(start: Path) -> None:
    result = run(start, {"rank": 2}, rounds=1, train={"lr": 1e-12})
    base = build("vit", (1, 8, 8), 3, SIZES)
    values = result.model().state_dict()
    base.load_state_dict(
        {
            name: values[name.replace("up.", "up.base_layer.").replace("down.", "down.base_layer.")]
            for name in base.state_dict()
        }
    )
    torch.testing.assert_close(result.model()(X), base.eval()(X))


def test_a_peft_model_from_python_runs_as_it_is() -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 3)),
        peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]),
    )
    clients = [(x.flatten(1), y) for x, y in CLIENTS]
    result = fedpews.run(
        model=model,
        clients=clients,
        test=(X.flatten(1), Y),
        method="fedavg+pews",
        rounds=2,
        warmup={"rounds": 1},
    )
    assert {name.split(".")[-3] for name in result.params[0] if "lora" in name} == {"lora_A", "lora_B"}
    assert result.rounds[-1]["bytes_up"] < 4 * 2 * 64 * 6


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, r"model\.lora\.rank: input should be greater than or equal to 1, got 0"),
        (
            {"rank": 2, "targets": ["upp"]},
            r"model\.lora\.targets: no layer is called 'upp'; did you mean 'up'",
        ),
        ({"rank": 2, "targets": ["attention"]}, "is a MultiheadAttention; choose linear layers"),
        ({"rank": 2, "full": ["hed.*"]}, r"model\.lora\.full: no parameter matches 'hed\.\*'"),
        ({"rank": 2, "ranks": [4]}, r"lora\.ranks must be from 1 to lora\.rank = 2, got \[4\]"),
        ({"rank": 2, "padding": True}, r"lora\.padding needs lora\.ranks"),
        ({"rnk": 2}, r"unknown key model\.lora\.rnk; did you mean .*rank"),
    ],
)
def test_bad_settings_are_refused_in_one_line(start: Path, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        run(start, lora)
    assert "\n" not in str(refusal.value)


def test_without_peft_the_extra_is_named(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"model\.lora needs: pip install 'fedpews\[peft\]'"):
        run(start, {"rank": 2})


def test_the_example_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "lora.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.py").write_text(block)
    made = runpy.run_path("block.py")["result"]
    assert all("lora_" in name or name.startswith("classifier.") for name in made.params[0])


def test_a_table_of_adapters_survives_the_configuration_file(tmp_path: Path) -> None:
    made = fedpews.Experiment(model={"name": "vit", "lora": {"rank": 4, "ranks": [4, 2]}})
    (tmp_path / "my.toml").write_text(made.to_toml())
    again = fedpews.Experiment.load(tmp_path / "my.toml", {"model.lora.padding": True})
    assert again.model.lora == LoraTable(rank=4, ranks=[4, 2], padding=True)
