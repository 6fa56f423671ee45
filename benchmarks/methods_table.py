"""Measure every method on the synthetic data, and write the table in docs/methods.md.

    python benchmarks/methods_table.py            # measures what is missing; the table grows with every cell
    python benchmarks/methods_table.py --quick    # 5 rounds of one seed, to see that all methods run; prints only

Each cell is kept in a file of its own beside this one, so that the command can be stopped and started again, and
the table has its data with it. Expected time: about 40 minutes on two free cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CELLS = Path(__file__).parent / "methods_table"
DOC = Path(__file__).parent.parent / "docs" / "methods.md"
MISSING = "not measured yet"
BEGIN, END = "<!-- table: python benchmarks/methods_table.py -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Row:
    """A method, and what is true of it by its definition."""

    name: str
    label: str
    shared: bool  # all clients end with one model
    level: str  # what a mask closes
    learns_mask: bool
    learns_params: bool = True


ROWS = (
    Row("fedavg", "FedAvg", True, "–", False),
    Row("fedprox", "FedProx", True, "–", False),
    Row("scaffold", "SCAFFOLD", True, "–", False),
    Row("fednova", "FedNova", True, "–", False),
    Row("moon", "MOON", True, "–", False),
    Row("ist", "IST", True, "neuron", False),
    Row("heterofl", "HeteroFL", True, "neuron", False),
    Row("fedrolex", "FedRolex", True, "neuron", False),
    Row("fjord", "FjORD", True, "neuron", False),
    Row("fedpm", "FedPM", True, "weight", True, False),
    Row("lotteryfl", "LotteryFL", False, "weight", False),  # pruned, not learned
    Row("fedweit", "FedWeIT", False, "neuron", True),
    Row("fedavg+pews-fixed", "FedPeWS-Fixed", True, "neuron", False),
    Row("fedavg+pews", "FedPeWS", True, "neuron", True),
)

FEDERATIONS: dict[int, dict[str, Any]] = {
    2: {"data": {"partition": "parity"}, "warmup": {"rounds": 25, "diversity": 5.0}},
    4: {"data": {"partition": "class"}, "warmup": {"rounds": 40, "diversity": 0.0}},
}
"""By number of clients; the warmups are the paper's for two clients and for four."""


def measure(row: Row, clients: int, rounds: int, seeds: list[int]) -> dict[str, Any]:
    """Bytes per round and final accuracies of one method."""
    from fedpews import run

    settings = dict(FEDERATIONS[clients])
    warmup = settings.pop("warmup")
    if "pews" in row.name:
        settings["warmup"] = warmup | ({"rounds": min(warmup["rounds"], rounds - 1)})
    result = run("synthetic-32k", method=row.name, rounds=rounds, seeds=seeds, **settings)
    last = [record for record in result.rounds if record["round"] == rounds]
    return {
        "up": statistics.fmean(result.rounds.column("bytes_up")),
        "down": statistics.fmean(result.rounds.column("bytes_down")),
        "accuracy": [record["accuracy"] for record in last],
        "personal": [record["personal_accuracy"] for record in last if "personal_accuracy" in record],
    }


def draw(cells: dict[tuple[str, int], dict[str, Any]]) -> str:
    """The table in Markdown."""
    heads = [
        "method",
        "one global model",
        "mask on",
        "learns mask",
        "learns weights",
        "bytes up",
        "bytes down",
    ]
    heads += [f"accuracy, N = {clients}" for clients in FEDERATIONS]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in ROWS:
        facts = [row.label, _tick(row.shared), row.level, _tick(row.learns_mask), _tick(row.learns_params)]
        first, bare = cells.get((row.name, 2)), cells["fedavg", 2]
        facts += [f"{first[way] / bare[way]:.2f}×" if first else MISSING for way in ("up", "down")]
        for clients in FEDERATIONS:
            cell = cells.get((row.name, clients))
            if cell is None:
                facts.append(MISSING)
                continue
            own = f", own models {_percent(cell['personal'])}" if cell["personal"] else ""
            facts.append(f"{_percent(cell['accuracy'])}{own}")
        lines.append(f"| {' | '.join(facts)} |")
    return "\n".join(lines)


def write(cells: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Put the table, as far as it is measured, in its page."""
    before, _, rest = DOC.read_text().partition(BEGIN)
    DOC.write_text(f"{before}{BEGIN}\n{draw(cells)}\n{END}{rest.partition(END)[2]}")


def _tick(true: bool) -> str:
    return "yes" if true else "no"


def _percent(values: list[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=CELLS)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    rounds, seeds = (5, [0]) if given.quick else (given.rounds, [0, 1, 2])
    given.out.mkdir(parents=True, exist_ok=True)
    cells = {}
    for clients in FEDERATIONS:
        for row in ROWS:
            kept = given.out / f"{row.name}-{clients}-{rounds}-{len(seeds)}.json"
            if not kept.exists():
                kept.write_text(json.dumps(measure(row, clients, rounds, seeds)))
            cells[row.name, clients] = json.loads(kept.read_text())
            print(f"{row.label}, N = {clients}: {_percent(cells[row.name, clients]['accuracy'])}", flush=True)
            if not given.quick:
                write(cells)
    if given.quick:
        print(draw(cells))


if __name__ == "__main__":
    main()
