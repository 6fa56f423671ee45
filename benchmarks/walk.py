"""How far a reader walks to follow one round: functions and files of fedpews that it enters, and steps between rooms.

    python benchmarks/walk.py             # the totals
    python benchmarks/walk.py --list      # which functions, and which rooms call which

The second round of a warmup of fedavg+pews on the eager engine, two clients, one step each: everything that is made
once is there already. Comprehensions and lambdas are read where they stand, and a generator is entered once.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fedpews

ROOT = Path(fedpews.__file__).parent


class Walk:
    """What was entered while ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.entered: set[tuple[str, str]] = set()
        self.crossings: Counter[tuple[str, str]] = Counter()
        self.generators: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        here, caller = frame.f_code, frame.f_back
        if event != "call" or not self.on or not here.co_filename.startswith(str(ROOT)):
            return
        is_resumed = bool(here.co_flags & inspect.CO_GENERATOR) and here in self.generators
        if here.co_name.startswith("<") or is_resumed:
            return
        self.generators.add(here)
        self.entered.add((here.co_filename, here.co_qualname))
        if caller is not None and caller.f_code.co_filename.startswith(str(ROOT)):
            rooms = room(caller.f_code.co_filename), room(here.co_filename)
            self.crossings[rooms] += rooms[0] != rooms[1]

    def watch(self, records: Sequence[dict[str, Any]]) -> None:
        self.on = records[0]["round"] == 1


def room(file: str) -> str:
    return Path(file).relative_to(ROOT).parts[0].removesuffix(".py")


def walk_a_round() -> Walk:
    walk = Walk()
    experiment = fedpews.Experiment(
        rounds=2,
        data={"name": "synthetic-3.2k"},
        method={"name": "fedavg+pews"},
        warmup={"rounds": 2},
        train={"steps": 1},
        runtime={"engine": "eager", "workers": 1},
    )
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        fedpews.run(experiment, callbacks=[fedpews.Callback(round=walk.watch)])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true")
    listed = parser.parse_args().list
    walk = walk_a_round()
    by_file = defaultdict(list)
    for file, name in sorted(walk.entered):
        by_file[str(Path(file).relative_to(ROOT))].append(name)
    print(f"{len(walk.entered)} functions in {len(by_file)} files, {walk.crossings.total()} room crossings")
    if listed:
        for file, names in by_file.items():
            print(f"{file}: {', '.join(names)}")
        for (caller, called), times in walk.crossings.most_common():
            if times:
                print(f"{times:4} {caller} -> {called}")


if __name__ == "__main__":
    main()
