"""Every file of a run's folder damaged in every way, and then resumed, compared, reported and loaded.

    make damage

Good is whatever gives the undamaged folder's result (identical, or healed with a word about it) or refuses with one of
our own errors. Another result, or a traceback, is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from processes import ROUNDS, TRACEBACK, Ended, differences, fork, generator, run, say, table, warm_up

import fedpews
from fedpews.report.compare import remarks, verdicts
from fedpews.report.compare import table as compared
from fedpews.report.html import make_report
from fedpews.report.runs import find_runs

COLUMNS = ("tried", "identical", "healed", "refused", "wrong")
METHOD = "scaffold+pews"
EVERYTHING: dict[str, Any] = {
    "seeds": [0],
    "stop": {"best": True, "on": "test"},
    "finetune": {"epochs": 1},
    "participation": 0.5,
}
"""A run that leaves every kind of file."""


def cut(path: Path, other: Path, draw: Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))] if data else b"")


def flip(path: Path, other: Path, draw: Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)


def delete(path: Path, other: Path, draw: Random) -> None:
    path.unlink()


def swap(path: Path, other: Path, draw: Random) -> None:
    shutil.copy(other, path)


def make_folder(path: Path, other: Path, draw: Random) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path, other: Path, draw: Random) -> None:
    path.unlink()
    path.symlink_to(other)


DAMAGES: dict[str, Callable[[Path, Path, Random], None]] = {
    "truncate": cut,
    "flip": flip,
    "delete": delete,
    "swap": swap,
    "folder": make_folder,
    "link": link,
}


def resume(folder: Path) -> None:
    run(folder, METHOD, resume=True, **EVERYTHING)


def load(folder: Path) -> str:
    found = fedpews.load(folder)
    digest = hashlib.sha256(repr([found.experiment, list(found.rounds), found.summary]).encode())
    for trees in (found.params, found.best, found.neurons):
        for tree in trees.values():
            for name, value in sorted(tree.items(), key=str):
                digest.update(str(name).encode() + value.numpy().tobytes())
    return digest.hexdigest()


def compare(folder: Path) -> str:
    runs = find_runs([folder])
    return repr([compared(runs), remarks(runs), verdicts(runs)])


def report(folder: Path) -> str:
    return hashlib.sha256(make_report(find_runs([folder])).encode()).hexdigest()


READERS: dict[str, Callable[[Path], str]] = {"compare": compare, "report": report, "load": load}


def read(folder: Path, names: list[str]) -> dict[str, list[Any]]:
    """What every reader says, all in one child: its error, or its result."""

    def work() -> dict[str, list[Any]]:
        said: dict[str, list[Any]] = {}
        for name in names:
            try:
                said[name] = ["read", READERS[name](folder)]
            except fedpews.FedpewsError as error:
                said[name] = ["refused", str(error)]
            except Exception as error:  # noqa: BLE001  that is what is looked for
                said[name] = ["traceback", f"{type(error).__name__}: {error}"]
        return said

    ended = fork(work)
    return ended.result or {name: ["traceback", f"exit code {ended.code} {ended.said}"] for name in names}


def judge_read(found: list[Any], expected: list[Any]) -> str:
    if found == expected:
        return "identical"
    return "refused" if found[0] == "refused" else "wrong"


def judge_resume(ended: Ended, folder: Path, whole: Path) -> str:
    if ended.code == TRACEBACK or ended.code < 0:
        return "wrong"
    if ended.code:
        return "refused"
    if differ(whole, folder):
        return "wrong"
    return "healed" if "going on from" in ended.said or "written again" in ended.said else "identical"


def differ(whole: Path, folder: Path) -> list[str]:
    """The files in which two folders differ; the checkpoint before the last is a spare that nothing was read of."""
    last = f"-{ROUNDS}."
    return [name for name in differences(whole, folder) if not name.startswith("checkpoint/") or last in name]


def make_runs(place: Path) -> dict[str, Path]:
    """A whole run, one that was killed in the middle, and another experiment's of each, for swaps."""

    def killed(folder: Path, **more: Any) -> None:
        # its last round is written and in no checkpoint
        def stop(records: Any) -> None:
            if records[0]["round"] == 5:
                os.kill(os.getpid(), 9)

        run(folder, METHOD, callbacks=[fedpews.Callback(round=stop)], **EVERYTHING | more)

    other = {"train": {"batch_size": 8, "lr": 0.02}}
    fork(lambda: run(place / "whole", METHOD, **EVERYTHING))
    fork(lambda: run(place / "whole-other", METHOD, **EVERYTHING | other))
    fork(lambda: killed(place / "killed"))
    fork(lambda: killed(place / "killed-other", **other))
    return {"finished": place / "whole", "killed": place / "killed"}


def files_of(folder: Path) -> list[str]:
    """Every file but the lock; of clients' memories the newest and the oldest."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    )
    memories = sorted(
        (n for n in names if "/clients/" in n), key=lambda name: int(name.rpartition("-")[2][:-12])
    )
    return [name for name in names if "/clients/" not in name] + [memories[0], memories[-1]]


def counterpart(folder: Path, name: str) -> Path:
    """The same file of another experiment, or one of its kind."""
    other = folder.with_name(f"{folder.name}-other") / name
    return other if other.exists() else min(other.parent.iterdir())


def main(
    seed: int, only: list[str], kinds: list[str], every: int = 1
) -> tuple[int, dict[str, dict[str, int]]]:
    """Damage every ``every``-th file in every way; how many were wrong, and the counts by what was done after."""
    warm_up()
    rows: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="fedpews-damage-") as made:
        place, folder = Path(made), Path(made) / "run"
        for kind, source in make_runs(place).items():
            if kind not in kinds:
                continue
            shutil.copytree(source, folder)
            expected = read(folder, [*READERS])
            shutil.rmtree(folder)
            for number, name in enumerate(files_of(source)):
                if (number + seed) % every:
                    continue
                for damage in only:
                    for verbs in (["resume"], [*READERS]):
                        shutil.copytree(source, folder)
                        target = counterpart(source, name)
                        was = target.read_bytes()
                        DAMAGES[damage](folder / name, target, generator(seed, kind, name, damage))
                        found: dict[str, tuple[str, str]] = {}
                        if verbs == ["resume"]:
                            ended = fork(lambda: resume(folder))
                            verdict = judge_resume(ended, folder, place / "whole")
                            other = ", ".join(differ(place / "whole", folder)) if verdict == "wrong" else ""
                            found["resume"] = (verdict, f"{ended.said} {other}")
                        else:
                            for verb, one in read(folder, verbs).items():
                                found[verb] = (judge_read(one, expected[verb]), str(one))
                        for verb, (verdict, said) in found.items():
                            if target.read_bytes() != was:
                                verdict, said = "wrong", f"another run's {name} was changed"
                                target.write_bytes(was)
                            row = rows.setdefault(f"{verb}, {kind}", dict.fromkeys(COLUMNS, 0))
                            row["tried"] += 1
                            row[verdict] += 1
                            if verdict == "wrong":
                                say(f"{kind}: {damage} {name}, then {verb}: {said.strip()[-700:]}")
                        shutil.rmtree(folder)
    say(table(rows, COLUMNS))
    return sum(row["wrong"] for row in rows.values()), rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--damages", nargs="+", default=list(DAMAGES), choices=list(DAMAGES))
    parser.add_argument("--runs", nargs="+", default=["finished", "killed"])
    given = parser.parse_args()
    sys.exit(1 if main(given.seed, given.damages, given.runs)[0] else 0)
