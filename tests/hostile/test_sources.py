"""The package's own sources: nothing in them runs what was read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedpews

PACKAGE = Path(fedpews.__file__).parent

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
    "jsonpickle",
}
"""Whoever loads with these runs what the file says."""
NAMES = {"eval", "exec", "compile"}
CALLS = {"torch.load", "os.system", "os.popen", "yaml.load", "tempfile.mktemp", "np.fromstring", "pty.spawn"}


def findings(source: str) -> Iterator[str]:
    """What a source has that could run data as code, each with its line."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            yield from (f"{line}: import {name}" for name in names if name.split(".")[0] in MODULES)
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                yield from (f"{line}: torch.load" for alias in node.names if alias.name == "load")
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS or (isinstance(node.func, ast.Name) and node.func.id in NAMES):
                yield f"{line}: {called}("
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("shell", "allow_pickle") and not is_false:
                    yield f"{line}: {keyword.arg}="
            if called.endswith("np.load") and not any(
                keyword.arg == "allow_pickle" for keyword in node.keywords
            ):
                yield f"{line}: np.load without allow_pickle=False"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_no_source_runs_what_it_reads(path: Path) -> None:
    assert list(findings(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch; torch.load(path)",
        "from torch import load",
        "eval(text)",
        "exec(text)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=flag)",
        "import yaml; yaml.load(text)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "os.system(command)",
    ],
)
def test_the_scan_finds_what_it_looks_for(source: str) -> None:
    assert list(findings(source))


def test_the_scan_leaves_alone_what_only_sounds_alike() -> None:
    harmless = "net.eval(); re.compile('a'); spec.loader.exec_module(m); load_file(p); run(c, shell=False)"
    assert list(findings(harmless)) == []
