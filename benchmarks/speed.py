"""How fast a round is: a plain PyTorch loop, our engines, other frameworks, and the floor of bare kernels.

    make bench                          # everything, on one core and on two: a quarter of an hour
    python benchmarks/speed.py B        # one workload; the others' last results are kept

Every contender is a process of its own, as it would be in use, and all of them wait while one of them runs a
round. They take turns, so that a busy machine slows all alike; what counts are the ratios within a turn, of
which the median and the quartiles are reported. Other frameworks are measured when `make bench-peers` has
installed them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from statistics import median, quantiles

import floor
import plain_loop
import torch
from turns import CLOCKS, Contender, Turns
from workloads import WORKLOADS, Workload

from fedpews.build import Setup
from fedpews.engines.choose import lanes_for
from fedpews.engines.compiled.engine import CompiledEngine
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Engine
from fedpews.engines.hardware import settled
from fedpews.experiment import Experiment
from fedpews.methods.contract import Method
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Network
from fedpews.results.memories import MemoryStore
from fedpews.server import Server
from fedpews.warmup import Fixed, Learned, with_warmup

HERE = Path(__file__).parent
SLOW = 20.0
"""Seconds a round from which a contender takes part in the first turn only."""

PEERS = HERE / ".peers" / "bin" / "python"
PEER_NAMES = {"flower": "Flower simulation", "pfl": "pfl-research"}
RESTLESS, BESIDE = "Flower simulation", "plain loop, beside Flower"
CLOCK_NAMES = {
    "wall": "seconds on the wall",
    "cpu": "processor seconds (the machine was busy with other things)",
}


def a_round(name: str, workload: Workload, cores: int) -> Callable[[], object]:
    """What runs one round of all seeds."""
    data = workload.data()
    torch.manual_seed(0)
    kind, _, variant = name.partition(", ")
    precision = "bfloat16" if variant == "bfloat16" else "float32"
    net = Network(workload.model(), data.x[:1], precision=precision)
    if name == "plain loop":
        models = [workload.plain_model() for _ in workload.seeds]
        size = workload.schedule.batch_size
        return lambda: plain_loop.run_round(models, data, size, workload.lr, workload.cohort)
    lanes = lanes_for(workload.jobs)
    if name == "floor":
        # on one core; several cores would at best share the kernels evenly
        torch.set_num_threads(1)
        steps = workload.steps(data) // cores
        return (
            (lambda: floor.cnn_steps(steps))
            if workload.floor == "cnn"
            else lambda: floor.mlp_steps(steps // lanes, lanes)
        )
    engine: Engine
    if kind == "eager":
        engine = EagerEngine(net, data, workload.schedule, cores)
    else:
        engine = CompiledEngine(net, data, workload.schedule, cores, lanes)
    masks = {"warmup": Learned(), "fixed warmup": Fixed()}
    method = with_warmup(FedAvg(), 10**9, masks[variant]) if variant in masks else FedAvg()
    return our_round(workload, net, data, engine, method)


def our_round(workload: Workload, net: Network, data, engine: Engine, method: Method) -> Callable[[], object]:
    states = {seed: method.init(net, net.initial(), len(data)) for seed in workload.seeds}
    experiment = Experiment(participation=workload.cohort / len(data), train={"lr": workload.lr})
    setup = Setup(experiment, data, net, {}, method)
    server = Server(setup, engine, MemoryStore(None), states)
    count = iter(range(1, 10**9))
    settled().__enter__()  # as a run does; for as long as this process lives
    return lambda: server.run(next(count))


def commands(workload: Workload, cores: int) -> Iterator[tuple[str, list[str]]]:
    """Every contender's name and command."""
    ours = [name for engine in workload.engines for name in (engine, f"{engine}, warmup")]
    for name in ("plain loop", *ours, *workload.also, *(["floor"] if workload.floor else [])):
        yield name, [sys.executable, __file__, workload.name, "--cores", str(cores), "--contender", name]
    if PEERS.exists() and os.environ.get("BENCH_CLOCK") != "cpu":
        for peer, name in PEER_NAMES.items():
            yield name, [str(PEERS), str(HERE / "peers.py"), peer, workload.name, str(cores)]


def measure(workload: Workload, cores: tuple[int, ...], turns: int, without: Collection[str] = ()) -> dict:
    """Every contender's seconds a round, turn by turn, on each number of cores.

    The idle workers of Flower's simulation use CPU, so it takes turns with a plain loop alone, after the others have
    ended.
    """
    every = [
        (count, name, command)
        for count in cores
        for name, command in commands(workload, count)
        if name not in without
    ]
    quiet = [one for one in every if one[1] != RESTLESS]
    restless = [one for one in every if one[1] == RESTLESS]
    beside = [(count, BESIDE, command) for count, name, command in every if name == "plain loop"]
    seconds, memory = take_turns(workload.name, quiet, turns)
    if restless:
        beside_flower, _ = take_turns(workload.name, beside + restless, turns)
        seconds |= beside_flower
    return {
        "workload": workload.name,
        "what": workload.what,
        "steps": workload.steps(workload.data()),
        "seconds": {
            str(count): {name: values for (n, name), values in seconds.items() if n == count}
            for count in cores
        },
        # without that of Flower, whose simulation is several processes
        "megabytes": {
            str(count): {name: size // 2**20 for (n, name), size in memory.items() if n == count}
            for count in cores
        },
    }


def take_turns(
    workload: str, contenders: list[tuple[int, str, list[str]]], turns: int
) -> tuple[dict[tuple[int, str], list[float]], dict[tuple[int, str], int]]:
    """The seconds and the peak memory of contenders that are there at the same time, each idle while another runs."""
    logs = Path(tempfile.mkdtemp(prefix="fedpews-bench-"))
    running: dict[tuple[int, str], Contender] = {}
    slow: set[tuple[int, str]] = set()
    try:
        for count, name, command in contenders:
            contender = Contender(command, count, logs / f"{name}-{count}.log".replace(" ", "-"))
            running[count, name] = contender
            # the first round compiles and fills caches, so the second tells how long one takes
            again = None if contender.run() is None else contender.run()
            if again is None:
                contender.close()
                del running[count, name]
                print(f"  {name} on {count} core(s) did not run; see {logs}", file=sys.stderr)
            elif again > SLOW:
                slow.add((count, name))
        seconds: dict[tuple[int, str], list[float]] = {key: [] for key in running}
        for turn in range(turns):
            for key in list(running) if turn % 2 == 0 else list(running)[::-1]:
                if turn and key in slow:
                    continue
                taken = running[key].run()
                if taken is None:
                    raise SystemExit(f"{key} stopped; see {logs}")
                seconds[key].append(taken)
            print(f"  {workload}: turn {turn + 1} of {turns}", file=sys.stderr)
        memory = {key: contender.peak_memory() for key, contender in running.items()}
    finally:
        for contender in running.values():
            contender.close()
    return seconds, memory


def ratios(above: list[float], below: list[float]) -> list[float]:
    """How many times more seconds ``above`` takes than ``below``, turn by turn."""
    # who is slow takes part in the first turn alone
    return [a / b for a, b in zip(above, below, strict=False)]


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def page(machine: dict, results: list[dict]) -> str:
    """The results as Markdown."""
    lines = [
        "# Speed, as measured",
        "",
        "Written by `make bench`. Ratios within a turn: the median over turns and, in brackets, the quartiles. "
        f"A machine of {machine['cores']} cores ({machine['cpu']}, {machine['vectors']}: vectors of "
        f"{machine['vector_bits']} bits), torch {machine['torch']}, Python {machine['python']}; load before the "
        f"first turn {machine['load_before']:.1f}.",
        "",
        f"![Speed against the plain loop]({machine_kind(machine)}.png)",
    ]
    for result in results:
        turns = len(next(iter(next(iter(result["seconds"].values())).values())))
        lines += [
            "",
            f"## {result['workload']}: {result['what']}",
            "",
            f"{result['steps']:,} client steps a round, {turns} turns, {CLOCK_NAMES[result.get('clock', 'wall')]}.",
            "",
            "| cores | contender | µs a client step | times the plain loop's speed | peak memory (MB) |",
            "|---|---|---|---|---|",
        ]
        for cores, seconds in result["seconds"].items():
            for name, values in seconds.items():
                step = median(values) / result["steps"] * 1e6
                size = result.get("megabytes", {}).get(cores, {}).get(name)
                cells = f"{step:,.1f} | {spread(speeds(seconds, name))} | {f'{size:,}' if size else ''}"
                lines.append(f"| {cores} | {name} | {cells} |")
        lines += ["", "| ratio of seconds | " + " | ".join(f"{c} core(s)" for c in result["seconds"]) + " |"]
        lines.append("|---" * (1 + len(result["seconds"])) + "|")
        pairs = [
            ("compiled, warmup", "compiled"),
            ("eager, warmup", "eager"),
            ("eager, fixed warmup", "eager"),
            ("eager, bfloat16", "eager"),
            ("compiled", "floor"),
            ("eager", "floor"),
        ]
        for a, b in pairs:
            if all(a in s and b in s for s in result["seconds"].values()):
                cells = [spread(ratios(s[a], s[b])) for s in result["seconds"].values()]
                lines.append(f"| {a} / {b} | " + " | ".join(cells) + " |")
        if {"1", "2"} <= set(result["seconds"]):
            one, two = result["seconds"]["1"], result["seconds"]["2"]
            for name in (name for name in one if name in two and name != "floor"):
                lines.append(f"| {name}, one core / two cores | | {spread(ratios(one[name], two[name]))} |")
    return "\n".join(lines) + "\n"


def speeds(seconds: dict[str, list[float]], name: str) -> list[float]:
    """A contender's speed as a multiple of the plain loop's that took turns with it."""
    return ratios(seconds[BESIDE if name == RESTLESS and BESIDE in seconds else "plain loop"], seconds[name])


def plot(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    wide = min(3, len(results))
    tall = -(-len(results) // wide)
    figure, axes = pyplot.subplots(
        tall, wide, figsize=(4.6 * wide, 2.9 * tall), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(results) :]:
        axis.set_axis_off()
    for axis, result in zip(axes.flat, results, strict=False):
        height = 0.8 / len(result["seconds"])
        for place, (cores, seconds) in enumerate(result["seconds"].items()):
            names = [name for name in seconds if not name.startswith("plain loop")]
            middle = [median(speeds(seconds, name)) for name in names]
            at = [row + place * height for row in range(len(names))]
            bars = axis.barh(at, middle, height, label=f"{cores} core" + "s" * (int(cores) > 1))
            axis.bar_label(
                bars, [f" {speed:.2g}" if speed < 10 else f" {speed:.0f}" for speed in middle], fontsize=6
            )
        axis.set_yticks([row + height / 2 for row in range(len(names))], names, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(textwrap.fill(f"{result['workload']}: {result['what']}", 48), fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("times the speed of a plain PyTorch loop (the line)", fontsize=9)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


VECTOR_BITS = {"AVX512": 512, "AVX2": 256, "DEFAULT": 128, "NO AVX": 128, "SVE256": 256, "ZVECTOR": 128}
"""By torch's names: what its kernels use here, which may be less than the processor has."""


def about_this_machine() -> dict:
    """The processor by name, how many numbers its kernels take at once, and what the rest of the machine is."""
    from fedpews.engines.hardware import available_cores

    cpus = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    listed = [line.partition(":") for line in cpus]
    said = {key.strip(): value.strip() for key, _, value in listed}
    name = said.get("model name") or platform.processor() or platform.machine()
    name = re.sub(r"\((R|TM)\)|\bProcessor\b|\bCPU\b|@.*", "", name)
    kind = torch.backends.cpu.get_cpu_capability()
    return {
        "cores": available_cores(),
        "cpu": " ".join(name.split()),
        "family": f"{said['cpu family']}/{said['model']}" if {"cpu family", "model"} <= said.keys() else "",
        "vectors": kind,
        "vector_bits": VECTOR_BITS.get(kind),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def machine_kind(machine: dict) -> str:
    """A file's name for this kind of machine: results of different kinds do not overwrite each other."""
    text = f"{machine['cpu']} {machine['vectors']} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="|".join(WORKLOADS))
    parser.add_argument("--cores", type=int, action="append", help="default: one and two")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: on one core of a crowded machine"
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="leave a contender out"
    )
    parser.add_argument("--out", type=Path, help="default: results/KIND.json, by the kind of machine")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    given = parser.parse_args()
    cores = tuple(given.cores or (1, 2))
    if given.clock == "cpu":
        cores = (1,)
        os.environ["BENCH_CLOCK"] = "cpu"
    if given.contender:
        torch.set_num_threads(cores[0])
        Turns().serve(a_round(given.contender, WORKLOADS[given.workloads[0]], cores[0]))
    machine = about_this_machine()
    out = given.out or HERE / "results" / f"{machine_kind(machine)}.json"
    out.parent.mkdir(exist_ok=True)
    known = json.loads(out.read_text())["results"] if out.exists() else []
    found = {result["workload"]: result for result in known}
    for name in given.workloads:
        found[name] = measure(WORKLOADS[name], cores, given.turns, given.without) | {"clock": given.clock}
        results = [found[name] for name in WORKLOADS if name in found]
        out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
        out.with_suffix(".md").write_text(page(machine, results))
        plot(results, out.with_suffix(".png"))
    print(page(machine, results))


if __name__ == "__main__":
    main()
