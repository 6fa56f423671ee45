"""How much faster a run is over ranks: one process and torchrun take turns at the same run.

    python benchmarks/ranks.py                                  # two ranks, a CNN, five turns
    python benchmarks/ranks.py --ranks 4 --turns 9 --cohort 32

Every process trains one client at a time, so two ranks have two cores where one process has one; the third
contender is one process with as many threads as there are ranks, which is what a single machine would use.
Seconds are those of rounds.jsonl, without the start; the first round, which fills caches, is left out. Contenders
take turns, so on a busy machine the ratios are fit for use where the seconds are not. It also says whether the numbers
are the same, which they must be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

SAMPLES = 256
"""Of each client."""


def images() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    """As many clients as COHORT says, with random images; the time of a step does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.rand(count, 3, 32, 32, generator=generator) * 2 - 1
        return x, torch.randint(10, (count,), generator=generator)

    return [some(SAMPLES) for _ in range(int(os.environ["COHORT"]))], some(500)


def main() -> None:
    options = arguments()
    seconds: dict[str, list[float]] = {name: [] for name in ("one", "ranks", "threads")}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            for name, times in seconds.items():
                out = Path(folder) / f"{name}-{turn}"
                run(name, out, options)
                times.append(statistics.median(record["seconds"] for record in records(out)[1:]))
            places = [Path(folder) / f"{name}-{turn}" for name in seconds]
            same = all(numbers(place) == numbers(places[0]) for place in places)
            print(
                f"turn {turn + 1}: "
                + ", ".join(f"{name} {times[-1]:.2f} s a round" for name, times in seconds.items())
                + f"; the numbers are {'the same' if same else 'DIFFERENT'}",
                flush=True,
            )
    for name in ("ranks", "threads"):
        ratios = [a / b for a, b in zip(seconds["one"], seconds[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        what = f"{options.ranks} ranks" if name == "ranks" else f"one process of {options.ranks} threads"
        print(
            f"{what}: {middle:.2f} times as fast as one process of one thread (quartiles {low:.2f} to {high:.2f})"
        )


def run(name: str, out: Path, options: argparse.Namespace) -> None:
    """One run of a contender, in processes of its own."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        if name == "ranks"
        else []
    )
    settings = {
        "data.name": f"{Path(__file__).resolve()}:images",
        "data.partition": "given",
        "model.name": "cnn",
        "train.batch_size": 64,
        "runtime.engine": "eager",
        "runtime.workers": options.ranks if name == "threads" else 1,
        "runtime.checkpoint_every": 1000,
        "warmup.rounds": max(1, options.rounds // 2) if "pews" in options.method else 0,
    }
    command = [sys.executable, *launch, "-m", "fedpews", "run", str(out.parent / "empty.toml"), "--quiet"]
    (out.parent / "empty.toml").touch()
    command += [
        "--method",
        options.method,
        "--rounds",
        str(options.rounds),
        "--seeds",
        "0",
        "--out",
        str(out),
    ]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    told = os.environ | {"COHORT": str(options.cohort), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=told, stdout=subprocess.DEVNULL)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


def numbers(out: Path) -> list[dict[str, Any]]:
    # a line's sum is over its seconds too
    return [record | {"seconds": 0.0, "sum": ""} for record in records(out)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cohort", type=int, default=8, help="clients, all of which train in every round")
    parser.add_argument("--method", default="fedavg")
    return parser.parse_args()


if __name__ == "__main__":
    main()
