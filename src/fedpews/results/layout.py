"""The files of a run folder: the one place that names them."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.toml"
ROUNDS = "rounds.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
LOCK = ".lock"

CHECKPOINT = "checkpoint"
STATE = "state.safetensors"
"""In the checkpoint's folder: every seed's state of the method."""
MEMORIES = "clients"
"""In the checkpoint's folder: what each client remembers."""

SITES = "sites.jsonl"
"""Of a run across sites: who answered in each round."""
SITES_ERROR = "flower-error.json"
"""Of a run across sites: how the server's process ended, if it failed."""
SITES_RUN = "flower-run-id"
"""Of a run across sites: what names its memory at the sites."""
SITES_SEEN = "sites-seen.json"
"""Of a run across sites: what each said of itself at first contact; it must not change within a run."""
ROSTER = "roster.toml"
"""Of a coordinator: which key is which site's, approved by the operator."""
SITES_MEMORY = "sites"
"""Of a run across processes on one machine: where its sites keep their memories."""
SITES_WORK = "flower"
"""Of a run across processes on one machine: certificates, keys, logs, Flower's own files."""

ACTIVATIONS = "activations.jsonl"
"""Of a study of activations: what each neuron did for each client's data, a line per seed and round."""


def model_file(seed: int) -> str:
    """The global model of a seed."""
    return f"model-{seed}.safetensors"


def masks_file(seed: int) -> str:
    """Who owned which neurons in the last warmup round of a seed."""
    return f"masks-{seed}.safetensors"


def masks_files(folder: Path) -> dict[int, Path]:
    """The masks of every seed that has them."""
    found = {int(file.stem.removeprefix("masks-")): file for file in folder.glob("masks-*.safetensors")}
    return dict(sorted(found.items()))


def is_finished(folder: Path) -> bool:
    """Whether the run in a folder came to its end."""
    return (folder / SUMMARY).exists()


def is_begun(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / CONFIG).exists()
