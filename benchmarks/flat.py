"""Whether a long run stays as it began: memory, handles, threads and temporary files, and what a round adds on disk.

    make flat

One run of 2,000 rounds (scaffold+pews, 4 clients, 2 seeds, a checkpoint every 5 rounds), looked at every 100 rounds.
Fails if anything but the records grows after the first 200 rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fedpews
from fedpews.results.layout import CHECKPOINT, NEURONS, ROUNDS


def look(out: Path, scratch: Path) -> dict[str, int]:
    """What this process and its folder hold now."""
    status = Path("/proc/self/status").read_text()
    kept = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    saved = [path for path in (out / CHECKPOINT).rglob("*") if path.is_file()]
    return {
        "memory_kB": kept,
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "temporary": sum(1 for path in scratch.rglob("*") if out not in (path, *path.parents)),
        "files": sum(1 for path in out.rglob("*") if path.is_file()),
        "checkpoint_B": sum(path.stat().st_size for path in saved),
        "rounds_B": (out / ROUNDS).stat().st_size,
        "neurons_B": (out / NEURONS).stat().st_size,
    }


def main(rounds: int, every: int) -> int:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    with tempfile.TemporaryDirectory(prefix="fedpews-flat-") as made:
        scratch = Path(made)
        tempfile.tempdir = made
        out, seen = scratch / "run", {}

        def watch(records: Sequence[dict[str, Any]]) -> None:
            round = records[0]["round"]
            if round % every == 1 and round > 1:
                seen[round - 1] = look(out, scratch)
                print(round - 1, seen[round - 1], flush=True)

        fedpews.run(
            clients=[(x[i::4], y[i::4]) for i in range(4)],
            test=(x, y),
            method="scaffold+pews",
            rounds=rounds,
            seeds=[0, 1],
            model={"name": "mlp", "hidden": [8, 8]},
            train={"batch_size": 16, "steps": 1},
            warmup={"rounds": rounds // 2},
            runtime={"engine": "eager", "workers": 2},
            out=out,
            callbacks=[fedpews.Callback(round=watch)],
        )
    early, late = (seen[r] for r in (min(r for r in seen if r >= rounds // 10), max(seen)))
    grown = {
        key: late[key] - early[key]
        for key in ("handles", "threads", "temporary", "files")
        if late[key] > early[key]
    }
    # the allocator settles late; what is kept for every round would be more than this
    if late["memory_kB"] - early["memory_kB"] > 10_000:
        grown["memory_kB"] = late["memory_kB"] - early["memory_kB"]
    if late["checkpoint_B"] > 1.05 * early["checkpoint_B"]:
        grown["checkpoint_B"] = late["checkpoint_B"] - early["checkpoint_B"]
    span = max(seen) - min(seen)
    each = {key: round((late[key] - seen[min(seen)][key]) / span) for key in ("rounds_B", "neurons_B")}
    print(
        f"a round adds {each['rounds_B']} bytes of records (2 seeds) and {each['neurons_B']} of neurons on average;"
    )
    print(f"both checkpoints together have {late['checkpoint_B']} bytes. Grown: {grown or 'nothing'}")
    return len(grown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100)
    given = parser.parse_args()
    sys.exit(1 if main(given.rounds, given.every) else 0)
