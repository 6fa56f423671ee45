"""The data sets known by name, and their files: in the data directory, FEDPEWS_DATA or the cache, or downloaded."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fedpews.errors import ConfigError, DataMissing, nearest

ATTEMPTS = 2  # times each address of a file is tried
PAUSE = 1.0  # seconds before the second try

_ZENODO = "https://zenodo.org/records/10519652/files/"  # MedMNIST v3
_ZENODO_V2 = "https://zenodo.org/records/6496656/files/"  # MedMNIST v2: same files, but for the organ sets
_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_CIFAR = "https://www.cs.toronto.edu/~kriz/"


@dataclass(frozen=True)
class File:
    """A published file: its path below a data directory, its checksum and its addresses."""

    path: str
    md5: str
    urls: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """A data set that `load` knows by name."""

    name: str
    description: str
    classes: int
    shape: tuple[int, ...]  # of one input: (features,) or (channels, height, width)
    kind: str  # how it is read: synthetic, idx, cifar, medmnist or combination
    partition: str  # what `load` uses when no partition is given
    files: tuple[File, ...] = ()
    members: tuple[str, ...] = ()  # the files inside an archive, which may also be unpacked
    class_names: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # of a combination
    train_per_class: int | None = None
    test_per_class: int | None = None
    multi_label: bool = False


def _mnist(name: str, md5: str) -> File:
    return File(f"mnist/{name}", md5, tuple(host + name for host in _MNIST))


def _cifar(name: str, md5: str) -> File:
    return File(name, md5, (_CIFAR + name,))


def _medmnist(
    name: str,
    what: str,
    channels: int,
    md5: str,
    *class_names: str,
    older: bool = True,
    multi_label: bool = False,
) -> Source:
    hosts = (_ZENODO, _ZENODO_V2) if older else (_ZENODO,)
    file = File(f"medmnist/{name}.npz", md5, tuple(f"{host}{name}.npz?download=1" for host in hosts))
    colour = "RGB" if channels == 3 else "grey"
    return Source(
        name,
        f"MedMNIST: {what}, {colour} 28×28"
        + (", several labels an image: not for classification" * multi_label),
        len(class_names),
        (channels, 28, 28),
        "medmnist",
        "iid",
        (file,),
        class_names=class_names,
        multi_label=multi_label,
    )


_CIFAR_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR_100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
    can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
    lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter
    palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road
    rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower
    sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
    willow_tree wolf woman worm
"""
_ORGANS = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right",
    "liver", "lung-left", "lung-right", "pancreas", "spleen",
)  # fmt: skip
_SYNTHETIC = "four classes in 16 interleaved clusters, 5 features"

_ALL = (
    Source("synthetic-32k", f"{_SYNTHETIC}; 32,000 samples", 4, (5,), "synthetic", "parity",
           train_per_class=8000, test_per_class=1600),
    Source("synthetic-3.2k", f"{_SYNTHETIC}; 3,200 samples", 4, (5,), "synthetic", "parity",
           train_per_class=800, test_per_class=1600),
    Source("synthetic-8", "eight classes in the same clusters, two at each corner; 6,400 samples", 8, (5,),
           "synthetic", "class", train_per_class=800, test_per_class=400),
    Source("synthetic-16", "sixteen classes, one for each of the same clusters; 12,800 samples", 16, (5,),
           "synthetic", "class", train_per_class=800, test_per_class=200),
    Source("cifar-mnist", "CIFAR-10 and MNIST, 400 training images a class, RGB 32×32", 20, (3, 32, 32),
           "combination", "source", sources=("cifar10", "mnist"), train_per_class=400, test_per_class=200),
    Source("path-oct-tissue", "PathMNIST, OCTMNIST and TissueMNIST, RGB 28×28", 21, (3, 28, 28),
           "combination", "source", sources=("pathmnist", "octmnist", "tissuemnist")),
    Source("mnist", "handwritten digits, grey 28×28", 10, (1, 28, 28), "idx", "iid", (
        _mnist("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        _mnist("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        _mnist("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        _mnist("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    ), class_names=tuple("0123456789")),
    Source("cifar10", "CIFAR-10: objects and animals, RGB 32×32", 10, (3, 32, 32), "cifar", "iid",
           (_cifar("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
           (*(f"cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6)),
            "cifar-10-batches-bin/test_batch.bin"),
           _CIFAR_10),
    Source("cifar100", "CIFAR-100: 100 fine classes, RGB 32×32", 100, (3, 32, 32), "cifar", "iid",
           (_cifar("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
           ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
           tuple(_CIFAR_100.split())),
    _medmnist("pathmnist", "colon pathology", 3, "a8b06965200029087d5bd730944a56c1",
              "adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle",
              "normal colon mucosa", "cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
    _medmnist("chestmnist", "chest X-ray findings", 1, "02c8a6516a18b556561a56cbdd36c4a8",
              "atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule", "pneumonia",
              "pneumothorax", "consolidation", "edema", "emphysema", "fibrosis", "pleural", "hernia",
              multi_label=True),
    _medmnist("dermamnist", "skin lesions", 3, "0744692d530f8e62ec473284d019b0c7",
              "actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma",
              "benign keratosis-like lesions", "dermatofibroma", "melanoma", "melanocytic nevi",
              "vascular lesions"),
    _medmnist("octmnist", "retinal OCT", 1, "c68d92d5b585d8d81f7112f81e2d0842",
              "choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    _medmnist("pneumoniamnist", "chest X-ray, pneumonia or not", 1, "28209eda62fecd6e6a2d98b1501bb15f",
              "normal", "pneumonia"),
    _medmnist("retinamnist", "five grades of diabetic retinopathy", 3, "bd4c0672f1bba3e3a89f0e4e876791e4",
              "0", "1", "2", "3", "4"),
    _medmnist("breastmnist", "breast ultrasound", 1, "750601b1f35ba3300ea97c75c52ff8f6",
              "malignant", "normal, benign"),
    _medmnist("bloodmnist", "blood cells", 3, "7053d0359d879ad8a5505303e11de1dc",
              "basophil", "eosinophil", "erythroblast", "immature granulocytes", "lymphocyte", "monocyte",
              "neutrophil", "platelet"),
    _medmnist("tissuemnist", "kidney cortex cells", 1, "ebe78ee8b05294063de985d821c1c34b",
              "collecting duct, connecting tubule", "distal convoluted tubule",
              "glomerular endothelial cells", "interstitial endothelial cells",
              "leukocytes", "podocytes", "proximal tubule segments", "thick ascending limb"),
    _medmnist("organamnist", "abdominal CT, axial", 1, "68e3f8846a6bd62f0c9bf841c0d9eacc",
              *_ORGANS, older=False),
    _medmnist("organcmnist", "abdominal CT, coronal", 1, "b9ceb9546e10131b32923c5bbeaea2b1",
              *_ORGANS, older=False),
    _medmnist("organsmnist", "abdominal CT, sagittal", 1, "9ab87b696fb54e2a387ebe992d6ed5f1",
              *_ORGANS, older=False),
)  # fmt: skip

SOURCES = MappingProxyType({source.name: source for source in _ALL})


@dataclass(frozen=True)
class Status:
    """Whether a source can be loaded without the network."""

    name: str
    state: str  # ready, made (needs no files), incomplete or missing
    paths: tuple[Path, ...] = ()
    lacking: tuple[str, ...] = ()  # files that are not there
    published: bool | None = None
    """Whether they are the published files, byte for byte; None when not checked."""

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


def cache_dir() -> Path:
    """The default directory of downloads."""
    import pooch

    return Path(pooch.os_cache("fedpews"))


def roots(data_dir: Path | str | None = None) -> list[Path]:
    """The directories to look in, in order: the given directory, FEDPEWS_DATA, the cache."""
    named = {"the data directory": data_dir, "FEDPEWS_DATA": os.environ.get("FEDPEWS_DATA") or None}
    paths = {what: Path(path).expanduser() for what, path in named.items() if path is not None}
    for what, path in paths.items():
        if not path.is_dir():
            raise DataMissing(f"{what} {str(path)!r} is not a directory.")
    return [*paths.values(), cache_dir()]


def find(source: Source, root: Path) -> tuple[dict[str, Path], list[str]]:
    """A source's files below one directory (name → path), and the names of those that are missing.

    A file may be at its usual path (mnist/train-images-idx3-ubyte.gz) or directly in the directory, an archive packed
    or unpacked, an idx file with or without .gz.
    """
    unpacked = {member: root / member for member in source.members if (root / member).is_file()}
    if source.members and len(unpacked) == len(source.members):
        return unpacked, []
    paths: dict[str, Path] = {}
    for file in source.files:
        candidates = [root / file.path, root / file.name]
        if source.kind == "idx":
            candidates += [path.with_suffix("") for path in candidates]
        here = [path for path in candidates if path.is_file()]
        if here:
            paths[file.name] = here[0]
    if source.members and not paths:
        return unpacked, [member for member in source.members if member not in unpacked]
    return paths, [file.path for file in source.files if file.name not in paths]


def obtain(source: Source, data_dir: Path | str | None = None, keep: bool = False) -> dict[str, Path]:
    """A source's files, from the first directory that has all of them, else downloaded to the cache.

    Args:
        keep: download to the data directory instead.
    """
    directories = roots(data_dir)
    for root in directories:
        paths, missing = find(source, root)
        if not missing:
            return paths
    into = directories[0 if keep else -1]
    here, _ = find(source, into)
    for file in source.files:
        if file.name not in here:
            _fetch(file, into, source, directories[0])
    return find(source, into)[0]


def status(data_dir: Path | str | None = None, *, check: bool = False) -> list[Status]:
    """The status of every named source; nothing is downloaded.

    ``check`` also compares the files with the published checksums.
    """
    directories = roots(data_dir)
    return [_status(source, directories, check) for source in SOURCES.values()]


def get(names: Iterable[str], data_dir: Path | str | None = None) -> list[Status]:
    """Download the missing files of these sources, into the data directory when it is given, else the cache."""
    wanted = {source.name: source for name in names for source in named(name)}
    if data_dir is not None:
        Path(data_dir).expanduser().mkdir(parents=True, exist_ok=True)
    for source in wanted.values():
        obtain(source, data_dir, keep=data_dir is not None)
    return [_status(source, roots(data_dir), check=False) for source in wanted.values()]


def named(name: str) -> list[Source]:
    """The single sources of a name: itself, those of a combination, or of `a+b+c`."""
    if name in SOURCES:
        return [SOURCES[single] for single in SOURCES[name].sources or (name,)]
    names = [single.strip() for single in name.split("+")]
    for single in names:
        if single not in SOURCES:
            raise ConfigError(
                f"unknown data set {single!r}; {nearest(single, SOURCES)} (Your own: folder:PATH or module:function.)"
            )
        if SOURCES[single].kind in ("combination", "synthetic"):
            raise ConfigError(f"{single!r} cannot be part of {name!r}; combine single image sets.")
    if len(set(names)) != len(names):
        raise ConfigError(f"{name!r} names a data set twice; name each once.")
    return [SOURCES[single] for single in names]


def _status(source: Source, directories: Sequence[Path], check: bool) -> Status:
    import pooch

    singles = [SOURCES[name] for name in source.sources] or [source]
    if not all(single.files for single in singles):
        return Status(source.name, "made")
    paths: list[Path] = []
    lacking: list[str] = []
    published = True
    for single in singles:
        # the first directory that has all files, else the first that has some
        candidates = [find(single, root) for root in directories]
        here, missing = min(candidates, key=lambda pair: 0 if not pair[1] else 1 if pair[0] else 2)
        paths += here.values()
        lacking += missing
        if check and not missing:
            # unpacked archives have no published checksum
            md5s = {file.name: file.md5 for file in single.files}
            published &= all(pooch.file_hash(path, "md5") == md5s.get(name) for name, path in here.items())
    state = "ready" if not lacking else "incomplete" if paths else "missing"
    known = published if check and not lacking else None
    return Status(source.name, state, tuple(paths), tuple(lacking), known)


def _fetch(file: File, into: Path, source: Source, hint: Path) -> None:
    import pooch

    target = into / file.path
    reason = "downloads are switched off (FEDPEWS_OFFLINE)"
    if not os.environ.get("FEDPEWS_OFFLINE"):
        pooch.get_logger().setLevel("WARNING")
        downloader = pooch.HTTPDownloader(
            progressbar=sys.stderr.isatty(), chunk_size=1 << 16, timeout=(10, 60)
        )
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE * attempt)
            for url in file.urls:
                try:
                    pooch.retrieve(url, f"md5:{file.md5}", target.name, target.parent, downloader=downloader)
                    return
                except ValueError:
                    reason = f"what {url.split('/')[2]} sent has a wrong checksum"
                except OSError as error:  # no network, or refused
                    reason = f"{type(error).__name__} from {url.split('/')[2]}"
    others = f" or its unpacked {source.members[0].rpartition('/')[0]}/" if source.members else ""
    raise DataMissing(
        f"{source.name}: {file.name} is not here and could not be downloaded: {reason}.\n"
        f"Put {file.name}{others} at {hint / file.path} (from {file.urls[0]})."
    )
