"""Put what was measured into the README: the claims' table of docs/results and the ratios of `make bench`.

make docs
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
SHOWN = {
    "plain loop": "a plain PyTorch loop with a DataLoader",
    "Flower simulation": "Flower's simulation",
    "pfl-research": "pfl-research",
    "eager": "fedpews, eager",
    "compiled": "fedpews, compiled",
    "floor": "the bare kernels, back to back",
}


def with_parts(readme: str) -> str:
    """The README with its measured parts written anew, each between two comments that name it."""
    for name, text in (("claims", claims()), ("speed", speed())):
        begin, end = f"<!-- {name}: written by make docs -->\n", f"<!-- end of {name} -->"
        before, _, rest = readme.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"the README has lost its {name} part"
        readme = f"{before}{begin}{text}\n{end}{after}"
    return readme


def claims() -> str:
    """Every claim with the paper's number, ours, the verdict and the command."""
    lines = (ROOT / "docs/results/README.md").read_text().splitlines()
    table = [line for line in lines[lines.index("## Claims") : lines.index("## Items")] if line[:1] == "|"]
    rows = [line.strip("| ").split(" | ") for line in table]
    kept = [[cell.strip() for place, cell in enumerate(row) if place != 1] for row in rows]  # not the item
    return "\n".join(f"| {' | '.join(row)} |" for row in kept)


def speed() -> str:
    """How many times as fast as the plain loop, on the same number of cores."""
    found = json.loads((ROOT / "benchmarks/results/amd-epyc-avx2-2-cores.json").read_text())
    columns = [(result, cores) for result in found["results"] for cores in result["seconds"]]
    heads = [f"{result['workload']}, {cores} core{'s' * (cores != '1')}" for result, cores in columns]
    rows = [["times the plain loop's speed", *heads], ["---"] * (1 + len(heads))]
    for name, label in SHOWN.items():
        cells = []
        for result, cores in columns:
            seconds = result["seconds"][cores]
            both = zip(seconds["plain loop"], seconds.get(name, []), strict=False)
            ratios = [plain / ours for plain, ours in both]
            cells.append(f"{median(ratios):.2f}" if ratios else "")
        rows.append([label, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_parts(path.read_text()))
