"""A folder that nobody but this user can put anything into: what lies there is loaded into this process as code."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fedpews.engines.compiled.program import CannotCompile


def cache_dir() -> Path:
    """Where compiled programs are kept: FEDPEWS_CACHE, or fedpews in the user's cache; in it, compiled."""
    given = os.environ.get("FEDPEWS_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedpews"
    return own_folder((Path(given) if given else base).absolute() / "compiled")


def own_folder(folder: Path) -> Path:
    """The folder, made if need be, with mode 0700; CannotCompile if somebody else could plant a file in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Windows has no such modes, and no compiled steps either
        if hasattr(os, "getuid"):
            _check(folder)
    except OSError as error:
        raise CannotCompile(f"the cache {folder} cannot be used: {error.strerror or error}") from error
    return folder


def _check(folder: Path) -> None:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise CannotCompile(f"the cache {folder} is a link or a file, not a folder")
    # root could do so anyway
    if state.st_uid not in (os.getuid(), 0):
        raise CannotCompile(f"the cache {folder} belongs to another user")
    # what others could write to, they may have written to already: tightening it now would not help
    if state.st_mode & 0o022:
        raise CannotCompile(
            f"others may write to the cache {folder} (mode {stat.S_IMODE(state.st_mode):04o}); remove it, or give "
            "another place in FEDPEWS_CACHE"
        )
    if state.st_mode & 0o055 and state.st_uid == os.getuid():
        folder.chmod(0o700)
    # whoever may rename a folder above may put another in its place
    for parent in folder.resolve().parents:
        state = parent.stat()
        # a group that has the number of its only user is common (umask 002)
        loose = 0o002 if state.st_gid == os.getuid() else 0o022
        is_open = bool(state.st_mode & loose) and not state.st_mode & stat.S_ISVTX
        if is_open or state.st_uid not in (os.getuid(), 0):
            raise CannotCompile(
                f"others may replace the cache {folder}: {parent} is not only yours; give another place in "
                "FEDPEWS_CACHE"
            )
