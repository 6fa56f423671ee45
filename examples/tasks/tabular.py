"""Tables: a folder with a CSV file per clinic, labels by name, the classes' order from classes.txt.

python tabular.py
"""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import fedpews

CLASSES = ("healthy", "mild", "severe")


def write_clinics(folder: Path, samples: int = 150) -> None:
    """``clinic-a/train.csv`` and ``test.csv``, and so on; each clinic sees mostly one kind of patient."""
    rng = np.random.default_rng(0)
    for most, clinic in enumerate(("clinic-a", "clinic-b", "clinic-c")):
        (folder / clinic).mkdir(parents=True)
        for part, count in (("train", samples), ("test", samples // 2)):
            odds = [0.8 if label == most else 0.1 for label in range(3)]
            label = rng.choice(3, count, p=odds)
            frame = pd.DataFrame(
                {
                    "age": (50 + 10 * label + 8 * rng.standard_normal(count)) / 50 - 1,
                    "marker": label + 0.6 * rng.standard_normal(count),
                    "ratio": -label + 0.9 * rng.standard_normal(count),
                    "finding": [CLASSES[number] for number in label],
                }
            )
            frame.to_csv(folder / clinic / f"{part}.csv", index=False)
    (folder / "classes.txt").write_text("\n".join(CLASSES))


def main(rounds: int = 20, samples: int = 150) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_clinics(Path(folder), samples)
        for method in ("fedavg", "fedavg+pews"):
            result = fedpews.run(
                data={"name": f"folder:{folder}", "label": "finding", "validation": 0.1},
                metrics=["balanced_accuracy", "auroc"],
                model={"name": "mlp", "hidden": [32]},
                method=method,
                rounds=rounds,
                train={"lr": 0.1, "batch_size": 16},
                warmup={"rounds": rounds // 4} if method.endswith("pews") else {},
            )
            final, clinics = result.summary["final"], result.summary["clients"]["auroc"]["by_client"]
            print(
                f"{method:12} balanced accuracy {final['balanced_accuracy']['mean']:.3f}  auroc by clinic "
                + ", ".join(f"{name} {value:.3f}" for name, value in clinics.items())
            )


if __name__ == "__main__":
    main()
