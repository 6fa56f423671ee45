"""Long runs beside other work: cells of studies, one core each, at idle priority.

    python benchmarks/run_queue.py [--jobs 2] [--out build/lab] [--normal] [FILE]

FILE (default benchmarks/queue.txt) has a line for each piece of work: ``study cells seeds [KEY=VALUE ...] [--small]``,
or a script, ``python FILE ...``. A line ``wait`` waits for all lines before it. What is finished is skipped, so the
same command goes on after a stop. Afterwards put the runs in compact form into the repository:
``fedpews reproduce STUDY --no-run --out build/lab --pages docs/results``.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).parent


def command(line: str, options: argparse.Namespace, number: int) -> list[str]:
    """What runs one line of the file."""
    if line.startswith("python "):
        return [sys.executable, *line.split()[1:]]
    study, cells, seeds, *rest = line.split()
    out = options.out
    settings = [word for word in rest if not word.startswith("--")] + ["runtime.workers=1"]
    words = [sys.executable, "-m", "fedpews", "reproduce", study, "--cells", cells, "--seeds", seeds]
    words += ["--out", str(out), "--pages", str(out / f"pages-{number}"), "--quiet"]
    words += [word for word in rest if word.startswith("--")]
    words += [word for setting in settings for word in ("--set", setting)]
    if options.normal:
        return words
    # never in the way of anything else
    return (["chrt", "-i", "0"] if shutil.which("chrt") else ["nice", "-n", "19"]) + words


def work(lines: queue.Queue[str], options: argparse.Namespace, number: int) -> None:
    """Run line after line until there are none left."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    while True:
        try:
            line = lines.get_nowait()
        except queue.Empty:
            return
        print(f"{datetime.now():%H:%M:%S} worker {number}: {line}", flush=True)
        with (options.out / f"worker-{number}.log").open("a") as log:
            done = subprocess.run(
                command(line, options, number), env=environment, stdout=log, stderr=log, check=False
            )
        print(f"{datetime.now():%H:%M:%S} worker {number}: exit {done.returncode}: {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "queue.txt")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/lab"))
    parser.add_argument("--normal", action="store_true", help="at normal priority, not at idle priority")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    group = Path("/proc/self/autogroup")
    if not options.normal and group.exists():
        # Linux shares the cores among sessions first: without this, an idle process of a session of its own takes half
        group.write_text("19")
    for number in range(options.jobs):
        # what is in the repository does not run again; run folders in OUT go before it
        published = HERE.parent / "docs/results/runs"
        shutil.copytree(published, options.out / f"pages-{number}/runs", dirs_exist_ok=True)
    for block in re.split(r"^wait$", options.file.read_text(), flags=re.MULTILINE):
        lines: queue.Queue[str] = queue.Queue()
        for line in block.splitlines():
            if line.strip() and not line.startswith("#"):
                lines.put(line)
        workers = [
            threading.Thread(target=work, args=(lines, options, number)) for number in range(options.jobs)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
