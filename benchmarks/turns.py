"""Contenders that take turns: each is a process that runs one round whenever it is asked to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

LEAST_SECONDS = 1.0

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""Seconds on the wall, or of the processor: on one core of an idle machine they are the same, and on a crowded one only
the processor's tell contenders apart. They do not count processes that a contender starts (other frameworks do)."""


class Turns:
    """The contender's side. One line in is one round to run; one line out is how many seconds it took.

    Everything else that is printed goes to standard error, so that a chatty framework cannot be misread.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._clock = CLOCKS[os.environ.get("BENCH_CLOCK", "wall")]
        self._began = 0.0

    def wait(self) -> None:
        """Until the next round is asked for. When nobody will ask any more, the process ends."""
        if not sys.stdin.readline():
            os._exit(0)  # from whichever thread a framework calls us in
        self._began = self._clock()

    def done(self, times: float = 1.0) -> None:
        """The round is over; ``times`` counts for contenders that run one seed where others run several."""
        print((self._clock() - self._began) * times, file=self._answers, flush=True)

    def serve(self, run: Callable[[], object]) -> None:
        """Answer for ever. Short rounds are run for a second and averaged: the first ones fill the caches."""
        while True:
            self.wait()
            rounds = 0
            while rounds == 0 or self._clock() - self._began < LEAST_SECONDS:
                run()
                rounds += 1
            self.done(1 / rounds)


class Contender:
    """The asking side: a process on so many cores."""

    def __init__(self, command: list[str], cores: int, log: Path, env: Mapping[str, str] = {}) -> None:
        pins = hasattr(os, "sched_setaffinity")  # elsewhere the number of threads has to do
        chosen = sorted(os.sched_getaffinity(0))[:cores] if pins else []
        self._log = log.open("w")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(cores)} | dict(env),
            preexec_fn=(lambda: os.sched_setaffinity(0, chosen)) if pins else None,
        )

    def run(self) -> float | None:
        """Seconds of one round, or None when the process is gone."""
        try:
            print(file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return None
        answer = self._process.stdout.readline()
        return float(answer) if answer else None

    def peak_memory(self) -> int:
        """The most bytes it has had resident so far (Linux only)."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def close(self) -> None:
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it is gone, and reads nothing more
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()
