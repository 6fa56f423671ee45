"""The folder of compiled programs, and the compiler as a process that Ctrl-C does not reach.

Libraries in the folder are loaded into this process as code, so no other user may be able to write to it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedpews.engines.compiled.program import CannotCompile


def cache_dir() -> Path:
    """Where compiled programs are kept: FEDPEWS_CACHE, or fedpews in the user's cache; in it, compiled."""
    given = os.environ.get("FEDPEWS_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedpews"
    return own_folder((Path(given) if given else base).absolute() / "compiled")


def own_folder(folder: Path) -> Path:
    """The folder, created if it is missing, with mode 0700; CannotCompile if another user could write to it."""
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
    # others may have written to it already, so changing its mode now would not help
    if state.st_mode & 0o022:
        raise CannotCompile(
            f"others may write to the cache {folder} (mode {stat.S_IMODE(state.st_mode):04o}); remove it, or set "
            "FEDPEWS_CACHE to another folder"
        )
    if state.st_mode & 0o055 and state.st_uid == os.getuid():
        folder.chmod(0o700)
    # a user who may rename a folder above it could replace it
    for parent in folder.resolve().parents:
        state = parent.stat()
        # a group that has the number of its only user is common (umask 002)
        loose = 0o002 if state.st_gid == os.getuid() else 0o022
        is_open = bool(state.st_mode & loose) and not state.st_mode & stat.S_ISVTX
        if is_open or state.st_uid not in (os.getuid(), 0):
            raise CannotCompile(
                f"others may replace the cache {folder}: {parent} is not only yours; set FEDPEWS_CACHE "
                "to another folder"
            )


def find(folder: Path, key: str) -> Path | None:
    """A library of the cache; a file whose bytes do not match the digest in its name is deleted."""
    library = None
    for path in folder.glob(f"{key}-*.so"):
        with suppress(OSError):
            if path.name == _name(key, path):
                library = path
            # a damaged library may load and crash the process only later, so it is never tried
            else:
                path.unlink()
    return library


def keep(folder: Path, key: str, make: Callable[[Path], Path]) -> Path:
    """Build a library in a scratch folder and move it into the cache."""
    # inside the cache: a rename is atomic only within one file system, and two processes may build the
    # same library at once
    try:
        with scratch_folder(folder) as scratch:
            built = make(scratch)
            library = folder / _name(key, built)
            os.replace(built, library)
    except OSError as error:
        raise CannotCompile(f"the cache {folder} cannot be written: {error.strerror or error}") from error
    return library


def _name(key: str, path: Path) -> str:
    return f"{key}-{digest(path.read_bytes())}.so"


def c_library(name: str, source: str, compiler: str, *flags: str) -> Path:
    """A library of the cache, compiled from C if it is not there."""
    folder, key = cache_dir(), f"{name}{digest(repr((source, flags, processor())).encode(), 8)}"

    def compile_source(scratch: Path) -> Path:
        built = scratch / f"{name}.so"
        command = [compiler, "-x", "c", *flags, "-shared", "-fPIC", "-o", str(built), "-"]
        done = run_apart(command, source)
        if done.returncode:
            raise CannotCompile(f"the C compiler fails: {done.stdout.strip()[:200]}")
        return built

    return find(folder, key) or keep(folder, key, compile_source)


def digest(data: bytes, size: int = 16) -> str:
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def processor() -> str:
    """What -march=native depends on."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith("flags")), "")
    return platform.processor()


ABANDONED = 24 * 3600.0
"""Seconds after which a folder of another machine, whose processes are not known here, counts as abandoned."""


def run_apart(
    command: Sequence[str], text: str | None = None, folder: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own; its output and errors come together.

    Ctrl-C goes to every process of a terminal's foreground group. A compiler that dies of it would look like one that
    cannot compile, and the round would be trained on another engine than those before it.
    """
    with subprocess.Popen(
        [*command],
        stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=folder,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(text)
        except BaseException:
            # an interrupted process leaves no compiler behind, nor the processes that it started
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output)


@contextmanager
def scratch_folder(cache: Path) -> Iterator[Path]:
    """A folder to build in, gone afterwards; those that killed processes left behind go first."""
    remove_abandoned(cache)
    name = f"building-{_host()}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=cache, prefix=name) as scratch:
        yield Path(scratch)


def remove_abandoned(cache: Path) -> None:
    """Delete the folders of builds whose process is gone."""
    for path in cache.glob("building-*"):
        match = re.fullmatch(r"building-(\w+)-(\d+)-\w+", path.name)
        # the process of a folder with another name is not known
        host, number = (match[1], int(match[2])) if match else ("", 0)
        with suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > ABANDONED
            # a clock that jumps makes every folder old, so of this machine only the process counts
            if not _is_running(number) if host == _host() else is_old:
                shutil.rmtree(path, ignore_errors=True)


def _host() -> str:
    return re.sub(r"\W", "_", socket.gethostname())


def _is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
