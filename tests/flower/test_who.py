"""Who is who: keys, numbers, versions and data, each with both values when they differ."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from memory_grid import Handler, MemoryGrid, site_handler
from test_engine import experiment, write

from fedpews.errors import ConfigError
from fedpews.flower.app import serve
from fedpews.flower.deploy.keys import fingerprint, make_site_key
from fedpews.flower.hello import Expected, Facts, Seen, read_hello
from fedpews.flower.roster import KnownSite, KnownSites, Roster, SitesRefused
from fedpews.methods.wire import BadMessage

FACTS = Facts(1, "0.1.0", "abc", "5", 4, 30, 20, 0, "d1")
EXPECTED = Expected(2, {"version": "0.1.0", "config": "abc", "shape": "5", "classes": 4})


def says(facts: Facts | dict[str, Any]) -> Handler:
    record = facts if isinstance(facts, dict) else asdict(facts)
    return lambda message: Message(RecordDict({"hello": ConfigRecord(record)}), reply_to=message)


def keys(folder: Path, count: int) -> list[bytes]:
    return [make_site_key(folder, site)[1].read_bytes() for site in range(count)]


def meet(grid: MemoryGrid, known: KnownSites | None, seen: Seen | None = None) -> tuple[dict[int, int], str]:
    said: list[str] = []
    roster = Roster(grid, EXPECTED, known, seen or Seen(None), said.append)  # type: ignore[arg-type]
    return roster.online(), "\n".join(said)


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path: Path) -> None:
    import subprocess

    _, public = make_site_key(tmp_path, 0)
    shown = subprocess.run(["ssh-keygen", "-lf", str(public)], capture_output=True, text=True, check=False)
    if shown.returncode:
        pytest.skip("there is no ssh-keygen here (apt-get install openssh-client)")
    assert shown.stdout.split()[1] == fingerprint(public.read_bytes())


def test_a_key_has_one_fingerprint_however_it_is_written(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    (line,) = keys(tmp_path, 1)
    pem = serialization.load_ssh_public_key(line).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert fingerprint(pem) == fingerprint(line)


def test_a_registered_stranger_cannot_be_anybodys_site(tmp_path: Path, grid: MemoryGrid) -> None:
    real, stranger = keys(tmp_path, 2)
    known = KnownSites((KnownSite(1, "north", fingerprint(real)),))
    grid.nodes, grid.keys = {1: says(FACTS), 9: says(FACTS)}, {1: stranger, 9: real}  # a smaller node id
    online, said = meet(grid, known)
    assert online == {1: 9}
    assert fingerprint(stranger) in said
    assert "not in the roster" in said


def test_a_site_cannot_take_anothers_number(tmp_path: Path, grid: MemoryGrid) -> None:
    first, second = keys(tmp_path, 2)
    known = KnownSites(
        (KnownSite(0, "north", fingerprint(first)), KnownSite(1, "south", fingerprint(second)))
    )
    grid.nodes, grid.keys = {1: says(FACTS)}, {1: first}
    online, said = meet(grid, known)
    assert online == {}
    assert "it says it is site 1, but its key is that of site 0, north" in said


def test_without_a_roster_the_first_key_is_the_sites_for_good(tmp_path: Path, grid: MemoryGrid) -> None:
    real, stranger = keys(tmp_path, 2)
    place = tmp_path / "seen.json"
    grid.nodes, grid.keys = {9: says(FACTS)}, {9: real}
    assert meet(grid, None, Seen(place))[0] == {1: 9}
    grid.nodes, grid.keys = {1: says(FACTS), 2: says(FACTS)}, {1: stranger, 2: real}
    online, said = meet(grid, None, Seen(place))  # a server that was started again
    assert online == {1: 2}
    assert fingerprint(real) in said
    assert fingerprint(stranger) in said


def test_the_operator_may_give_a_site_a_new_key_in_the_middle_of_a_run(
    tmp_path: Path, grid: MemoryGrid
) -> None:
    old, new = keys(tmp_path, 2)
    for key in (old, new):
        known = KnownSites((KnownSite(1, "north", fingerprint(key)),))
        grid.nodes, grid.keys = {9: says(FACTS)}, {9: key}
        assert meet(grid, known, Seen(tmp_path / "seen.json"))[0] == {1: 9}


def test_a_later_node_does_not_replace_an_earlier_one(grid: MemoryGrid) -> None:
    grid.nodes = {9: says(FACTS)}
    said: list[str] = []
    roster = Roster(grid, EXPECTED, None, Seen(None), said.append)  # type: ignore[arg-type]
    assert roster.online() == {1: 9}
    grid.nodes = {1: says(FACTS), 9: says(FACTS)}
    assert roster.online() == {1: 9}
    assert "the second is ignored" in said[-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.0.9"}, "fedpews is 0.0.9 at the site and 0.1.0 at the server"),
        ({"config": "xyz"}, "fingerprint is xyz at the site and abc at the server"),
        ({"shape": "3×28×28"}, "shape of a sample is 3×28×28 at the site and 5 at the server"),
        ({"classes": 9}, "number of classes is 9 at the site and 4 at the server"),
        ({"site": 2}, "there are sites 0 to 1"),
    ],
)
def test_a_site_that_differs_is_refused_with_both_values(
    change: dict[str, Any], words: str, grid: MemoryGrid
) -> None:
    grid.nodes = {5: says(replace(FACTS, **change))}
    online, said = meet(grid, None)
    assert online == {}
    assert words in said


def test_a_refused_site_is_asked_again_and_admitted_once_it_is_fixed(
    grid: MemoryGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    roster = Roster(grid, EXPECTED, None, Seen(None), said.append)  # type: ignore[arg-type]
    monkeypatch.setattr("fedpews.flower.roster.AGAIN_SECONDS", 0)
    grid.nodes = {5: says(replace(FACTS, classes=9))}
    assert roster.online() == roster.online() == {}
    assert len(said) == 1  # the same reason is said once
    grid.nodes = {5: says(FACTS)}
    assert roster.online() == {FACTS.site: 5}


def test_other_data_in_the_same_run_is_refused_with_both_values(tmp_path: Path) -> None:
    Seen(tmp_path / "seen.json").check(FACTS, "SHA256:a")
    with pytest.raises(BadMessage, match="data was d1 at first contact and is d2 now"):
        Seen(tmp_path / "seen.json").check(replace(FACTS, data="d2"), "SHA256:a")
    with pytest.raises(BadMessage, match="samples was 30 at first contact and is 31 now"):
        Seen(tmp_path / "seen.json").check(replace(FACTS, samples=31), "SHA256:a")


@pytest.mark.parametrize(
    "change",
    [
        {"samples": -1},
        {"samples": 2**62},
        {"samples": True},
        {"version": "x" * 200},
        {"site": "1"},
        {"columns": "age"},
        {"columns": [1]},
        {"columns": ["age\nnode 7 is here"]},
        {"columns": ["x" * 2000]},
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        read_hello(RecordDict({"hello": ConfigRecord({**asdict(FACTS), **change})}))


def test_a_site_with_another_experiment_never_trains(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(rounds=1))
    other = write(tmp_path / "other.toml", experiment(rounds=1, train={"lr": 0.5}))
    third = write(tmp_path / "third.toml", experiment(rounds=1, data={"seed": 1}))
    for changed in (other, third):
        grid.nodes = {
            1: site_handler(config, tmp_path / "state", 0),
            2: site_handler(changed, tmp_path / "state", 1),
        }
        with pytest.raises(SitesRefused, match="at the site and"):
            serve(config, grid, {"out": str(tmp_path / changed.stem)})
    assert not [m for m in grid.sent if m.metadata.message_type == MessageType.TRAIN]


def test_what_a_site_said_first_is_kept_with_the_run(tmp_path: Path, grid: MemoryGrid) -> None:
    config = write(tmp_path / "experiment.toml", experiment(rounds=1))
    grid.nodes = {i: site_handler(config, tmp_path / "state", i) for i in (0, 1)}
    serve(config, grid, {"out": str(tmp_path / "sites")})
    seen = json.loads((tmp_path / "sites" / "sites-seen.json").read_text())
    assert {site: entry["samples"] for site, entry in seen.items()} == {"0": 60, "1": 60}


def test_a_roster_comes_back_and_has_no_site_twice(tmp_path: Path) -> None:
    roster = KnownSites().adding(KnownSite(1, "south", "SHA256:b")).adding(KnownSite(0, "north", "SHA256:a"))
    roster.write(tmp_path / "roster.toml")
    assert KnownSites.read(tmp_path / "roster.toml") == roster
    for new in (
        KnownSite(1, "x", "SHA256:x"),
        KnownSite(2, "south", "SHA256:x"),
        KnownSite(2, "x", "SHA256:b"),
    ):
        with pytest.raises(ConfigError, match="already that of site 1"):
            roster.adding(new)
    (tmp_path / "roster.toml").write_text("[[site]]\nnumber = 0\n")
    with pytest.raises(ConfigError, match="is no roster"):
        KnownSites.read(tmp_path / "roster.toml")
