"""Check that a change leaves the numbers of runs as they are.

    python benchmarks/same_numbers.py before.json     # before the change: writes the file
    python benchmarks/same_numbers.py before.json     # after it: compares, and fails if a number differs

Every record of synthetic-32k (3 seeds, both engines, three methods) and of cifar-mnist (2 rounds, if the data are
there) is compared, all columns except ``seconds``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import fedpews

METHODS = ("fedavg", "fedavg+pews", "scaffold+pews-fixed")
SYNTHETIC = {"experiment": "synthetic-32k", "rounds": 12, "seeds": [0, 1, 2], "warmup": {"rounds": 4}}
IMAGES = {"experiment": "cifar-mnist", "rounds": 2, "seeds": [0], "warmup": {"rounds": 1}}


def runs() -> dict[str, dict[str, Any]]:
    """The name of each run, and its arguments."""
    synthetic = {
        f"synthetic-32k {engine} {method}": {**SYNTHETIC, "method": method, "runtime": {"engine": engine}}
        for engine in ("eager", "compiled")
        for method in METHODS
    }
    return synthetic | {f"cifar-mnist {method}": {**IMAGES, "method": method} for method in METHODS}


def numbers(arguments: dict[str, Any]) -> Any:
    """The records of a run without the time they took, as JSON has them."""
    records = [dict(record) for record in fedpews.run(**arguments).rounds]
    for record in records:
        del record["seconds"]
    return json.loads(json.dumps(records))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    now = {}
    for name, arguments in runs().items():
        try:
            now[name] = numbers(arguments)
        except fedpews.DataMissing as missing:
            print(f"{name}: skipped: {missing}")
    if not path.exists():
        path.write_text(json.dumps(now))
        print(f"{len(now)} runs are in {path}")
        return
    before = json.loads(path.read_text())
    different = [name for name, records in now.items() if records != before.get(name)]
    if different:
        raise SystemExit(f"different: {', '.join(different)}")
    print(f"{len(now)} runs are equal")


if __name__ == "__main__":
    main()
