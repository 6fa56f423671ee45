"""Run tests again and again on a busy machine, and count what fails.

    python benchmarks/repeat_tests.py 5                        # the whole suite
    python benchmarks/repeat_tests.py 20 tests/ranks tests/flower tests/running/test_signals.py \
        tests/running/test_control.py tests/report/test_page_in_browser.py

A process per core keeps the machine busy (not with ``--idle``). Every run is a line of build/repeat.jsonl with its
commit, load and failures, so that counts add up over several days; the output of a run that fails is kept beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path("build")


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep as many cores busy with processes that only count."""
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def run_once(tests: list[str]) -> dict[str, object]:
    """Run the tests once, as `make test` does."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadscope",
        "-m",
        "not slow",
        *tests,
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    began, load = time.time(), os.getloadavg()[0]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    passed = re.findall(r"(\d+) passed", done.stdout)
    if done.returncode:
        (FOLDER / f"repeat-{began:.0f}.log").write_text(done.stdout + done.stderr)
    return {
        "commit": commit.stdout.strip(),
        "tests": tests,
        "seconds": round(time.time() - began),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "exit": done.returncode,
        "passed": int(passed[-1]) if passed else 0,
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("times", type=int)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--idle", action="store_true", help="without the processes that keep the cores busy")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    bad = 0
    with busy_cores(0 if options.idle else os.cpu_count() or 1):
        for number in range(1, options.times + 1):
            result = run_once(options.tests)
            with (FOLDER / "repeat.jsonl").open("a") as log:
                log.write(json.dumps(result) + "\n")
            bad += result["exit"] != 0
            print(f"{number} of {options.times}: {result}", flush=True)
    if bad:
        raise SystemExit(f"{bad} of {options.times} runs failed")
    print(f"{options.times} runs, no failure")


if __name__ == "__main__":
    main()
