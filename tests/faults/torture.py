"""Runs killed at random moments (kill -9) and resumed until they are done, against runs that nobody disturbed.

    make torture KILLS=100 SEED=0

Every method on both engines is killed in each of the phases below; what is left at the end must be the undisturbed
run's, byte for byte. KILLS is the number of kills of each method, over its engines and phases.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from processes import METHODS, TRACEBACK, differences, fork, generator, run, say, table, warm_up

import fedpews.engines.compiled.cache
import fedpews.server

COLUMNS = ("tried", "identical", "healed", "refused", "wrong")

PHASES = ("write", "append", "rename", "sync", "delete", "start", "round", "compile")
"""Torn writes of whole files and of lines; before and after a rename; before and after what was written is on disk;
when old files go; before round 1; in the middle of a round; while the compiler runs."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Bomb:
    """Counts the calls of the system that belong to each phase, and kills this process at one of them."""

    phase: str = ""
    at: int = 0
    """Which call of the phase; 0 for none."""
    chance: float = 0.5
    """How much of a write is done, or whether a call is done before the kill."""

    def arm(self) -> dict[str, int]:
        """Watch from now on; the counts, which go on rising."""
        counts = dict.fromkeys(PHASES, 0)

        def hit(phase: str) -> bool:
            counts[phase] += 1
            return self.phase == phase and counts[phase] == self.at

        def around(name: str, phase: str) -> None:
            plain: Callable[..., Any] = getattr(os, name)

            def watched(*given: Any, **named: Any) -> Any:
                is_now = hit(phase)
                if is_now and self.chance < 0.5:
                    die()
                found = plain(*given, **named)
                if is_now:
                    die()
                return found

            setattr(os, name, watched)

        plain_write = os.write

        def write(file: int, data: Any) -> int:
            name = _name(file)
            phase = "write" if name.endswith(".new") else "append" if name.endswith(".jsonl") else ""
            if phase and hit(phase):
                plain_write(file, bytes(data)[: int(self.chance * len(data))])
                die()
            return plain_write(file, data)

        os.write = write
        around("replace", "rename")
        around("fsync", "sync")
        around("unlink", "delete")
        self._watch_rounds(hit)
        self._watch_compiler(hit)
        return counts

    def _watch_rounds(self, hit: Callable[[str], bool]) -> None:
        plain = fedpews.server.Server.run

        def watched(server: Any, round: int, *given: Any, **named: Any) -> Any:
            if round == 1 and hit("start"):
                die()
            if hit("round"):
                threading.Timer(0.03 * self.chance, die).start()
            return plain(server, round, *given, **named)

        fedpews.server.Server.run = watched  # type: ignore[method-assign]

    def _watch_compiler(self, hit: Callable[[str], bool]) -> None:
        module: Any = fedpews.engines.compiled.cache.subprocess
        plain = module.Popen

        def watched(command: Any, *given: Any, **named: Any) -> Any:
            if "-dumpfullversion" not in command and hit("compile"):
                threading.Timer(1.5 * self.chance, die).start()
            return plain(command, *given, **named)

        module.Popen = watched


def _name(file: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:
        return ""


@dataclass(frozen=True)
class Whole:
    """An undisturbed run, and how often each phase came up in it."""

    folder: Path
    counts: dict[str, int]
    seconds: float


def undisturbed(folder: Path, method: str, engine: str, cache: Path) -> Whole:
    def work() -> dict[str, int]:
        os.environ["FEDPEWS_CACHE"] = str(cache)
        counts = Bomb().arm()
        run(folder, method, engine)
        return counts

    began = time.perf_counter()
    ended = fork(work)
    if ended.code:
        raise SystemExit(f"{method} on the {engine} engine fails undisturbed: {ended.said}")
    return Whole(folder, ended.result, time.perf_counter() - began)


def torture(
    whole: Whole, folder: Path, method: str, engine: str, phase: str, cache: Path, draw: Random
) -> tuple[str, int, str]:
    """Kill a run in a phase, perhaps again when it goes on, then let it finish: the verdict, kills, what was said."""
    kills, said, resume = 0, "", False
    for attempt in range(6):
        chosen = phase if attempt == 0 else draw.choice([p for p in PHASES if p not in ("compile", "start")])
        # after the first kill, as often as not another one
        armed = attempt == 0 or (attempt < 3 and draw.random() < 0.5)
        count = max(1, whole.counts[chosen])
        bomb = Bomb(chosen, draw.randint(1, count), draw.random()) if armed else Bomb()

        def work(bomb: Bomb = bomb, resume: bool = resume) -> None:
            os.environ["FEDPEWS_CACHE"] = str(cache)
            bomb.arm()
            run(folder, method, engine, resume)

        ended = fork(work)
        said += ended.said
        resume = folder.exists() and any(p.name != ".lock" for p in folder.iterdir())
        if ended.was_killed:
            kills += 1
            continue
        if ended.code == TRACEBACK:
            return "wrong", kills, said
        if ended.code:
            return "refused", kills, said
        other = differences(whole.folder, folder)
        if other:
            return "wrong", kills, f"{said}\ndiffers in {', '.join(other)}"
        left = list(cache.glob("compiled/building-*")) if phase == "compile" else []
        if left:
            return "wrong", kills, f"left over: {left}"
        return "healed" if "going on from the checkpoint" in said else "identical", kills, said
    return "wrong", kills, f"{said}\nnever ends"


def phases_of(whole: Whole, engine: str) -> list[str]:
    return [p for p in PHASES if whole.counts[p] and (p != "compile" or engine == "compiled")]


def main(kills: int, seed: int, methods: list[str], engines: list[str], keep: Path | None) -> int:
    rows: dict[str, dict[str, int]] = {}
    place = Path(tempfile.mkdtemp(prefix="fedpews-torture-"))
    warm_up()
    # compiled once, for all runs but those that are killed in the compiler
    cache = keep or place / "cache"
    try:
        for method in methods:
            row = rows[method] = dict.fromkeys((*COLUMNS, "kills"), 0)
            wholes = {e: undisturbed(place / f"whole-{e}", method, e, cache) for e in engines}
            number = 0
            # a run may be done before its bomb goes off, and then it counts as tried, not as killed
            while row["kills"] < kills and number < 3 * kills:
                engine = engines[number % len(engines)]
                whole, draw = wholes[engine], generator(seed, method, number)
                known = [p for p in phases_of(whole, engine) if p != "compile"]
                phase = known[(number // len(engines)) % len(known)]
                own = cache
                # the compiler takes long, so it is killed once for each method
                if engine == "compiled" and number == engines.index(engine):
                    phase, own = "compile", place / "empty-cache"
                verdict, done, said = torture(whole, place / "run", method, engine, phase, own, draw)
                row["tried"] += 1
                row["kills"] += done
                row[verdict] += 1
                if verdict in ("wrong", "refused"):
                    say(f"{method}, {engine}, in {phase}, number {number}: {verdict}: {said.strip()[-1500:]}")
                shutil.rmtree(place / "run", ignore_errors=True)
                shutil.rmtree(place / "empty-cache", ignore_errors=True)
                number += 1
            for whole in wholes.values():
                shutil.rmtree(whole.folder)
            say(f"{method}: {row}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    say(table(rows, ("kills", *COLUMNS)))
    return sum(row["wrong"] + row["refused"] for row in rows.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="of each method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--engines", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--cache", type=Path, help="compiled programs to use again")
    given = parser.parse_args()
    sys.exit(1 if main(given.kills, given.seed, given.methods, given.engines, given.cache) else 0)
