"""Is a round as fast, and as small, as it was? This checkout against another one, in turns.

    git worktree add /tmp/before v0.1
    python benchmarks/against.py /tmp/before A2 A4 B C --turns 9

Each checkout's own benchmarks/speed.py runs its rounds in a process of its own. What counts are the ratios within
a turn: this checkout's seconds over the other's, and its peak memory over the other's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from speed import ratios, spread
from turns import Contender
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent.parent


def start(checkout: Path, workload: str, contender: str, cores: int, log: Path) -> Contender:
    command = [sys.executable, str(checkout / "benchmarks" / "speed.py"), workload]
    command += ["--cores", str(cores), "--contender", contender]
    return Contender(command, cores, log, {"PYTHONPATH": str(checkout / "src")})


def compare(other: Path, workload: str, contender: str, cores: int, turns: int) -> str | None:
    """A row of the table, or None when one of the two did not run."""
    logs = Path(tempfile.mkdtemp(prefix="fedpews-bench-"))
    pair = [
        start(checkout, workload, contender, cores, logs / f"{name}.log")
        for name, checkout in (("this", HERE), ("other", other))
    ]
    seconds: list[list[float]] = [[], []]
    try:
        for turn in range(-2, turns):  # the first two compile and fill caches
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                taken = pair[which].run()
                if taken is None:
                    print(f"{workload}, {contender} did not run; see {logs}", file=sys.stderr)
                    return None
                if turn >= 0:
                    seconds[which].append(taken)
        sizes = [process.peak_memory() for process in pair]
    finally:
        for process in pair:
            process.close()
    row = [
        workload,
        contender,
        str(cores),
        spread(ratios(*seconds)),
        f"{sizes[0] / 1e6:.0f} / {sizes[1] / 1e6:.0f} MB",
        f"{sizes[0] / sizes[1]:.2f}",
    ]
    return f"| {' | '.join(row)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="another checkout of fedpews")
    parser.add_argument("workloads", nargs="*", default=["A2", "A4", "B", "C"])
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    print("| workload | contender | cores | seconds, this / other | peak memory, this / other | ratio |")
    print("|---|---|---|---|---|---|")
    for name in given.workloads:
        for engine in WORKLOADS[name].engines:
            for contender in (engine, f"{engine}, warmup"):
                row = compare(given.other.resolve(), name, contender, given.cores, given.turns)
                if row is not None:
                    print(row, flush=True)


if __name__ == "__main__":
    main()
