"""What people see at both ends: who came, who was refused and why, each round, and where the model is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from flwr.app import Message, MessageType, RecordDict
from memory_grid import MemoryGrid, site_handler
from test_engine import journal, write

from fedpews.errors import ConfigError, DataMissing, FedpewsError
from fedpews.experiment import Experiment
from fedpews.flower.app import serve
from fedpews.flower.deploy import executor, site_process
from fedpews.flower.deploy.app_folder import Pin
from fedpews.flower.deploy.coordinator import unknown_keys
from fedpews.flower.deploy.executor import ExecutorOptions
from fedpews.flower.deploy.keys import fingerprint, make_site_key
from fedpews.flower.deploy.loopback import Loopback
from fedpews.flower.deploy.processes import Processes
from fedpews.flower.deploy.site_process import SiteProcess
from fedpews.flower.hello import read_hello
from fedpews.flower.logs import append_line, save_failure
from fedpews.flower.roster import KnownSite, KnownSites, SitesRefused
from fedpews.methods.wire import BadMessage


def clinic(folder: Path, size: int) -> str:
    """A site's own data, images of some size."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("clinic", "test"):
        np.savez(folder / f"{name}.npz", x=rng.normal(size=(12, size)).astype("float32"), y=np.arange(12) % 3)
    return f"folder:{folder}"


def config(folder: Path, sites: int = 2) -> Path:
    table = {"input_shape": [4], "classes": 3, "join_seconds": 0.2, "wait_seconds": 0.2, "round_seconds": 5}
    made = Experiment(rounds=2, data={"name": "sites", "clients": sites}, flower=table)
    return write(folder / "experiment.toml", made)


def failure(folder: Path) -> tuple[int, str]:
    """The exit code and the message that were left for the process that waits."""
    found = json.loads((folder / "flower-error.json").read_text())
    return found["exit_code"], found["message"]


def test_a_site_of_another_shape_ends_the_wait_and_both_ends_show_why(
    tmp_path: Path, grid: MemoryGrid
) -> None:
    experiment, out, state = config(tmp_path), tmp_path / "run", tmp_path / "state"
    for site, size in ((0, 4), (1, 5)):
        grid.nodes[site] = site_handler(experiment, state, site, data=clinic(tmp_path / f"data-{site}", size))

    with pytest.raises(SitesRefused) as caught:
        serve(experiment, grid, {"out": str(out)})

    why = "the shape of a sample is 5 at the site and 4 at the server"
    assert caught.value.exit_code == ConfigError.exit_code
    assert f"site-1 is refused: {why}" in str(caught.value)
    assert failure(out) == (ConfigError.exit_code, str(caught.value))
    assert f"is refused: {why}" in (out / "sites.log").read_text()
    assert failure(state / "site-1") == (2, f"the coordinator refuses this site: {why}")
    assert not (state / "site-0" / "flower-error.json").exists()


def test_a_round_that_does_not_need_the_refused_site_goes_on(tmp_path: Path, grid: MemoryGrid) -> None:
    experiment, out = config(tmp_path, sites=3), tmp_path / "run"
    for site, size in ((0, 4), (1, 5), (2, 4)):
        own = clinic(tmp_path / f"data-{site}", size)
        grid.nodes[site] = site_handler(experiment, tmp_path / "state", site, data=own)

    serve(experiment, grid, {"out": str(out)})

    first = journal(out)[0]["sites"]
    assert {site: answer["outcome"] for site, answer in first.items()} == {
        "0": "accepted",
        "1": "absent",
        "2": "accepted",
    }
    assert "shape of a sample" in first["1"]["why"]


def test_a_site_whose_data_is_missing_ends_the_wait_with_its_reason(tmp_path: Path, grid: MemoryGrid) -> None:
    experiment, state, known = config(tmp_path), tmp_path / "state", []
    for site, own in enumerate((clinic(tmp_path / "data", 4), f"folder:{tmp_path}/nowhere")):
        grid.nodes[site] = site_handler(experiment, state, site, data=own)
        grid.keys[site] = make_site_key(tmp_path / "keys", site)[1].read_bytes()
        known.append(KnownSite(site, f"clinic-{site}", fingerprint(grid.keys[site])))
    KnownSites(tuple(known)).write(tmp_path / "roster.toml")

    with pytest.raises(SitesRefused, match=r"clinic-1 is refused: it cannot take part: .*nowhere"):
        serve(experiment, grid, {"out": str(tmp_path / "run"), "roster": str(tmp_path / "roster.toml")})

    assert "nowhere" in failure(state / "site-1")[1]


def test_a_good_site_shows_its_rounds_its_metrics_and_where_its_model_is(
    tmp_path: Path, grid: MemoryGrid
) -> None:
    experiment, state = config(tmp_path), tmp_path / "state"
    for site in (0, 1):
        own = clinic(tmp_path / f"data-{site}", 4)
        grid.nodes[site] = site_handler(experiment, state, site, data=own)

    serve(experiment, grid, {"out": str(tmp_path / "run")})

    lines = (state / "site-1" / "status.log").read_text().splitlines()
    trained = [line for line in lines if "trained on 12 samples, training loss" in line]
    assert [line.partition(" (")[0] for line in trained] == ["round 1", "round 2"]
    assert [line.partition(":")[0] for line in lines if "accuracy" in line] == [
        "after round 1",
        "after round 2",
    ]
    last, path = lines[-1].split(": ")
    assert last == "the run is finished; the final model"
    assert Path(path).exists()


def test_a_site_with_another_app_says_so_at_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[Message] = []
    question = Message(RecordDict(), 1, MessageType.QUERY)
    given = question, object(), object(), SimpleNamespace(content=b"another app")
    monkeypatch.setattr(executor, "task_client", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(executor, "start_heartbeat", lambda _: Mock(is_running=False))
    monkeypatch.setattr(executor, "pull_task_input", lambda _: given)
    monkeypatch.setattr(executor, "push_message", lambda _, reply, context: answered.append(reply))
    monkeypatch.setattr(executor, "push_task_output", lambda **_: None)
    options = ExecutorOptions("", b"", Pin(tmp_path, "our hash"), {"site": 0, "state-dir": str(tmp_path)})

    executor._run_task(options, "token")

    with pytest.raises(BadMessage, match=r"cannot take part: the server's app has .* only our hash"):
        read_hello(answered[0].content)
    assert "runs only our hash" in (tmp_path / "site-0" / "status.log").read_text()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SiteProcess, list[str]]:
    """A site whose programs run and do nothing, and what it says."""
    monkeypatch.setattr(Processes, "ended", lambda self, name: None)
    said: list[str] = []
    settings = {"site": 0, "state-dir": str(tmp_path / "state")}
    pin = Pin(tmp_path, "hash")
    ca = tmp_path / "ca.crt"
    process = SiteProcess(
        pin, "127.0.0.1:9", ca, tmp_path / "key", tmp_path / "flower", settings, report=said.append
    )
    return process, said


def test_a_site_says_once_that_the_coordinator_is_away_and_once_that_it_is_back(
    site: tuple[SiteProcess, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, said = site
    monkeypatch.setattr(site_process, "RESTART_SECONDS", 0)
    monkeypatch.setattr(site_process, "CONTACT_SECONDS", 0)
    for found in ("it cannot be reached; trying again", "it cannot be reached; trying again", None, None):
        monkeypatch.setattr(site_process, "explain_contact", lambda *_, found=found: found)
        process.tend()

    assert said == ["it cannot be reached; trying again", "the coordinator answers at 127.0.0.1:9"]


def test_a_site_shows_its_status_and_ends_with_the_code_of_its_refusal(
    site: tuple[SiteProcess, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, said = site
    monkeypatch.setattr(site_process, "explain_contact", lambda *_: "no contact")
    append_line(tmp_path / "state" / "site-0" / "status.log", "round 1: done\nand \x1b[2J more")
    process.tend()
    save_failure(tmp_path / "state" / "site-0", DataMissing("no samples"))

    with pytest.raises(FedpewsError, match=r"^no samples$") as caught:
        process.tend()

    assert caught.value.exit_code == DataMissing.exit_code
    assert said == ["round 1: done and  [2J more", "no contact"]


def test_a_site_that_cannot_take_part_ends_all_that_up_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Loopback(tmp_path / "work", tmp_path / "app", tmp_path / "state", [{}, {}])
    monkeypatch.setattr(Processes, "ended", lambda self, name: 2 if name == "site-1" else None)
    save_failure(tmp_path / "state" / "site-1", ConfigError("it is refused"))

    with pytest.raises(FedpewsError, match=r"^site 1: it is refused\. .* --resume") as caught:
        net.tend()

    assert caught.value.exit_code == ConfigError.exit_code


def test_the_coordinator_names_the_key_of_a_site_that_is_not_approved(tmp_path: Path) -> None:
    public = make_site_key(tmp_path, 0)[1].read_bytes()
    key = serialization.load_ssh_public_key(public).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    line = f"ERROR : [ApiError:2004] Attempted to register SuperNode with public key: {key!r}, exception: "

    assert unknown_keys(["INFO", line + "No SuperNode found with the given public key."]) == [
        fingerprint(public)
    ]
