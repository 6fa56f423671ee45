"""Files are looked for in order, downloads are checked, and what is missing is named with its path."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedpews.data import catalogue, get, load, status
from fedpews.data.catalogue import SOURCES, File, Source
from fedpews.errors import ConfigError, DataMissing
from tiny_files import write_cifar, write_medmnist, write_mnist


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def site(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, str]]:
    """A folder served over HTTP on this machine, with downloads switched on."""
    folder = tmp_path_factory.mktemp("site")
    monkeypatch.delenv("FEDPEWS_OFFLINE")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(catalogue, "PAUSE", 0.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def published(folder: Path, *urls: str) -> Source:
    """BreastMNIST as if published in this folder at these addresses."""
    path = write_medmnist(folder, "breastmnist")
    md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    original = SOURCES["breastmnist"]
    return Source(original.name, "tiny", 2, (1, 28, 28), "medmnist", "iid",
                  (File("medmnist/breastmnist.npz", md5, urls),), class_names=original.class_names)  # fmt: skip


def test_a_file_is_downloaded_once_and_then_used(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = site
    source = published(
        folder, f"{address}/nothing.npz", f"{address}/medmnist/breastmnist.npz"
    )  # the first fails
    monkeypatch.setattr(catalogue, "SOURCES", {source.name: source})
    assert [record.state for record in get(["breastmnist"], tmp_path)] == ["ready"]
    assert (tmp_path / "medmnist/breastmnist.npz").is_file()
    (folder / "medmnist/breastmnist.npz").unlink()
    assert catalogue.obtain(source, tmp_path) == {"breastmnist.npz": tmp_path / "medmnist/breastmnist.npz"}
    assert [record.published for record in status(tmp_path, check=True)] == [True]


def test_load_downloads_to_the_cache_and_leaves_the_data_directory_alone(
    site: tuple[Path, str], tmp_path: Path
) -> None:
    folder, address = site
    source = published(folder, f"{address}/medmnist/breastmnist.npz")
    paths = catalogue.obtain(source, tmp_path)
    assert paths == {"breastmnist.npz": catalogue.cache_dir() / "medmnist/breastmnist.npz"}
    assert list(tmp_path.iterdir()) == []


def test_a_download_with_a_wrong_checksum_is_not_kept(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    source = published(folder, f"{address}/medmnist/breastmnist.npz")
    path = folder / "medmnist/breastmnist.npz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataMissing, match="wrong checksum"):
        catalogue.obtain(source, tmp_path, keep=True)
    assert not (tmp_path / "medmnist/breastmnist.npz").exists()


def test_a_terminal_sees_how_far_a_download_is(
    site: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, address = site
    source = published(folder, f"{address}/medmnist/breastmnist.npz")
    for name in ("quiet", "seen"):
        (tmp_path / name).mkdir()
    catalogue.obtain(source, tmp_path / "quiet", keep=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    catalogue.obtain(source, tmp_path / "seen", keep=True)
    assert "100%" in capsys.readouterr().err


@pytest.mark.parametrize("name", [s.name for s in SOURCES.values() if s.files and not s.multi_label])
def test_offline_the_message_says_which_file_to_put_where(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataMissing) as caught:
        load(name, clients=2, data_dir=tmp_path)
    first = SOURCES[name].files[0]
    assert str(tmp_path / first.path) in str(caught.value)
    assert first.urls[0] in str(caught.value)
    assert caught.value.exit_code == 3
    assert len(str(caught.value).splitlines()) <= 2


def test_directories_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, variable = tmp_path / "given", tmp_path / "variable"
    for root, per_class in ((given, 2), (variable, 3), (catalogue.cache_dir(), 4)):
        write_mnist(root, per_class)
    monkeypatch.setenv("FEDPEWS_DATA", str(variable))
    assert len(load("mnist", clients=2, data_dir=given).y) == 20
    assert len(load("mnist", clients=2).y) == 30
    monkeypatch.delenv("FEDPEWS_DATA")
    assert len(load("mnist", clients=2).y) == 40


def test_a_directory_with_only_some_of_the_files_is_passed_over(tmp_path: Path) -> None:
    write_mnist(tmp_path, 2)
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    state = {record.name: record for record in status(tmp_path)}["mnist"]
    assert state.state == "incomplete"
    assert state.lacking == ("mnist/t10k-labels-idx1-ubyte.gz",)
    write_mnist(catalogue.cache_dir(), 4)
    assert len(load("mnist", clients=2, data_dir=tmp_path).y) == 40


def test_status_tells_ready_made_and_missing_apart(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_cifar(tmp_path)
    states = {record.name: record.state for record in status(tmp_path)}
    made = {source.name for source in SOURCES.values() if source.kind == "synthetic"}
    ready = ("mnist", "cifar10", "cifar-mnist")
    expected = dict.fromkeys(SOURCES, "missing") | dict.fromkeys(made, "made") | dict.fromkeys(ready, "ready")
    assert states == expected
    assert {record.published for record in status(tmp_path, check=True)} == {False, None}


def test_a_data_directory_that_is_not_there_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataMissing, match=r"the data directory .* is not a directory"):
        load("mnist", clients=2, data_dir=tmp_path / "nowhere")
    monkeypatch.setenv("FEDPEWS_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataMissing, match="FEDPEWS_DATA"):
        load("mnist", clients=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pathmist", "unknown data set 'pathmist'; did you mean 'pathmnist'"),
        ("mnist+octmist", "unknown data set 'octmist'"),
        ("zzz", "there is bloodmnist"),
        ("mnist+mnist", "names a data set twice"),
        ("mnist+cifar-mnist", "'cifar-mnist' cannot be part"),
        ("mnist+synthetic-32k", "'synthetic-32k' cannot be part"),
        ("chestmnist", "several labels at once"),
        ("pathmnist+chestmnist", "several labels at once"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name, clients=2)


def test_the_catalogue_is_whole() -> None:
    for source in SOURCES.values():
        assert source.partition in ("class", "iid", "parity", "source")
        assert bool(source.files) == (source.kind in ("idx", "cifar", "medmnist"))
        assert (
            not source.class_names
            or len(source.class_names) == len(set(source.class_names)) == source.classes
        )
        assert all(len(file.md5) == 32 and file.urls for file in source.files)
    assert catalogue.SOURCES["path-oct-tissue"].classes == 9 + 4 + 8


def test_listing_names_imports_neither_torch_nor_pooch() -> None:
    import subprocess
    import sys

    code = "import sys; from fedpews.data import PARTITIONS, SOURCES; print({'torch', 'pooch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
