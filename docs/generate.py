"""Write what other files know into the docs: every key, every public name, and the ratios of `make bench`.

python docs/generate.py      (make docs does it before it builds the site)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import fedpews
from fedpews.experiment import Key, config_keys, option_keys

ROOT = Path(__file__).parent.parent
SHOWN = {
    "plain loop": "a plain PyTorch loop",
    "Flower simulation": "Flower's simulation",
    "pfl-research": "pfl-research",
    "eager": "fedpews, eager",
    "compiled": "fedpews, compiled",
    "compiled, warmup": "compiled, a warmup round",
    "eager, warmup": "eager, a warmup round",
    "floor": "the bare kernels, back to back",
}


def pages() -> dict[Path, str]:
    """Every page with generated parts, as it should be."""
    texts: dict[Path, str] = {}
    for name, part, text in (
        ("docs/speed.md", "speed", speed()),
        ("docs/reference/api.md", "names", names()),
        ("docs/reference/keys.md", "config", table(config_keys())),
        ("docs/reference/keys.md", "options", table(option_keys())),
    ):
        path = ROOT / name
        texts[path] = with_part(texts.get(path) or path.read_text(), part, text)
    return texts


def with_part(page: str, name: str, text: str) -> str:
    """A page with one of its parts written anew, between two comments that name it."""
    begin, end = f"<!-- {name}: written by make docs -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"the page has lost its {name} part"
    return f"{before}{begin}{text}\n{end}{after}"


def table(keys: Iterable[Key]) -> str:
    """Keys in words."""
    rows = [(f"`{key.name}`", key.type, key.default and f"`{key.default}`", key.text) for key in keys]
    return markdown([("key", "type", "default", "meaning"), ("---",) * 4, *rows])


def names() -> str:
    """Every public name with the first sentence of its docstring."""
    public = sorted(fedpews.__all__, key=str.lower)
    rows = [(f"`fedpews.{name}`", first_sentence(getattr(fedpews, name).__doc__)) for name in public]
    return markdown([("name", "what it is"), ("---",) * 2, *rows])


def first_sentence(text: str) -> str:
    """
    >>> first_sentence("One thing. Another,\\nlonger.")
    'One thing'
    """
    return " ".join(text.split()).partition(". ")[0].rstrip(".").replace("``", "`")


def speed() -> str:
    """How many times as fast as the plain loop, on the same number of cores."""
    found = json.loads((ROOT / "benchmarks/results/amd-epyc-avx512-2-cores.json").read_text())
    rows = [["times the plain loop's speed", *SHOWN.values()], ["---"] * (1 + len(SHOWN))]
    for result in found["results"]:
        for cores, seconds in result["seconds"].items():
            cells = []
            for name in SHOWN:
                beside = seconds.get("plain loop, beside Flower") if name == "Flower simulation" else None
                both = zip(beside or seconds["plain loop"], seconds.get(name, []), strict=False)
                ratios = [plain / ours for plain, ours in both]
                cells.append(f"{median(ratios):.2f}" if ratios else "")
            rows.append([f"{result['workload']}, {cores} core{'s' * (cores != '1')}", *cells])
    return markdown(rows)


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar inside a cell is not the end of it."""
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
