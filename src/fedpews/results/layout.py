"""The names of a run folder's files; no other module has them."""

from __future__ import annotations

import re
from pathlib import Path

from fedpews.errors import ConfigError

CONFIG = "config.toml"
ROUNDS = "rounds.jsonl"
SUMMARY = "summary.json"
NEURONS = "neurons.jsonl"
"""Which neurons each client owned, a line per seed and round."""
FEDERATION = "federation.json"
"""The clients, their counts of classes, and the layers that masks cover."""
REPORT = "report.html"
SUMS = "SHA256SUMS"
"""The digests of the other files."""
GROWING = (ROUNDS, NEURONS)
"""Files that grow by lines while the run goes on."""
LOCK = ".lock"

MODEL = "model-{}.safetensors"
"""The global model of a seed."""
BEST = "best-{}.safetensors"
"""The best global model of a seed, of a run that keeps it."""
MASKS = "masks-{}.safetensors"
"""Which neurons each client owned in the last warmup round of a seed, named client-0, …"""
FINETUNED = "finetuned-{}.safetensors"
"""Every client's model of a seed after fine-tuning, its tensors named client-0/…"""

CHECKPOINT = "checkpoint"
STATE = "state-{}.safetensors"
"""In the checkpoint's folder: every seed's state of the method after a round."""
CONTENTS = "round-{}.json"
"""In the checkpoint's folder: which files make up the checkpoint of a round, and their digests."""
MEMORIES = "clients"
"""In the checkpoint's folder: what each client remembers."""

SITES = "sites.jsonl"
"""Of a run across sites: which sites answered in each round."""
SITES_ERROR = "flower-error.json"
"""Of a run across sites: how the server's process ended, if it failed."""
SITES_RUN = "flower-run-id"
"""Of a run across sites: what names its memory at the sites."""
SITES_SEEN = "sites-seen.json"
"""Of a run across sites: what each reported of itself at first contact; it must not change within a run."""
SITES_NOTICES = "sites.log"
"""Of a run across sites: which sites connected, which were refused or failed, and why."""
SITE_STATUS = "status.log"
"""At a site: a line for each round, and where its models are."""
STATISTICS = "statistics.json"
"""Of a run across sites: the sums that its sites sent before they trained."""
ROSTER = "roster.toml"
"""Of a coordinator: which key is which site's, approved by the operator."""
SITES_MEMORY = "sites"
"""Of a run across processes on one machine: where its sites keep their memories."""
SITES_WORK = "flower"
"""Of a run across processes on one machine: certificates, keys, logs, Flower's own files."""

ACTIVATIONS = "activations.jsonl"
"""Of a study of activations: what each neuron did for each client's data, a line per seed and round."""


def legal_name(text: str) -> str:
    """A folder's name that every system takes: Windows refuses more than others, and ignores case.

    >>> legal_name("my/methods.py:Own+pews"), legal_name("nul"), legal_name("fedavg+pews")
    ('my-methods.py-Own+pews', '_nul', 'fedavg+pews')
    """
    name = re.sub(r'[<>:"/\\|?*\x00-\x1f]', "-", text).rstrip(". ")
    is_reserved = re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name) is not None
    return f"_{name}" if is_reserved or not name else name


def is_finished(folder: Path) -> bool:
    """Whether the run in a folder came to its end."""
    return (folder / SUMMARY).exists()


def is_begun(folder: Path) -> bool:
    """Whether a folder holds any file of a run: a run that lost its configuration must not be overwritten either."""
    names = (CONFIG, ROUNDS, SUMMARY, NEURONS, FEDERATION, CHECKPOINT)
    if any((folder / name).exists() or (folder / name).is_symlink() for name in names):
        return True
    return any(any(folder.glob(name.format("*"))) for name in (MODEL, BEST, MASKS))


def refuse_links(run: Path) -> None:
    """Raise a ConfigError if a file or folder that a run would write, cut or delete is a link.

    The run's folder itself may be a link, and so may files in it that are not a run's.
    """
    files = [CONFIG, ROUNDS, SUMMARY, NEURONS, FEDERATION, LOCK, ACTIVATIONS]
    files += [SITES, SITES_ERROR, SITES_NOTICES, SITES_RUN, SITES_SEEN, STATISTICS]
    folders = [CHECKPOINT, SITES_MEMORY, SITES_WORK, "tensorboard", "wandb"]
    memories = run / CHECKPOINT / MEMORIES
    paths = [run / name for name in (*files, *folders)] + [memories]
    # these two hold only files of runs
    for folder in (run / CHECKPOINT, memories):
        paths += folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ()
    for path in paths:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link; a run's folder must not reach outside itself. Give another --out."
            )
