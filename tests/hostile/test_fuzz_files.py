"""Whatever the bytes of a data file, a checkpoint or a message are: an answer, or an error of ours."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import cases, spoilt, spoilt_bytes, survives, texts, wild
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as tensors
from safetensors.torch import save
from torch import nn

from fedpews.data import load
from fedpews.data.client_tables import read_table
from fedpews.data.files import natural, read_image
from fedpews.data.images import read_cifar_rows, read_idx
from fedpews.methods.contract import Cohort, Download
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.wire import decode_download, decode_upload, encode_download
from fedpews.neurons.network import Network
from fedpews.results.files import read_nest, read_tensors, write_nest

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


NPZ = _npz(x=np.arange(12, dtype=np.float32).reshape(4, 3), y=np.arange(4))
KINDS = [
    "<f4",
    "<f8",
    "<f2",
    "<i8",
    "<u8",
    "|u1",
    "|b1",
    "<c8",
    "<U3",
    "|S2",
    "|O",
    "<M8[s]",
    ">f4",
    "|V4",
    "<f16",
]


@cases(80)
@given(data=st.data())
def test_any_npz_file_is_read_or_refused(place: Path, data: st.DataObject) -> None:
    folder = place / "npz"
    folder.mkdir(exist_ok=True)
    (folder / "test.npz").write_bytes(NPZ)
    (folder / "a.npz").write_bytes(data.draw(st.one_of(spoilt_bytes(NPZ), st.binary(max_size=40))))
    survives(lambda: load(f"folder:{folder}"))


@cases(80)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.lists(st.integers(-1, 5) | st.sampled_from([2**31, 2**62]), max_size=4),
    labels=st.sampled_from(KINDS),
    raw=st.binary(max_size=64),
)
def test_any_header_of_an_array_is_read_or_refused(
    place: Path, kind: str, shape: list[int], labels: str, raw: bytes
) -> None:
    folder = place / "headers"
    folder.mkdir(exist_ok=True)
    (folder / "test.npz").write_bytes(NPZ)
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        for name, descr, size in (("x", kind, tuple(shape)), ("y", labels, tuple(shape[:1]))):
            file = io.BytesIO()
            np.lib.format.write_array_header_1_0(
                file, {"descr": descr, "fortran_order": False, "shape": size}
            )
            try:
                count = max(0, int(np.prod(size, dtype=object)) * np.dtype(descr).itemsize)
            except TypeError:
                count = 0
            # as many bytes as promised, so that the values are looked at too
            data = (raw * (count // max(1, len(raw)) + 1))[:count] if count < 10_000 else raw
            archive.writestr(f"{name}.npy", file.getvalue() + data)
    survives(lambda: load(f"folder:{folder}"))


cells = st.one_of(
    texts, st.integers().map(str), st.floats().map(str), st.sampled_from(["", "NA", "1e400", '"', "\x00"])
)


@cases(80)
@given(
    rows=st.lists(st.lists(cells, max_size=4), max_size=5),
    raw=st.binary(max_size=30),
    has_label=st.booleans(),
)
def test_any_table_is_read_or_refused(
    place: Path, rows: list[list[str]], raw: bytes, has_label: bool
) -> None:
    head = "a,b,label\n" if has_label else ""
    text = head + "\n".join(",".join(row) for row in rows)
    (place / "a.csv").write_bytes(text.encode(errors="replace") + raw)
    survives(lambda: read_table(place / "a.csv"))
    survives(lambda: read_table(place / "a.csv", "b"))


def _pictures() -> list[bytes]:
    made = []
    for kind in ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"):
        file = io.BytesIO()
        Image.new("RGB", (6, 5), (9, 99, 199)).save(file, kind)
        made.append(file.getvalue())
    return made


PICTURES = _pictures()


@cases(150)
@given(data=st.data(), size=st.sampled_from([None, 1, 8]))
@pytest.mark.filterwarnings("ignore")
def test_any_image_is_read_or_refused(place: Path, data: st.DataObject, size: int | None) -> None:
    raw = data.draw(st.sampled_from(PICTURES).flatmap(spoilt_bytes) | st.binary(max_size=40))
    (place / "a.png").write_bytes(raw)
    survives(lambda: read_image(place / "a.png", size))


@cases(60)
@given(names=st.lists(st.text(max_size=12), max_size=6))
def test_any_names_have_an_order(names: list[str]) -> None:
    assert survives(lambda: sorted(names, key=natural))


@cases(60)
@given(data=st.data())
def test_any_published_file_is_read_or_refused(place: Path, data: st.DataObject) -> None:
    idx = b"\x00\x00\x08\x03" + (2).to_bytes(4, "big") * 3 + bytes(8)
    (place / "images").write_bytes(data.draw(spoilt_bytes(idx) | st.binary(max_size=40)))
    survives(lambda: read_idx(place / "images"))
    rows = data.draw(spoilt_bytes(bytes(3073 * 2)))
    survives(lambda: read_cifar_rows(rows, data.draw(st.sampled_from([10, 100])), "rows"))


NEST = {"0": {"params": {"a/b": torch.ones(3), "c": torch.zeros(2, 2)}, "empty": {}}, "best": {"0": {}}}
HEADER = {"round": 3, "memories": {"0-0": 1}, "rounds_bytes": 10, "about": {"layout": "2"}}


@cases(80)
@given(data=st.data())
def test_any_checkpoint_file_is_read_or_refused(place: Path, data: st.DataObject) -> None:
    path = place / "state.safetensors"
    path.unlink(missing_ok=True)
    write_nest(path, NEST, HEADER)
    path.write_bytes(data.draw(spoilt_bytes(path.read_bytes())))
    survives(lambda: read_nest(path))
    survives(lambda: read_tensors(path))


@cases(80)
@given(
    about=wild | spoilt({"header": HEADER, "empty": ["0/empty"]}),
    names=st.lists(texts, max_size=3, unique=True),
)
def test_any_header_of_a_checkpoint_is_read_or_refused(place: Path, about: Any, names: list[str]) -> None:
    path = place / "state.safetensors"
    try:
        data = save({name: torch.zeros(1) for name in names}, {"about": json.dumps(about)})
    except Exception:  # noqa: BLE001 - safetensors itself will not write such names
        return
    path.write_bytes(data)
    survives(lambda: read_nest(path))


def _network() -> Network:
    return Network(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 3))


NET = _network()
DOWNLOAD = FedAvg().downloads(NET, FedAvg().init(NET, NET.initial(), 2), Cohort(1, (0, 1), 2, 0))[0]
MESSAGE = encode_download(NET, DOWNLOAD)


@cases(120)
@given(data=st.data())
def test_any_message_is_read_or_refused(data: st.DataObject) -> None:
    raw = data.draw(spoilt_bytes(MESSAGE) | st.binary(max_size=60))
    survives(lambda: decode_upload(NET, raw))
    survives(lambda: decode_download(NET, raw))


def _parts() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    length = int.from_bytes(MESSAGE[:8], "little")
    about = json.loads(json.loads(MESSAGE[8 : 8 + length])["__metadata__"]["about"])
    return about, tensors(MESSAGE)


ABOUT, TENSORS = _parts()


@cases(120)
@given(
    about=spoilt(ABOUT) | wild,
    extra=st.sampled_from(["neurons", "mask", "params:where", "params:bits", "x", "a/b"]),
)
def test_any_description_of_a_message_is_read_or_refused(about: Any, extra: str) -> None:
    raw = save(TENSORS | {extra: torch.zeros(1, dtype=torch.uint8)}, {"about": json.dumps(about)})
    plain = save(TENSORS, {"about": json.dumps(about)})
    for data in (raw, plain):
        survives(lambda data=data: decode_upload(NET, data))  # type: ignore[misc]
        survives(lambda data=data: decode_download(NET, data))  # type: ignore[misc]


def test_what_is_not_spoilt_is_read(place: Path) -> None:
    assert survives(lambda: decode_download(NET, MESSAGE))
    assert isinstance(decode_download(NET, MESSAGE), Download)
