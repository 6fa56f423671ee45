"""Another user of the machine plants shared objects where we or torch would load them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedpews.engines.compiled.cache import cache_dir, find, keep, own_folder
from fedpews.engines.compiled.program import CannotCompile
from fedpews.flower.site import SiteMemory

unix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="no such modes here")


@unix
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_a_cache_that_others_may_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CannotCompile, match="others may write to the cache"):
        own_folder(folder)
    # and left as it is: what was planted stays planted whatever the mode is now
    assert folder.stat().st_mode & 0o1777 == mode


@unix
def test_a_cache_below_a_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(CannotCompile, match="others may replace the cache"):
        own_folder(shared / "mine" / "compiled")
    # as /tmp is: nobody may rename what is somebody else's
    shared.chmod(0o1777)
    assert own_folder(shared / "mine" / "compiled").stat().st_mode & 0o777 == 0o700


@unix
def test_a_link_in_the_caches_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "compiled").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotCompile, match="is a link"):
        own_folder(tmp_path / "compiled")


@unix
def test_a_cache_that_is_a_file_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "compiled"):
        with pytest.raises(CannotCompile):
            own_folder(place)


@unix
def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_folder(tmp_path / "compiled")
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 4321)
    # as root, whose caches nobody could forge, tests cannot play the other user
    if folder.stat().st_uid != 0:
        with pytest.raises(CannotCompile, match="belongs to another user"):
            own_folder(folder)


@unix
def test_a_readable_cache_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compiled").mkdir(mode=0o755)
    monkeypatch.setenv("FEDPEWS_CACHE", str(tmp_path))
    assert cache_dir().stat().st_mode & 0o777 == 0o700


def test_a_library_whose_bytes_were_changed_is_never_loaded(tmp_path: Path) -> None:
    built = tmp_path / "built"
    built.write_bytes(b"machine code")
    library = keep(tmp_path, "key", lambda scratch: Path(shutil.copy(built, scratch / "model.so")))
    assert find(tmp_path, "key") == library
    library.write_bytes(b"machine code of somebody else")
    assert find(tmp_path, "key") is None
    assert not library.exists()


@unix
def test_a_sites_memory_is_the_sites_alone(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, 0, "a" * 32)
    old = os.umask(0)
    try:
        memory.write(0, 1, {"scores": torch.zeros(2)}, kept=0)
    finally:
        os.umask(old)
    (file,) = memory.folder.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (file, memory.folder, memory.folder.parent)] == [
        0o600,
        0o700,
        0o700,
    ]


COMPILE = """
import torch
from torch import nn
from pathlib import Path
from fedpews.torch_private import compile_step

class Step(nn.Module):
    def forward(self, x):
        return (x @ x).relu()

(Path("cache") / "building").mkdir(parents=True)
x = torch.randn(4, 4)
print(compile_step(Step(), (x,), None, Path("cache/building/model.so").absolute()))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_torchs_own_cache_is_inside_ours_and_not_in_the_shared_temporary_folder(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    # where torch looks by itself: whoever made it first could have put anything in
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"TMPDIR": str(shared), "USER": "victim", "LOGNAME": "victim"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    left = [str(path.relative_to(shared)) for path in shared.rglob("*") if path.is_file()]
    assert left == []
    assert any((tmp_path / "cache" / "torch").rglob("*.so"))
