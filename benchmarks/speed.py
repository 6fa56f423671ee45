"""How fast a round is: a plain PyTorch loop, our engines, other frameworks, and the floor of bare kernels.

    make bench                                  # everything, on one core and on two
    python benchmarks/speed.py A2 --cores 1     # one workload

Contenders take turns, one round each, so that a busy machine slows all of them; what counts are the ratios
within a turn, of which the median and the quartiles are reported. Other frameworks are measured when
`make bench-peers` has installed them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import floor
import plain_loop
import torch
from workloads import WORKLOADS, Workload

from fedpews.methods.contract import Method, Nest
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Network
from fedpews.runtimes.choose import lanes_for
from fedpews.runtimes.compiled import CompiledEngine
from fedpews.runtimes.eager import EagerEngine
from fedpews.runtimes.job import Engine
from fedpews.runtimes.rounds import Rounds, Rules
from fedpews.warmup import with_warmup

HERE = Path(__file__).parent
PEERS = HERE / ".peers" / "bin" / "python"


class Memories(dict[tuple[int, int], Nest]):
    def get(self, seed: int, client: int) -> Nest | None:  # type: ignore[override]
        return super().get((seed, client))

    def put(self, seed: int, client: int, memory: Nest) -> None:
        self[seed, client] = memory


def our_round(workload: Workload, net: Network, data, engine: Engine, method: Method) -> Callable[[], None]:
    states = {seed: method.init(net, net.initial(), len(data)) for seed in workload.seeds}
    rules = Rules(participation=workload.cohort / len(data), lr=workload.lr)
    rounds = Rounds(net, method, data, engine, Memories(), rules, states)
    count = iter(range(1, 10**9))
    return lambda: rounds.run(next(count))


def contenders(workload: Workload, cores: int) -> dict[str, Callable[[], None]]:
    """A name, and what runs one round of all seeds."""
    data = workload.data()
    torch.manual_seed(0)
    net = Network(workload.model(), data.x[:1])
    plain = [plain_loop.PlainCNN() if workload.name == "B" else workload.model() for _ in workload.seeds]
    size, warmup = workload.schedule.batch_size, with_warmup(FedAvg(), 10**9)
    eager = EagerEngine(net, data, workload.schedule, cores)
    found: dict[str, Callable[[], None]] = {
        "plain loop": lambda: plain_loop.run_round(plain, data, size, workload.lr, workload.cohort),
        "eager": our_round(workload, net, data, eager, FedAvg()),
        "eager, warmup": our_round(workload, net, data, eager, warmup),
    }
    if workload.name == "B":
        found["floor"] = lambda: floor.cnn_steps(workload.steps(data))
        return found
    compiled = CompiledEngine(net, data, workload.schedule, cores, lanes_for(workload.jobs))
    lanes = lanes_for(workload.jobs)
    return found | {
        "compiled": our_round(workload, net, data, compiled, FedAvg()),
        "compiled, warmup": our_round(workload, net, data, compiled, warmup),
        "floor": lambda: floor.mlp_steps(workload.steps(data) // lanes, lanes),
    }


def peer_seconds(workload: Workload, cores: int) -> dict[str, float]:
    """Seconds a round of the other frameworks, each in a process of its own."""
    if not PEERS.exists():
        return {}
    found = {}
    for peer in ("flower", "pfl"):
        command = [str(PEERS), str(HERE / "peers.py"), peer, workload.name, str(cores)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[peer] = float(json.loads(done.stdout.splitlines()[-1])["seconds"])
        else:
            print(f"  {peer} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:150]}")
    return found


def measure(workload: Workload, cores: int, turns: int) -> dict[str, object]:
    """Every contender's seconds a round, turn by turn."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cores]))
    torch.set_num_threads(cores)
    running = contenders(workload, cores)
    for run in running.values():
        run()  # compile, fill caches
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(turns):
        order = list(running) if turn % 2 == 0 else list(running)[::-1]
        for name in order:
            if name == "floor":
                torch.set_num_threads(
                    1
                )  # one core's kernels; on two cores two of them would run side by side
            began = time.perf_counter()
            running[name]()
            seconds[name].append(time.perf_counter() - began)
            torch.set_num_threads(cores)
    for name, value in peer_seconds(workload, cores).items():
        seconds[name] = [value]
    steps = workload.steps(workload.data())
    return {
        "workload": workload.name,
        "what": workload.what,
        "cores": cores,
        "steps": steps,
        "seconds": seconds,
    }


def ratios(result: dict, above: str, below: str) -> list[float]:
    """How many times more seconds ``above`` takes than ``below``, within each turn."""
    seconds = result["seconds"]
    if above not in seconds or below not in seconds:
        return []
    a, b = seconds[above], seconds[below]
    return [x / y for x, y in zip(a if len(a) == len(b) else [median(a)] * len(b), b, strict=False)]


def show(result: dict) -> None:
    seconds, steps = result["seconds"], result["steps"]
    print(
        f"\n{result['workload']}: {result['what']}; {result['cores']} core(s), {steps} client steps a round"
    )
    for name, values in seconds.items():
        faster = ratios(result, "plain loop", name)
        print(
            f"  {name:18} {median(values) / steps * 1e6:9.1f} µs a step   {spread(faster)} × the plain loop"
        )
    for a, b in (
        ("compiled, warmup", "compiled"),
        ("eager, warmup", "eager"),
        ("compiled", "floor"),
        ("eager", "floor"),
    ):
        if found := ratios(result, a, b):
            print(f"  {a} / {b}: {spread(found)}")


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:6.2f}" if values else ""
    low, middle, high = quantiles(values, n=4)
    return f"{middle:6.2f} ({low:.2f} to {high:.2f})"


def plot(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4.2 * len(results), 3.6), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        names = [name for name in result["seconds"] if name != "plain loop"]
        parts = [ratios(result, "plain loop", name) for name in names]
        axis.barh(names, [median(part) for part in parts], color="#4878a8")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(f"{result['workload']}, {result['cores']} core(s)", fontsize=10)
        axis.set_xlabel("times the plain loop's speed")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="|".join(WORKLOADS))
    parser.add_argument("--cores", type=int, choices=(1, 2), help="default: one, then two")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(WORKLOADS[given.workloads[0]], given.cores, given.turns)))
        return
    results = []
    for name in given.workloads:
        for cores in (given.cores,) if given.cores else (1, 2):
            # a process for each, because the number of cores is fixed when torch starts
            command = [
                sys.executable,
                __file__,
                name,
                "--child",
                "--cores",
                str(cores),
                "--turns",
                str(given.turns),
            ]
            environment = os.environ | {"OMP_NUM_THREADS": str(cores)}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            show(results[-1])
            machine = {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cpu": torch.backends.cpu.get_cpu_capability(),
                "load": os.getloadavg()[0],
            }
            given.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    plot(results, given.out.with_suffix(".png"))
    print(f"\n{given.out}, {given.out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
