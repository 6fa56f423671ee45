"""Peak memory and processor time for different numbers of clients, with the same data and equally large cohorts.

    python benchmarks/memory.py                       # 100 and 10,000 clients, 100 of them in each round
    python benchmarks/memory.py --clients 100 1000 --method scaffold --rounds 50 --no-folder

Each number of clients runs in a process of its own, on the same random images, so what differs between the lines
is what it costs to have more clients.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measure(clients: int, options: argparse.Namespace) -> dict[str, float]:
    """One run in this process."""
    import torch

    import fedpews
    from fedpews.data import build

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(options.samples, 3, 32, 32, generator=generator) * 2 - 1
    y = torch.randint(10, (options.samples,), generator=generator)
    data = build(x, y, torch.arange(options.samples).chunk(clients), x[:1000], y[:1000], 10)
    before, began = peak(), time.process_time()
    experiment = fedpews.Experiment(
        rounds=options.rounds,
        participation=min(1.0, options.cohort / clients),
        method={"name": options.method},
        warmup={"fraction": 0.5} if "pews" in options.method else {},
        model={"name": "cnn", "hidden": options.hidden},
        train={"steps": 1, "batch_size": 2, "lr": 0.01},
        runtime={"engine": "eager"},
    )
    with tempfile.TemporaryDirectory() as folder:
        result = fedpews.run(
            experiment, clients=data, out=None if options.no_folder else Path(folder) / "run"
        )
    return {
        "clients": len(data),
        "start": before,
        "peak": peak(),
        "seconds": (time.process_time() - began) / len(result.rounds),
    }


def peak() -> float:
    """Of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--cohort", type=int, default=100, help="clients in each round")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--method", default="fedavg+pews")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 64, 128, 128], help="of the CNN")
    parser.add_argument("--no-folder", action="store_true", help="run as from Python, without a run folder")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.clients[0], options)))
        return
    print(f"{options.method}, {options.cohort} clients a round, {options.rounds} rounds")
    for clients in options.clients:
        command = [sys.executable, __file__, *sys.argv[1:], "--alone", "--clients", str(clients)]
        line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(line.splitlines()[-1])
        print(
            f"{clients:>7,} clients: peak {found['peak']:6.0f} MB ({found['start']:.0f} with the data loaded), "
            f"{found['seconds']:.2f} processor seconds a round"
        )


if __name__ == "__main__":
    main()
