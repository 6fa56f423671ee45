"""A run's folder does not reach outside itself: a link in a place of ours is refused before anything is opened."""

from __future__ import annotations

from pathlib import Path

from fedpews.errors import ConfigError
from fedpews.results import layout

FILES = (
    layout.CONFIG,
    layout.ROUNDS,
    layout.SUMMARY,
    layout.NEURONS,
    layout.FEDERATION,
    layout.LOCK,
    layout.SITES,
    layout.SITES_ERROR,
    layout.SITES_NOTICES,
    layout.SITES_RUN,
    layout.SITES_SEEN,
    layout.ACTIVATIONS,
)
FOLDERS = (layout.CHECKPOINT, layout.SITES_MEMORY, layout.SITES_WORK, "tensorboard", "wandb")
"""What a run may make in its folder, trackers included."""


def refuse_links(run: Path) -> None:
    """Raise a ConfigError if a file or folder that a run would write, cut or delete is a link.

    The folder itself may be one, and so may what is not ours in it.
    """
    memories = run / layout.CHECKPOINT / layout.MEMORIES
    ours = [run / name for name in (*FILES, *FOLDERS)] + [memories]
    # these two hold nothing but what runs put there
    for folder in (run / layout.CHECKPOINT, memories):
        ours += folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ()
    for path in ours:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link; a run's folder must not reach outside itself. Give another --out."
            )
