"""Several findings per image, in ChestMNIST's layout: an npz file with 14 labels of 0 and 1 for each 28×28 image.

The file here is made up; with the published one (``fedpews data get chestmnist``) leave ``data_dir`` out.

    python multilabel.py
"""

import tempfile
from pathlib import Path

import numpy as np

import fedpews

FINDINGS = 14


def write_made_up_chestmnist(folder: Path, samples: int = 240) -> None:
    """Each finding brightens its own block of the image."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, share in (("train", 1.0), ("val", 0.25), ("test", 0.5)):
        count = int(samples * share)
        labels = (rng.random((count, FINDINGS)) < 0.3).astype(np.uint8)
        images = rng.integers(0, 120, (count, 28, 28))
        for finding in range(FINDINGS):
            row, column = 7 * (finding // 4), 7 * (finding % 4)
            images[:, row : row + 7, column : column + 7] += 120 * labels[:, finding, None, None]
        arrays |= {f"{part}_images": images.astype(np.uint8), f"{part}_labels": labels}
    folder.mkdir(parents=True)
    np.savez(folder / "chestmnist.npz", **arrays)


def main(rounds: int = 10, samples: int = 240) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_made_up_chestmnist(Path(folder) / "medmnist", samples)
        for method in ("fedavg", "fedavg+pews"):
            result = fedpews.run(
                data={
                    "name": "chestmnist",
                    "partition": "quantity",
                    "alpha": 1.0,
                    "clients": 3,
                    "validation": "given",
                },
                data_dir=folder,
                task="multilabel",
                metrics=["auroc", "macro_f1", "sensitivity"],
                model={"name": "cnn", "hidden": [8, 16]},
                method=method,
                rounds=rounds,
                train={"lr": 0.2, "batch_size": 16},
                warmup={"rounds": rounds // 4} if method.endswith("pews") else {},
            )
            final, best = result.summary["final"], result.summary["best_on_validation"]
            print(
                f"{method:12} auroc {final['auroc']['mean']:.3f}  macro f1 {final['macro_f1']['mean']:.3f}  "
                f"at the round best on validation data {best['test']['mean']:.3f}"
            )


if __name__ == "__main__":
    main()
