"""How long a user waits for the first round: a new process, an empty cache of compiled programs.

    python benchmarks/first_round.py [REPEATS]

For Synthetic-3.2K with a warmup, on each engine: the seconds from the start of Python to the end of round 1, and to the
end of the first round after the warmup, which is another program. PYTHONPATH chooses another version of the package.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

RUN = """
import fedpews
def done(records):
    print(records[0]["round"], flush=True)
fedpews.run("synthetic-3.2k", method="fedavg+pews", rounds=3, seeds=[0], warmup={"rounds": 2},
            runtime={"engine": "ENGINE"}, callbacks=[fedpews.Callback(round=done)])
"""


def seconds(engine: str) -> tuple[float, float]:
    """Until the end of round 1, and of round 3."""
    with tempfile.TemporaryDirectory() as cache:
        began, ends = time.perf_counter(), {}
        command = [sys.executable, "-W", "ignore", "-c", RUN.replace("ENGINE", engine)]
        environment = os.environ | {"FEDPEWS_CACHE": cache}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                ends[int(line)] = time.perf_counter() - began
    return ends[1], ends[3]


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for engine in ("compiled", "eager"):
        first, third = zip(*(seconds(engine) for _ in range(repeats)), strict=True)
        one, three = statistics.median(first), statistics.median(third)
        print(f"{engine}: round 1 after {one:.1f} s, round 3 after {three:.1f} s")


if __name__ == "__main__":
    main()
