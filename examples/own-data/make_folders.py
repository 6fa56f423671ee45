"""Write two small data sets in the folder layouts that fedpews reads.

    python make_folders.py

writes ``clinics/`` (an npz file per client) and ``photos/`` (a folder of images per class and client).
"""

from pathlib import Path

import numpy as np
from PIL import Image


def measurements(rng: np.random.Generator, classes: list[int], each: int) -> dict[str, np.ndarray]:
    """Six numbers per patient; every illness has its own typical values."""
    typical = np.random.default_rng(0).normal(0, 2, (4, 6))
    y = np.repeat(classes, each)
    return {"x": typical[y] + rng.normal(0, 1, (len(y), 6)), "y": y}


def photo(rng: np.random.Generator, motif: str) -> Image.Image:
    """A grey picture of 16×16 with one bright stroke."""
    picture = rng.integers(0, 90, (16, 16), dtype=np.uint8)
    at = int(rng.integers(4, 12))
    row, column = np.indices((16, 16))
    stroke = {
        "across": row == at,
        "upright": column == at,
        "falling": row - column == at - 8,
        "rising": row + column == at + 7,
    }[motif]
    picture[stroke] = 255
    return Image.fromarray(picture)


def main() -> None:
    rng = np.random.default_rng(1)
    Path("clinics").mkdir(exist_ok=True)
    for client, classes, each in [("north", [0, 1], 60), ("south", [2, 3], 60), ("test", [0, 1, 2, 3], 25)]:
        np.savez(f"clinics/{client}.npz", **measurements(rng, classes, each))
    for client, motifs, each in [
        ("anna", ["across", "upright"], 40),
        ("bert", ["falling", "rising"], 40),
        ("test", ["across", "upright", "falling", "rising"], 15),
    ]:
        for motif in motifs:
            folder = Path("photos", client, motif)
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(each):
                photo(rng, motif).save(folder / f"{number}.png")


if __name__ == "__main__":
    main()
