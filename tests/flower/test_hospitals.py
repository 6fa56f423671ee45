"""The example of two hospitals: what can be said without MedMNIST's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from fedpews import data
from fedpews.experiment import Experiment

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospitals"


def test_without_the_files_it_says_so_and_stops(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "run.py"), "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: pathmnist.npz and octmnist.npz not found")


def test_each_hospital_gets_its_own_samples_in_the_format_of_own_data(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLE))
    try:
        import run as example
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.modules.pop("run", None)
    grey = np.zeros((40, 28, 28), np.uint8)
    labels = (np.arange(40) % 4)[:, None]
    np.savez(
        tmp_path / "oct.npz", train_images=grey, train_labels=labels, test_images=grey, test_labels=labels
    )
    example.admit(tmp_path / "oct.npz", tmp_path / "clinic", "retina", first=9, samples=20)
    found = data.load(f"folder:{tmp_path / 'clinic'}")
    assert len(found) == 1
    assert found.x.shape == (20, 3, 28, 28)
    assert set(found.y.tolist()) <= {9, 10, 11, 12}
    made = Experiment.load(EXAMPLE / "experiment.toml")
    assert made.flower.classes is not None
    assert found.classes <= made.flower.classes
