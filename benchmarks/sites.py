"""Seconds a round across sites on loopback: fedpews now, an earlier checkout of it, and a bare Flower app.

    python benchmarks/sites.py --before /path/to/earlier/src --sites 2 --sites 4 --repeats 2

The three take turns, so that whatever else the machine does falls on all of them alike. The bare app sends arrays of
the same size, adds a number to them, and has no torch: what Flower itself costs, in its default isolation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from fedpews.flower.deploy.coordinator import Coordinator, register, run_command
from fedpews.flower.deploy.keys import make_site_key
from fedpews.flower.deploy.processes import LOOPBACK, Processes, free_port, key_values, program
from fedpews.results.records import read_rounds

CONFIG = """
rounds = {rounds}
[data]
name = "synthetic-3.2k"
partition = "iid"
clients = {sites}
train_per_class = 40
test_per_class = 20
[train]
batch_size = 16
[method]
name = "fedavg+pews"
[warmup]
rounds = 2
[runtime]
engine = "eager"
"""
PYPROJECT = """[project]
name = "bare"
version = "1.0.0"
description = "bare"
license = "Apache-2.0"
dependencies = []
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "bare"
[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"
[tool.flwr.app.config]
rounds = 1
sites = 1
out = ""
"""
SERVER = """import json, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    while len(list(grid.get_node_ids())) < config["sites"]:
        time.sleep(0.3)
    times = [time.time()]
    class Timed(FedAvg):
        def aggregate_train(self, server_round, replies):
            result = super().aggregate_train(server_round, replies)
            times.append(time.time())
            Path(config["out"]).write_text(json.dumps(times))
            return result
    model = ArrayRecord({"w": Array(np.zeros(15000, np.float32))})
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=config["sites"], min_available_nodes=config["sites"])
    strategy.start(grid, model, num_rounds=config["rounds"], timeout=600)
"""
CLIENT = """from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    arrays = ArrayRecord({"w": Array(message.content["arrays"]["w"].numpy() + 1)})
    metrics = MetricRecord({"num-examples": 10})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
"""


def run_fedpews(source: Path, sites: int, rounds: int, folder: Path) -> list[float]:
    """Each round's seconds of `fedpews flower up`."""
    config = folder / "trial.toml"
    config.write_text(CONFIG.format(rounds=rounds, sites=sites))
    command = [sys.executable, "-c", "from fedpews.cli import main; main()", "flower", "up", str(config)]
    command += ["--sites", str(sites), "--out", str(folder / "run"), "--quiet"]
    env = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run(command, env=env, check=True, capture_output=True)
    return [record["seconds"] for record in read_rounds(folder / "run")]


def run_bare(sites: int, rounds: int, folder: Path) -> list[float]:
    """Each round's seconds of an app that is nothing but Flower."""
    app, told = folder / "bare", folder / "times.json"
    app.mkdir()
    for name, text in (("pyproject.toml", PYPROJECT), ("server_app.py", SERVER), ("client_app.py", CLIENT)):
        (app / name).write_text(text)
    coordinator = Coordinator(folder / "coordinator", None, keep=False)
    try:
        coordinator.start()
        for site in range(sites):
            private, public = make_site_key(folder / "keys", site)
            register(coordinator.folder, public)
            command = [program("flower-supernode"), "--superlink", f"{LOOPBACK}:{coordinator.port}"]
            command += ["--root-certificates", str(coordinator.inner.authority), "--host", LOOPBACK]
            command += ["--auth-supernode-private-key", str(private), "--port", str(free_port())]
            command += ["--node-config", key_values({"site": site})]
            # ended with everything else that this process has started
            Processes(folder / f"site-{site}").start("supernode", command)
        settings = {"rounds": rounds, "sites": sites, "out": str(told)}
        coordinator.processes.start("run", run_command(app, settings))
        while coordinator.processes.ended("run") is None:
            coordinator.check()
            time.sleep(0.5)
    finally:
        coordinator.processes.stop_all()
    times = json.loads(told.read_text())
    return [b - a for a, b in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="the src folder of an earlier checkout")
    parser.add_argument("--sites", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON file with every round's seconds")
    options = parser.parse_args()
    now = Path(__file__).parents[1] / "src"
    ways: dict[str, Callable[[int, int, Path], list[float]]] = {"bare Flower": run_bare}
    if options.before:
        ways["before"] = lambda sites, rounds, place: run_fedpews(options.before, sites, rounds, place)
    ways["now"] = lambda sites, rounds, place: run_fedpews(now, sites, rounds, place)
    found: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for sites in options.sites or [2]:
            for name, way in ways.items():
                with tempfile.TemporaryDirectory() as place:
                    # the first round waits for the sites to come
                    seconds = way(sites, options.rounds, Path(place))[1:]
                found.setdefault(f"{name}, {sites} sites", []).extend(seconds)
                shown = ", ".join(f"{second:.1f}" for second in seconds)
                print(f"{name}, {sites} sites: {shown}", flush=True)
                if options.out:
                    options.out.write_text(json.dumps(found, indent=2))
    print("\nmedian seconds a round")
    for name, seconds in found.items():
        print(f"{name:24} {statistics.median(seconds):6.1f}  (of {len(seconds)})")


if __name__ == "__main__":
    main()
