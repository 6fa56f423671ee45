"""Systems other than Linux, and other versions of torch: what is missing there is not needed, or eager takes over."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import fedpews
from fedpews import torch_private
from fedpews.data import build
from fedpews.engines.choose import choose_engine
from fedpews.engines.compiled import native
from fedpews.engines.engine import Schedule
from fedpews.engines.hardware import available_cores, find_device
from fedpews.errors import ConfigError
from fedpews.neurons.network import Network
from fedpews.results.folder import RunFolder
from fedpews.results.layout import legal_name

PACKAGE = Path(fedpews.__file__).parent
UNIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "syslog"}


def test_no_module_of_the_package_needs_a_library_that_windows_lacks() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & UNIX_ONLY, path


def test_cores_are_counted_in_one_place() -> None:
    """`os.sched_getaffinity` is Linux's alone."""
    asking = {path.name for path in PACKAGE.rglob("*.py") if "os.sched_getaffinity" in path.read_text()}
    assert asking == {"hardware.py"}


def test_cores_are_counted_where_the_system_does_not_tell_which_are_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert available_cores() == os.cpu_count()
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1


def engine_of_small_model(name: str = "compiled") -> tuple[str, str]:
    torch.manual_seed(0)
    data = build(
        torch.randn(8, 5), torch.arange(8) % 2, [torch.arange(8)], torch.randn(4, 5), torch.arange(4) % 2
    )
    net = Network(nn.Linear(5, 2), data.x[:1])
    engine, reason = choose_engine(name, net, data, Schedule(4), 1, rounds=1, jobs=1)
    engine.close()
    return engine.name, reason


@pytest.mark.filterwarnings("ignore")
def test_a_torch_without_the_functions_that_compiled_steps_call_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "NEEDED", (*native.NEEDED, "aoti_torch_of_another_version"))
    name, reason = engine_of_small_model()
    assert name == "eager"
    assert "aoti_torch_of_another_version" in reason


@pytest.mark.parametrize("name", torch_private.NEEDED_TO_COMPILE)
def test_a_torch_without_a_private_function_runs_eagerly_and_the_first_line_names_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, attribute = name.rpartition(".")
    monkeypatch.delattr(importlib.import_module(module), attribute)
    assert engine_of_small_model("compiled") == (
        "eager",
        f"not compiled: torch {torch.__version__} has no {name}",
    )


def test_a_torch_whose_library_is_elsewhere_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library_path", lambda: Path("/nowhere/libtorch_cpu.so"))
    assert engine_of_small_model()[0] == "eager"


def test_windows_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.platform, "system", lambda: "Windows")
    name, reason = engine_of_small_model()
    assert name == "eager"
    assert "need Linux or macOS" in reason


@pytest.mark.parametrize(
    ("system", "library"),
    [("linux", "libtorch_cpu.so"), ("darwin", "libtorch_cpu.dylib"), ("win32", "torch_cpu.dll")],
)
def test_torchs_library_has_the_systems_name(
    system: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private.sys, "platform", system)
    assert torch_private.library_path().name == library


@pytest.mark.parametrize(
    "text", ["a:b", "methods/own.py:Own+pews", 'x<>"|?*', "CON", "com1.txt", "ends. ", "\t", ""]
)
def test_names_of_folders_are_legal_on_every_system(text: str) -> None:
    name = legal_name(text)
    assert name
    assert not set(name) & set('<>:"/\\|?*\t')
    assert name == name.rstrip(". ")
    assert name.split(".")[0].upper() not in {"CON", "PRN", "AUX", "NUL", "COM1", "LPT1"}


def test_a_folder_is_held_by_one_run_at_a_time_and_free_after_it(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match="in use by another run"):
        RunFolder(tmp_path)
    first.close()
    RunFolder(tmp_path).close()


# devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_device_that_is_not_there_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(ConfigError, match=r"torch finds no such device here .* use .*cpu"):
        find_device(name)


def test_auto_takes_what_is_there() -> None:
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert find_device("auto").type == expected


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "CPU", ""])
def test_a_device_nobody_knows_is_refused_with_the_configuration(name: str) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.device"):
        fedpews.Experiment(runtime={"device": name})
