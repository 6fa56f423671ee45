"""Two hospitals with different MedMNIST sets: a whole deployment on this machine.

    python examples/hospitals/run.py --data-dir DIR     # DIR holds pathmnist.npz and octmnist.npz

Each hospital has a folder with its samples, which only its SuperNode reads. The server has no samples: the hospitals
evaluate the model and send three numbers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
HOSPITALS = {"pathology": ("pathmnist.npz", 0), "retina": ("octmnist.npz", 9)}
"""Each hospital's file, and its first label among the classes of both."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDPEWS_DATA"))
    parser.add_argument("--out", type=Path, default=Path("runs/hospitals"))
    parser.add_argument("--samples", type=int, default=1200, help="training samples of each hospital")
    parser.add_argument("more", nargs="*", help="further options of `fedpews flower up`, after --")
    given = parser.parse_args()
    missing = [
        name for name, _ in HOSPITALS.values() if not given.data_dir or not (given.data_dir / name).exists()
    ]
    if missing:
        print(
            f"skipped: {' and '.join(missing)} not found in {given.data_dir or 'no folder'}; give --data-dir, the"
        )
        print("folder of MedMNIST's files, or get them: fedpews data get pathmnist octmnist")
        return 0
    command = [sys.executable, "-c", "from fedpews.cli import main; main()", "flower", "up"]
    command += [str(HERE / "experiment.toml"), "--sites", "2", "--out", str(given.out)]
    for name, (file, first) in HOSPITALS.items():
        folder = given.out.parent / f"{given.out.name}-data" / name
        admit(given.data_dir / file, folder, name, first, given.samples)
        command += ["--site-data", f"folder:{folder.resolve()}"]
    return subprocess.run([*command, *given.more], check=False).returncode


def admit(archive: Path, folder: Path, name: str, first: int, samples: int) -> None:
    """Write the training and test samples of a hospital to its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    with np.load(archive) as data:
        for entry, part, count in ((name, "train", samples), ("test", "test", samples // 4)):
            images, labels = data[f"{part}_images"], data[f"{part}_labels"].reshape(-1)
            chosen = np.sort(random.permutation(len(labels))[:count])
            images = images[chosen]
            if images.ndim == 3:  # grey; the shared model takes colour
                images = np.repeat(images[..., None], 3, axis=3)
            np.savez(folder / f"{entry}.npz", x=images, y=labels[chosen].astype(np.int64) + first)


if __name__ == "__main__":
    sys.exit(main())
