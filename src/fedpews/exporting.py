"""A trained model as files that other systems load, with a model card; compared with the module before it is done.

The formats: ``onnx``, ``torch-export`` (a .pt2 program), ``hf`` (a transformers folder) and ``safetensors`` (weights).
"""

from __future__ import annotations

import copy
import logging
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedpews import __version__
from fedpews.build import build_task, load_data
from fedpews.data.federation import Federation
from fedpews.data.inputs import take
from fedpews.data.statistics import suppress
from fedpews.data.table import FEDERATED
from fedpews.errors import ConfigError, RunFailed, first_line, need_extra
from fedpews.experiment import Experiment
from fedpews.neurons.modules import arguments, main_output
from fedpews.neurons.modules import run as call
from fedpews.report.compare import markdown
from fedpews.result import Run, build_module, load
from fedpews.results import layout
from fedpews.results.files import read_tensors, write_atomically
from fedpews.results.masks import read_federation
from fedpews.results.records import client_values
from fedpews.results.schema import GIVEN
from fedpews.results.statistics import interval
from fedpews.tasks.names import show
from fedpews.torch_private import tree_map_only
from fedpews.trees import Tree

SAMPLES = 32
"""Held-out samples on which a file is compared with the module."""

TOLERANCE = 1e-4
"""The largest difference of an output, in parts of the largest output."""

CARD = "README.md"


@dataclass(frozen=True)
class Chosen:
    """What is exported, and what its card says of it."""

    experiment: Experiment
    module: nn.Module
    samples: Any  # inputs to compare on
    about: str  # which model, in words
    compared_on: str
    run: Run | None = None


def export(chosen: Chosen, format: str, out: Path) -> float:
    """Write the model and its card into a new folder; the largest difference on the samples.

    The folder appears only when the files in it give the module's outputs.
    """
    writer = WRITERS.get(format)
    if writer is None:
        raise ConfigError(f"there is no format {format!r}; choose from {', '.join(WRITERS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists; choose another --out or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        module = chosen.module.eval()
        with torch.no_grad():
            expected = main_output(call(module, chosen.samples))
            read = writer(module, chosen.samples, aside)
            difference = _difference(read(chosen.samples), expected)
        if not difference <= TOLERANCE:
            raise RunFailed(
                f"the {format} file gives other outputs than the module: they differ by {difference:.2g}"
            )
        write_atomically(aside / CARD, model_card(chosen, format, difference).encode())
        aside.chmod(0o755)
        if out.exists():
            out.rmdir()
        os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return difference


def choose_from_run(
    folder: Path,
    seed: int | None = None,
    best: bool = False,
    client: str | None = None,
    data_dir: Path | None = None,
    trust: bool = False,
) -> Chosen:
    """The global model of a finished run, the best one, or a client's after fine-tuning.

    Args:
        trust: import the code and open the files that the folder's configuration names.
    """
    run = load(folder, trust=trust)
    experiment = run.experiment
    if not run.summary:
        done = max((record["round"] for record in run.rounds), default=0)
        raise ConfigError(
            f"{folder} is not finished: {done} of {experiment.rounds} rounds; finish it with --resume, then export"
        )
    if GIVEN in (experiment.model.name, experiment.data.name):
        raise ConfigError(
            f"{folder}: its model or its data was given in Python, so export it there: "
            "fedpews.exporting.export(Chosen(...), format, folder)"
        )
    seed, params = run.weights(seed, best, None if client is None else _client_number(run, client))
    about = f"the {'best' if best else 'final'} global model"
    if client is not None:
        about = f"the fine-tuned model of {client}"
    run.check_trust()
    return _choose(experiment, seed, params, f"{about}, seed {seed}", data_dir, run)


def choose_weights(
    config: Path, weights: Path, data: str | None = None, data_dir: Path | None = None
) -> Chosen:
    """A model that a site keeps: its weights, and the experiment that they were trained in.

    Args:
        data: the site's, ``folder:PATH`` or ``FILE.py:function``.
    """
    experiment = Experiment.load(config)
    if data is not None:
        changes = {"name": data, "clients": None, "partition": None, "scaling": None}
        table = experiment.data.model_copy(update=changes)
        experiment = experiment.model_copy(update={"data": table})
    params = read_tensors(weights, follow=True)
    return _choose(experiment, experiment.seeds[0], params, f"the weights {weights.name}", data_dir)


def _choose(
    experiment: Experiment, seed: int, params: Tree, about: str, data_dir: Path | None, run: Run | None = None
) -> Chosen:
    """The experiment's model with these values, and held-out inputs; random ones if the data is at sites."""
    if experiment.data.name != "sites":
        data = load_data(experiment, data_dir=data_dir)
        compared_on = f"{min(SAMPLES, len(data.test_y))} held-out samples"
    else:
        shape, classes = experiment.flower.input_shape, experiment.data.classes or experiment.flower.classes
        if not shape or not classes:
            raise ConfigError(
                "data.name is 'sites': flower.input_shape and data.classes must say what the model is for"
            )
        x = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(0))
        y = torch.zeros(0, dtype=torch.int64)
        count = classes if isinstance(classes, int) else len(classes)
        data = Federation(x, y, (), x, y, count, task=build_task(experiment))
        compared_on = f"{SAMPLES} random inputs, as the data is at the sites"
    module = build_module(experiment, data, seed, params, None if run is None else run.folder)
    return Chosen(experiment, module, take(data.test_x, slice(0, SAMPLES)), about, compared_on, run)


def model_card(chosen: Chosen, format: str, difference: float) -> str:
    """About the files: method, data, metrics, versions, and how to make them again."""
    experiment, run = chosen.experiment, chosen.run
    facts = [
        f"- method: {experiment.method_label}, {experiment.rounds} rounds, seeds {experiment.seeds}",
        f"- model: {experiment.model.name}, {sum(p.numel() for p in chosen.module.parameters()):,} parameters",
        f"- task: {experiment.task.name}",
        f"- inputs: {_inputs(chosen)}",
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}, fedpews {__version__}",
    ]
    text = [
        f"# {experiment.method_label} on {experiment.data.name}",
        f"This is {chosen.about}, written by fedpews {__version__} as {format}. On {chosen.compared_on} its "
        f"outputs differ from the PyTorch module's by at most {difference:.1g} of the largest.",
        "\n".join(facts),
    ]
    if run is not None:
        text += _data_section(run) + _metrics_section(run)
        text += ["## Make it again", f"    fedpews run config.toml --out {run.folder.name}"]
    return "\n\n".join([*text, "## config.toml", f"```toml\n{experiment.to_toml().rstrip()}\n```\n"])


def _inputs(chosen: Chosen) -> str:
    shapes = tree_map_only(
        Tensor, lambda leaf: f"{'×'.join(map(str, leaf.shape[1:]))} {leaf.dtype}", chosen.samples
    )
    scaling, run = chosen.experiment.data.scaling, chosen.run
    text = f"{shapes}".replace("torch.", "").replace("'", "")
    if scaling == FEDERATED and run is not None and (run.folder / layout.STATISTICS).exists():
        return f"{text}, standardised by the statistics of all sites ({layout.STATISTICS})"
    words = "as given" if scaling is None and ":" in chosen.experiment.data.name else scaling or "symmetric"
    return f"{text}; data.scaling: {words}. Bytes become value / 127.5 − 1."


def _data_section(run: Run) -> list[str]:
    facts, least = read_federation(run.folder), run.experiment.data.min_count
    counts = facts.get("counts")
    if not counts:
        return ["## Data", "The data is at the sites, and its counts are not known here."]
    rows = [["client", *(facts.get("class_names") or [str(label) for label in range(len(counts[0]))])]]
    for name, row in zip(_client_names(run, len(counts)), counts, strict=False):
        cells = suppress(torch.tensor(row), torch.tensor(row), least)
        rows.append([name, *(f"<{least}" if cell is None else str(cell) for cell in cells)])
    text = (
        f"Training samples of each class at each client; cells of fewer than {least} samples are suppressed."
    )
    return ["## Data", text, markdown(rows)]


def _metrics_section(run: Run) -> list[str]:
    """The final metric: the mean over seeds and its 95 % interval, over all and at each client."""
    metric, last = run.experiment.goal.metric, max(record["round"] for record in run.rounds)
    final = [record for record in run.rounds if record["round"] == last]
    over_all = [value for value in run.summary["final"][metric]["by_seed"] if value is not None]
    measured = [("all", over_all)]
    if final[0].get("sites"):
        for name in final[0]["sites"]:
            measured.append((name, [record.get("sites", {}).get(name, {}).get(metric) for record in final]))
    else:
        by_client = [client_values(record, metric) or [] for record in final]
        names = _client_names(run, max(map(len, by_client), default=0))
        measured += [(name, [row[i] for row in by_client if i < len(row)]) for i, name in enumerate(names)]
    rows = [["where", metric, "95 % interval"]]
    for name, values in measured:
        known = [value for value in values if value is not None]
        if known:
            low, high = interval(known)
            span = f"{show(metric, low)} to {show(metric, high)}" if len(known) > 1 else "one seed"
            rows.append([name, show(metric, sum(known) / len(known)), span])
    text = f"Of the global model after round {last}, {len(over_all)} seed(s)."
    return ["## Metrics", text, markdown(rows)]


def _client_names(run: Run, count: int) -> list[str]:
    names: list[str] = read_federation(run.folder).get("client_names") or []
    return names if len(names) >= count else [str(number) for number in range(count)]


def _client_number(run: Run, client: str) -> int:
    names = _client_names(run, 0)
    if client in names:
        return names.index(client)
    if client.isascii() and client.isdigit():
        return int(client)
    raise ConfigError(
        f"there is no client {client!r}; there is {', '.join(names) or 'none with a name: give a number'}"
    )


def _difference(mine: Tensor, expected: Tensor) -> float:
    if mine.shape != expected.shape:
        return float("inf")
    largest = max(1e-6, float(expected.abs().max()))
    return float((mine.double() - expected.double()).abs().max()) / largest


Reader = Callable[[Any], Tensor]
"""From inputs to outputs, by the file that was written."""


def _write_safetensors(module: nn.Module, samples: Any, folder: Path) -> Reader:
    from safetensors.torch import load_model, save_model

    save_model(module, str(folder / "model.safetensors"))
    again = copy.deepcopy(module)
    with torch.no_grad():
        for value in again.parameters():  # nothing of the module may be left
            value.zero_()
    load_model(again, str(folder / "model.safetensors"))
    return lambda x: main_output(call(again, x))


def _write_program(module: nn.Module, samples: Any, folder: Path) -> Reader:
    args, kwargs = arguments(samples)
    path = folder / "model.pt2"
    try:
        program = torch.export.export(module, args, kwargs, dynamic_shapes=_any_batch(args, kwargs))
        torch.export.save(program, path)
    except Exception as error:  # the tracer raises errors of many kinds
        raise ConfigError(
            f"the model cannot be written as a torch.export program: {first_line(error)}; try --format safetensors"
        ) from error
    again = torch.export.load(path).module()
    return lambda x: main_output(call(again, x))


def _write_onnx(module: nn.Module, samples: Any, folder: Path) -> Reader:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        need_extra("onnx", name, "--format onnx")
    import onnxruntime

    args, kwargs = arguments(samples)
    path = folder / "model.onnx"
    # torch warns of its own internals and of packages that are not installed
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                args,
                kwargs=kwargs,
                dynamo=True,
                verbose=False,
                dynamic_shapes=_any_batch(args, kwargs),
            )
        assert program is not None
        program.save(str(path))
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # the converter raises errors of many kinds
        # it wraps the cause in reports of many lines
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ConfigError(
            f"the model cannot be written as ONNX: {first_line(cause)}; try --format torch-export"
        ) from error
    names = [entry.name for entry in session.get_inputs()]

    def read(x: Any) -> Tensor:
        args, kwargs = arguments(x)
        values = [value.numpy() for value in (*args, *kwargs.values())]
        return torch.from_numpy(session.run(None, dict(zip(names, values, strict=True)))[0])

    return read


def _write_hf(module: nn.Module, samples: Any, folder: Path) -> Reader:
    inner: Any = next((part for part in module.modules() if hasattr(part, "save_pretrained")), None)
    if inner is None:
        raise ConfigError(
            f"{type(module).__name__} is no model of transformers, so there is no hf folder of it; "
            "try --format safetensors"
        )
    inner.save_pretrained(folder)
    again = copy.deepcopy(module)
    copied: Any = next(part for part in again.modules() if hasattr(part, "save_pretrained"))
    copied.load_state_dict(type(inner).from_pretrained(folder).state_dict())
    return lambda x: main_output(call(again.eval(), x))


def _any_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Dynamic shapes of which only the first size, the batch's, may differ."""
    batch = torch.export.Dim("batch", min=1)

    def sizes(value: Any) -> Any:
        return tree_map_only(Tensor, lambda leaf: {0: batch}, value)

    return {key: sizes(value) for key, value in kwargs.items()} if kwargs else tuple(map(sizes, args))


WRITERS: dict[str, Callable[[nn.Module, Any, Path], Reader]] = {
    "onnx": _write_onnx,
    "torch-export": _write_program,
    "hf": _write_hf,
    "safetensors": _write_safetensors,
}
