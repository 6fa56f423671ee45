"""Models as files for other systems: the same outputs as the module, a card, and one line where it cannot be done."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

import fedpews
from command_line import fedpews as command
from fedpews.errors import ConfigError, RunFailed
from fedpews.experiment import Experiment
from fedpews.exporting import Chosen, choose_from_run, export
from fedpews.running import run
from fedpews.tasks import Classification

ROOT = Path(__file__).parents[2]
ONNX = pytest.mark.skipif(
    not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))),
    reason="onnx is not installed: pip install 'fedpews[onnx]'",
)
SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "seeds": [0, 1],
    "data": {"name": "synthetic-3.2k", "partition": "parity", "train_per_class": 30, "test_per_class": 20},
    "train": {"batch_size": 16},
    "method": {"name": "fedavg"},
    "finetune": {"epochs": 1},
    "stop": {"best": True, "on": "test"},
    "runtime": {"engine": "eager"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    run(Experiment(**SETTINGS), out=folder)
    return folder


@pytest.mark.parametrize("format", ["safetensors", "torch-export", pytest.param("onnx", marks=ONNX)])
def test_an_exported_file_gives_the_outputs_of_the_module(format: str, folder: Path, tmp_path: Path) -> None:
    chosen = choose_from_run(folder)
    difference = export(chosen, format, tmp_path / "out")
    assert difference <= 1e-5
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {
        ".md",
        {"torch-export": ".pt2", "onnx": ".onnx"}.get(format, ".safetensors"),
    }
    # nothing is left beside it
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_program_takes_batches_of_any_size(folder: Path, tmp_path: Path) -> None:
    export(choose_from_run(folder), "torch-export", tmp_path / "out")
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    assert [len(program(torch.zeros(size, 5))) for size in (1, 7)] == [1, 7]


@ONNX
def test_an_operator_that_onnx_lacks_is_one_line_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(x[:, :4].unsqueeze(1) * x[:, :4].unsqueeze(2)).flatten(1)

    chosen = Chosen(Experiment(**SETTINGS), Odd(), torch.randn(3, 5), "a model", "three samples")
    with pytest.raises(
        ConfigError, match=r"cannot be written as ONNX: .*; try --format torch-export"
    ) as refused:
        export(chosen, "onnx", tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


class Pretrained(nn.Module):
    """What is used of transformers' models: they write themselves, and are read again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out

    def save_pretrained(self, folder: Path) -> None:
        save_model(self, str(folder / "model.safetensors"))

    @classmethod
    def from_pretrained(cls, folder: Path) -> Pretrained:
        made = cls()
        load_model(made, str(folder / "model.safetensors"))
        return made


def test_a_model_of_transformers_writes_its_own_folder(tmp_path: Path) -> None:
    wrapped = nn.Sequential(Pretrained())
    chosen = Chosen(Experiment(**SETTINGS), wrapped, torch.randn(3, 5), "a model", "three samples")
    assert export(chosen, "hf", tmp_path / "out") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.safetensors"]


def test_a_file_with_other_outputs_is_never_left_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedpews import exporting

    write = exporting.WRITERS["safetensors"]
    spoiled = lambda *given: lambda x: write(*given)(x) + 0.1  # noqa: E731
    monkeypatch.setitem(exporting.WRITERS, "safetensors", spoiled)
    with pytest.raises(RunFailed, match="gives other outputs than the module"):
        export(choose_from_run(folder), "safetensors", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_best_and_a_clients_model_are_those_of_the_run(folder: Path) -> None:
    result = fedpews.load(folder)
    for chosen, tree in (
        (choose_from_run(folder, seed=1, best=True), result.best[1]),
        (choose_from_run(folder, client="1"), result.finetuned[0][1]),
    ):
        state = chosen.module.state_dict()
        assert all(torch.equal(state[name], value) for name, value in tree.items())


def test_the_card_says_what_the_model_is_and_how_to_make_it_again(folder: Path, tmp_path: Path) -> None:
    ended = command("export", str(folder), "--out", str(tmp_path / "out"))
    assert ended.code == 0
    assert "on 32 held-out samples its outputs differ by at most 0" in ended.stdout
    card = (tmp_path / "out" / "README.md").read_text()
    for words in (
        "# fedavg on synthetic-3.2k",
        "the final global model, seed 0",
        "| 0 | 30 | 0 | 30 | 0 |",
        "| where | accuracy | 95 % interval |",
        "fedpews run config.toml",
        'partition = "parity"',
        f"torch {torch.__version__}",
    ):
        assert words in card
    assert re.search(r"\| all \| [0-9.]+ % \| -?[0-9.]+ % to -?[0-9.]+ % \|", card.replace("−", "-"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--format", "pickle"],
            "there is no format 'pickle'; choose from onnx, torch-export, hf, safetensors",
        ),
        (["--format", "hf"], "is no model of transformers"),
        (["--seed", "7"], "has no model of seed 7; there is [0, 1]"),
        (
            ["--client", "9"],
            "has no fine-tuned model of client 9 of seed 0; a run keeps it if finetune.epochs is set",
        ),
        (["--data", "folder:x"], "--data needs --weights"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    arguments: list[str], words: str, folder: Path, tmp_path: Path
) -> None:
    ended = command("export", str(folder), "--out", str(tmp_path / "out"), *arguments)
    assert (ended.code, words in ended.stderr, ended.stderr.count("\n")) == (2, True, 1), ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_finished_is_not_exported(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    for name in ("summary.json", "SHA256SUMS"):
        (copy / name).unlink()
    with pytest.raises(ConfigError, match="is not finished: 2 of 2 rounds; finish it with --resume"):
        choose_from_run(copy)


def test_a_site_exports_the_weights_it_got(folder: Path, tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32), np.arange(12) % 4
    (tmp_path / "data").mkdir()
    for name in ("clinic", "test"):
        np.savez(tmp_path / "data" / f"{name}.npz", x=x, y=y)
    table = {"name": "sites", "clients": 2}
    app = tmp_path / "experiment.toml"
    app.write_text(
        Experiment(**{**SETTINGS, "data": table, "flower": {"input_shape": [5], "classes": 4}}).to_toml()
    )
    weights = ["--weights", str(folder / "model-0.safetensors")]
    for own in ([], ["--data", f"folder:{tmp_path / 'data'}"]):
        out = tmp_path / f"out-{len(own)}"
        ended = command("export", str(app), *weights, *own, "--out", str(out))
        assert ended.code == 0, ended.stderr
        assert ("held-out samples" if own else "random inputs") in ended.stdout
        assert (out / "model.safetensors").exists()


def test_predict_gives_the_probabilities_of_the_final_model(folder: Path) -> None:
    result = fedpews.load(folder)
    x = torch.randn(6, 5)
    expected = Classification().scores(result.model()(x)).detach()
    assert torch.equal(result.predict(x), expected)
    assert torch.equal(result.predict(x.numpy()), expected)
    assert not torch.equal(result.predict(x, result.model(1)), expected)
    with pytest.raises(ConfigError, match="x has NaN or infinite values in 1 of 6 samples"):
        result.predict(x.index_put((torch.tensor([2]),), torch.tensor(float("nan"))))


def test_the_serving_example_answers_with_the_models_probabilities(folder: Path) -> None:
    program = ROOT / "examples" / "serve.py"
    lines = [
        line
        for line in program.read_text().splitlines()
        if line and not line.startswith(('"""', "import", "from"))
    ]
    assert len(lines) <= 12
    with subprocess.Popen(
        [sys.executable, str(program), str(folder), "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, PYTHONUNBUFFERED="1"),
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            x = torch.randn(2, 5)
            connection.request("POST", "/", json.dumps(x.tolist()))
            answer = json.loads(connection.getresponse().read())
            assert torch.allclose(torch.tensor(answer), fedpews.load(folder).predict(x), atol=1e-6)
        finally:
            server.terminate()
