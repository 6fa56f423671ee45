"""Small runs in processes of their own, forked from one that has imported everything, and what they leave behind."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fedpews.measure
import fedpews.report.compare
import fedpews.report.html
import fedpews.running
import fedpews.server
from fedpews.errors import FedpewsError

METHODS = (
    *("fedavg", "fedprox", "scaffold", "fednova", "moon", "feddyn", "ist", "fedpm", "lotteryfl", "fedweit"),
    *("fedavg-m", "scaffold-m", "feddecorr", "feduv", "fedswa", "fedmoswa", "fedselect", "fedala", "spafl"),
    *("fedavg+fedexp", "fedavg-m+pews", "scaffold-m+pews", "fedmoswa+pews"),
    *("fjord", "heterofl", "fedrolex", "fedavg+fedadam", "fedavg+pews", "scaffold+pews", "fedavg+pews-fixed"),
    *("fedavg+pews-auto", "fedavg+pews-random", "fedper", "fedrep", "ditto", "local", "ditto+pews"),
)

ROUNDS = 6
TIMED = (fedpews.server, fedpews.measure)
"""Where a round's seconds are measured."""
TRACEBACK = 99
"""The exit code of a child that ended with an exception that is not one of ours."""


@dataclass(frozen=True)
class Ended:
    """How a child ended, and what it said."""

    code: int
    """Below 0: killed by that signal."""
    said: str
    result: Any = None

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL


def fork(work: Callable[[], Any]) -> Ended:
    """Do some work in a child, which may be killed, and wait for it; what it returns must be JSON."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # no thread that a child would wait for is running here
        warnings.simplefilter("ignore", DeprecationWarning)
        number = os.fork()
    if number == 0:
        os.close(read)
        code, said, result = 0, io.StringIO(), None
        logging.basicConfig(stream=said, force=True, format="%(message)s", level=logging.WARNING)
        # a run in a child is told of nobody's Ctrl-C but its own
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                result = work()
            except FedpewsError as error:
                code = error.exit_code
                said.write(str(error))
            except BaseException:  # noqa: BLE001  that is what is looked for
                code = TRACEBACK
                said.write(traceback.format_exc())
        with os.fdopen(write, "w") as pipe:
            json.dump([said.getvalue(), result], pipe)
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(number, 0)
    said_back, result = json.loads(text) if text else ("", None)
    return Ended(os.waitstatus_to_exitcode(status), said_back, result)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 5, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def run(out: Path, method: str, engine: str = "eager", resume: bool = False, **more: Any) -> None:
    """A run of few rounds whose every byte is decided by its experiment."""
    torch.set_num_threads(1)
    # seconds are nobody's contract, and would be the only difference
    for module in TIMED:
        module.time = _NoTime  # type: ignore[attr-defined]
    x, y = samples()
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "seeds": [0, 1],
        "model": {"name": "mlp", "hidden": [8, 8]},
        "train": {"batch_size": 8, "lr": 0.05},
        "participation": 0.75,
        "runtime": {"engine": engine, "checkpoint_every": 2, "workers": 1},
    }
    if "pews" in method:
        settings["warmup"] = {"rounds": 3}
    clients = [(x[i::4], y[i::4]) for i in range(4)]
    fedpews.run(clients=clients, test=(x, y), method=method, out=out, resume=resume, **settings | more)


def warm_up() -> None:
    """Import in this process what a run imports on its way, so that no child has to; no thread is left."""
    for module in ("torch._inductor.cpp_builder", "fedpews.engines.compiled.engine", "fedpews.methods.fedbn"):
        importlib.import_module(module)
    before, threads = [timed.time for timed in TIMED], torch.get_num_threads()  # type: ignore[attr-defined]
    try:
        with tempfile.TemporaryDirectory() as folder:
            for method in ("scaffold+pews", "ditto"):
                run(Path(folder) / method, method)
            fedpews.load(Path(folder) / "ditto")
    finally:
        # other tests may follow in this process
        for timed, time in zip(TIMED, before, strict=True):
            timed.time = time  # type: ignore[attr-defined]
        torch.set_num_threads(threads)


class _NoTime:
    @staticmethod
    def perf_counter() -> float:
        return 0.0


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every byte that a run leaves, by file; the numbers in the names of memories' files count for nothing."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name in (".lock", "report.html") or "/clients/" in f"/{name}":
            continue
        if name.startswith("checkpoint/round-"):
            body = json.loads(path.read_text())["checkpoint"]
            body["memories"] = {key: digest for key, (_, digest) in body["memories"].items()}
            found[name] = json.dumps(body, sort_keys=True)
        else:
            found[name] = path.read_bytes()
    return found


def differences(a: Path, b: Path) -> list[str]:
    """The files in which two folders differ."""
    one, other = contents(a), contents(b)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def generator(*names: object) -> random.Random:
    return random.Random("/".join(map(str, names)))


def table(rows: dict[str, dict[str, int]], columns: tuple[str, ...]) -> str:
    """A row for each name, and their sum."""
    total = {column: sum(row.get(column, 0) for row in rows.values()) for column in columns}
    width = max(map(len, [*rows, "together"])) + 2
    lines = ["".ljust(width) + "".join(column.rjust(11) for column in columns)]
    for name, row in {**rows, "together": total}.items():
        lines.append(name.ljust(width) + "".join(str(row.get(column, 0)).rjust(11) for column in columns))
    return "\n".join(lines)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
