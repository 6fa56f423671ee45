"""The parts around a deployment: new apps, keys, what up refuses, a site's memory, Flower's hello."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from memory_grid import MemoryGrid

from command_line import fedpews
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.flower import roster
from fedpews.flower.deploy.app_folder import new_app, starter
from fedpews.flower.deploy.keys import make_server_keys, make_site_key
from fedpews.flower.deploy.loopback import up
from fedpews.flower.deploy.processes import Processes
from fedpews.flower.hello import Expected, Seen
from fedpews.flower.logs import site_number
from fedpews.flower.site import MemoryLost, SiteMemory
from waiting import when

RUN = "0123456789abcdef" * 2


def test_a_new_app_is_thin_and_complete(tmp_path: Path) -> None:
    files = {path.name: path for path in new_app(tmp_path / "Our App", starter())}
    assert set(files) == {"README.md", "client_app.py", "experiment.toml", "pyproject.toml", "server_app.py"}
    for half in ("client_app", "server_app"):
        lines = [line for line in files[f"{half}.py"].read_text().splitlines() if line]
        assert lines == [f"from fedpews.flower import {half}", f"app = {half}(__file__)"]
    project = tomllib.loads(files["pyproject.toml"].read_text())
    assert project["project"]["name"] == "our-app"
    assert project["project"]["dependencies"] == []
    Experiment.load(files["experiment.toml"])
    readme = files["README.md"].read_text()
    for word in (
        "fedpews flower serve",
        "fedpews flower approve",
        "fedpews site",
        "ssh-keygen",
        "--state-dir",
        "--resume",
    ):
        assert word in readme


def test_flower_takes_the_new_app_for_one(tmp_path: Path) -> None:
    new_app(tmp_path / "app", starter())
    flwr = Path(sys.executable).with_name("flwr")
    done = subprocess.run(
        [flwr, "build", "--app", "app"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.fab"))


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty"):
        new_app(tmp_path, starter())


def test_keys_are_private_and_the_certificate_is_for_this_machine(tmp_path: Path) -> None:
    keys = make_server_keys(tmp_path)
    private, public = make_site_key(tmp_path, 0)
    assert keys.key.stat().st_mode & 0o077 == 0
    assert private.stat().st_mode & 0o077 == 0
    load_ssh_public_key(public.read_bytes())
    server, authority = (
        x509.load_pem_x509_certificate(p.read_bytes()) for p in (keys.certificate, keys.authority)
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "localhost" in names.get_values_for_type(x509.DNSName)
    assert not list(tmp_path.glob("ca.key"))


def small() -> Experiment:
    return Experiment(rounds=1, data={"name": "synthetic-3.2k", "partition": "parity", "train_per_class": 4})


def test_up_refuses_another_number_of_sites_than_clients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="assigned to 2 clients"):
        up(small(), tmp_path / "run", sites=3)


def test_up_never_overwrites_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="--resume"):
        up(small(), tmp_path)


def test_up_wants_each_sites_data_when_the_data_is_at_the_sites(tmp_path: Path) -> None:
    made = Experiment(rounds=1, data={"name": "sites", "clients": 2})
    with pytest.raises(ConfigError, match="--site-data 2 times"):
        up(made, tmp_path / "run", site_data=["folder:a"])
    with pytest.raises(ConfigError, match=r"data\.name is 'sites'"):
        up(small(), tmp_path / "run", site_data=["folder:a"])


def test_a_site_keeps_the_round_before_until_it_is_never_asked_for_again(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, 1, RUN)
    for round in (1, 2, 3):
        memory.write(
            0, round, {"inner": {}, "scores": {"neurons": torch.full((2,), float(round))}}, kept=round - 2
        )
    kept = sorted(path.name for path in tmp_path.rglob("*.safetensors"))
    assert kept == [f"seed-0-round-{round}.safetensors" for round in (1, 2, 3)]
    again = SiteMemory(tmp_path, 1, RUN).read(0, accepted=2)
    assert again is not None
    assert again["scores"]["neurons"].tolist() == [2.0, 2.0]
    assert again["inner"] == {}
    memory.write(0, 4, {"a": torch.zeros(1)}, kept=3)
    assert sorted(p.name for p in tmp_path.rglob("*.safetensors")) == [
        "seed-0-round-3.safetensors",
        "seed-0-round-4.safetensors",
    ]


def test_a_site_says_when_its_memory_is_gone_and_needs_none_at_first(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, 0, RUN)
    assert memory.read(0, accepted=0) is None
    with pytest.raises(MemoryLost, match="goes on from round 7"):
        memory.read(0, accepted=7)


@pytest.mark.parametrize("run", ["../../etc", "", "A" * 32, "0" * 31])
def test_a_run_cannot_be_named_into_another_folder(run: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        SiteMemory(tmp_path, 0, run)


@pytest.mark.parametrize("site", [None, -1, "0", True, 1.5])
def test_a_site_must_say_its_number(site: object) -> None:
    with pytest.raises(ConfigError, match="--node-config"):
        site_number({} if site is None else {"site": site})


def test_a_node_that_does_not_say_its_site_is_not_asked_all_the_time(grid: MemoryGrid) -> None:
    asked = []

    def silent(message: object) -> None:
        asked.append(message)

    grid.nodes = {1: silent}
    expected = Expected(2, {})
    found = roster.Roster(grid, expected, None, Seen(None), lambda text: None)  # type: ignore[arg-type]
    for _ in range(3):
        assert found.online() == {}
    assert len(asked) == 1


def test_processes_end_with_everything_they_started(tmp_path: Path) -> None:
    children = Processes(tmp_path)
    script = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], start_new_session=True)\n"
        "time.sleep(99)"
    )
    children.start("one", [sys.executable, "-c", script])
    pid = children.pid("one")
    (grandchild,) = when(lambda: psutil.Process(pid).children(recursive=True))
    family = {pid, grandchild.pid}
    children.stop_all()
    assert not [p for p in family if Path(f"/proc/{p}").exists()]


def test_a_unit_gives_the_same_command_again_and_names_the_folders_it_writes(tmp_path: Path) -> None:
    printed = fedpews(
        "flower", "serve", str(tmp_path), "--name", "fl.example.org", "--listen", "9443", "--unit"
    ).stdout
    assert f"fedpews flower serve {tmp_path} --name fl.example.org --listen 9443\n" in printed
    assert f"ReadWritePaths={tmp_path}\n" in printed
