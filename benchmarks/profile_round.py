"""Where the time of a round goes: ``python benchmarks/profile_round.py [WORKLOAD] [--engine eager]``.

Processor milliseconds a round on one core, the quickest of several rounds, for plain rounds and rounds of a warmup, by
who spends them: the steps' machine code, the rest of training (starts, batches, stacking, finishes), evaluation, the
method's update with its averages, what the record counts (bytes, ownership), and the rest of the server's work.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from workloads import WORKLOADS, Workload

from fedpews.build import Setup
from fedpews.engines.choose import lanes_for
from fedpews.engines.compiled.engine import CompiledEngine
from fedpews.engines.compiled.native import Native
from fedpews.engines.eager import EagerEngine
from fedpews.engines.hardware import settled
from fedpews.experiment import Experiment
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Network
from fedpews.results.memories import MemoryStore
from fedpews.server import Server
from fedpews.warmup import with_warmup

WARM, ROUNDS = 3, 40
KINDS = (
    "machine code",
    "rest of training",
    "evaluation",
    "update and averages",
    "bytes and ownership",
    "rest",
)


class Inline:
    """Instead of the engine's threads, so that one clock sees everything."""

    def map(self, function: Callable[..., Any], *values: Iterable[Any]) -> Iterator[Any]:
        return iter(list(map(function, *values)))

    def submit(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*given))
        return future

    def shutdown(self, **_: Any) -> None:
        pass


class Clock:
    """Processor seconds by kind; what a timed call spends in another timed call counts there."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inner = [0.0]

    def time(self, owner: Any, name: str, kind: str) -> None:
        function = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            self._inner.append(0.0)
            try:
                return function(*given, **named)
            finally:
                taken = time.process_time() - began
                self.spent[kind] += taken - self._inner.pop()
                self._inner[-1] += taken

        object.__setattr__(owner, name, timed) if not isinstance(owner, type) else setattr(owner, name, timed)


def milliseconds(workload: Workload, engine_name: str, warmup: bool) -> dict[str, float]:
    data = workload.data()
    torch.manual_seed(0)
    net = Network(workload.model(), data.x[:1])
    engine: Any = (
        CompiledEngine(net, data, workload.schedule, 1, lanes_for(workload.jobs))
        if engine_name == "compiled"
        else EagerEngine(net, data, workload.schedule, 1)
    )
    engine._pool = Inline()
    method = with_warmup(FedAvg(), 10**9) if warmup else FedAvg()
    states = {seed: method.init(net, net.initial(), len(data)) for seed in workload.seeds}
    experiment = Experiment(participation=workload.cohort / len(data), train={"lr": workload.lr})
    setup = Setup(experiment, data, net, {}, method)
    server = Server(setup, engine, MemoryStore(None), states)
    clock, native = Clock(), Native.run
    clock.time(Native, "run", "machine code")
    clock.time(engine, "train", "rest of training")
    clock.time(engine, "evaluate", "evaluation")
    clock.time(method, "update", "update and averages")
    clock.time(server.measurer, "measure", "bytes and ownership")
    clock.time(server, "run", "rest")
    rounds = []
    with settled():
        for round in range(1, WARM + ROUNDS + 1):
            clock.spent.clear()
            server.run(round)
            if round > WARM:
                rounds.append({kind: 1000 * clock.spent[kind] for kind in KINDS})
    Native.run = native  # type: ignore[method-assign]
    return min(rounds, key=lambda found: sum(found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="C", choices=WORKLOADS)
    parser.add_argument("--engine", default="compiled", choices=("compiled", "eager"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    workload = WORKLOADS[given.workload]
    plain, warm = (milliseconds(workload, given.engine, warmup) for warmup in (False, True))
    print(
        f"{workload.what}; {given.engine} engine, processor milliseconds of the quickest of {ROUNDS} rounds"
    )
    print("| spent on | plain round | warmup round |\n|---|---|---|")
    for kind in KINDS:
        print(f"| {kind} | {plain[kind]:.1f} | {warm[kind]:.1f} |")
    print(f"| together | {sum(plain.values()):.1f} | {sum(warm.values()):.1f} |")


if __name__ == "__main__":
    main()
