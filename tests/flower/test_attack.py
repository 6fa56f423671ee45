"""A stranger on the network, and a server that turns: neither gets anywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attack import flwr, forge_app, play, strangers_home

from fedpews.flower.deploy.app_folder import ForeignApp, Pin, app_hash, new_app, pack_app, starter
from fedpews.flower.deploy.coordinator import (
    CONNECTION,
    FLEET_PATHS,
    Coordinator,
    Proxy,
    find_nginx,
    register,
)
from fedpews.flower.deploy.keys import make_server_keys, make_site_key
from fedpews.flower.deploy.processes import LOOPBACK, Processes, environment, free_ports
from fedpews.flower.deploy.site_process import SiteOptions, SiteProcess
from waiting import when

needs_nginx = pytest.mark.skipif(
    find_nginx() is None, reason="nginx is not installed (apt-get install nginx)"
)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[Coordinator, str, Path]]:
    """A coordinator as `fedpews flower serve` starts it, its address, and its authority."""
    keys = make_server_keys(tmp_path / "certificates", LOOPBACK)
    (port,) = free_ports(1)
    proxy = Proxy("localhost", f"{LOOPBACK}:{port}", keys.certificate, keys.key)
    running = Coordinator(tmp_path / "coordinator", proxy)
    try:
        running.start()
        yield running, f"{LOOPBACK}:{port}", keys.authority
    finally:
        running.processes.stop_all()


@needs_nginx
def test_a_stranger_with_the_address_and_the_authority_fails_at_each_step(
    coordinator: tuple[Coordinator, str, Path], tmp_path: Path
) -> None:
    running, address, authority = coordinator
    steps = play(address, authority, tmp_path / "stranger")
    assert not {step: said for step, (through, said) in steps.items() if through}
    assert not (tmp_path / "stranger" / "loot").exists()
    # the same from the operator's own machine and folder is what approve and start do
    _, public = make_site_key(tmp_path / "keys", 0)
    register(running.folder, public)
    # the SuperLink itself listens on loopback only
    ours = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=False).stdout
    assert f"0.0.0.0:{running.port}" not in ours


@needs_nginx
def test_a_site_whose_key_is_not_registered_does_not_get_in(
    coordinator: tuple[Coordinator, str, Path], tmp_path: Path
) -> None:
    _, address, authority = coordinator
    private, _ = make_site_key(tmp_path / "keys", 1)
    (port,) = free_ports(1)
    command = [shutil.which("flower-supernode", path=str(Path(sys.executable).parent)) or "flower-supernode"]
    command += ["--superlink", address, "--root-certificates", str(authority), "--host", LOOPBACK]
    command += ["--auth-supernode-private-key", str(private), "--port", str(port), "--max-retries", "0"]
    processes = Processes()
    try:
        processes.start("stranger", command, environment(tmp_path / "home"), tmp_path / "log")
        when(lambda: processes.ended("stranger") is not None)
        assert processes.ended("stranger"), (tmp_path / "log").read_text()
    finally:
        processes.stop_all()


@needs_nginx
@pytest.mark.slow
def test_a_site_never_runs_an_app_that_it_has_not_read(
    coordinator: tuple[Coordinator, str, Path], tmp_path: Path
) -> None:
    """The server itself turns: its operator submits an app that reads the sites' files."""
    running, address, authority = coordinator
    secret, loot = tmp_path / "patients.txt", tmp_path / "loot.txt"
    secret.write_text("only for the site's own eyes")
    new_app(tmp_path / "agreed", starter())
    private, public = make_site_key(tmp_path / "keys", 0)
    register(running.folder, public)
    settings = {"site": 0, "state-dir": str(tmp_path / "state")}
    pin = Pin.of(tmp_path / "agreed")
    options = SiteOptions(pin, address, authority, private, tmp_path / "site-0", settings)
    site = SiteProcess(options)
    forged = forge_app(tmp_path / "forged", secret, loot)
    try:
        site.start()
        home = strangers_home(running.folder / "home", f"{LOOPBACK}:{running.port}", running.inner.authority)
        code, text = flwr(home, "run", str(forged), "victim")
        assert code == 0, text

        def answered() -> bool:
            running.check()
            return loot.exists() and "\n" in loot.read_text()

        when(answered)
    finally:
        site.processes.stop_all()
    said = loot.read_text()
    assert "only for the site's own eyes" not in said
    assert options.pin.hash in said
    assert app_hash(forged) in said
    assert not list((tmp_path / "site-0" / "home").rglob("client_app.py"))


def test_a_pinned_app_is_refused_when_a_single_byte_differs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        new_app(tmp_path / name / "app", starter())
    pin = Pin.of(tmp_path / "one" / "app")
    pin.check(pack_app(tmp_path / "two" / "app"))
    (tmp_path / "two" / "app" / "client_app.py").write_text("import os")
    with pytest.raises(ForeignApp, match=f"{app_hash(tmp_path / 'two' / 'app')}.*{pin.hash}"):
        pin.check(pack_app(tmp_path / "two" / "app"))
    sent = pack_app(tmp_path / "one" / "app")
    (tmp_path / "one" / "app" / "client_app.py").write_text("import os")
    with pytest.raises(ForeignApp, match="changed since"):
        pin.check(sent)


def test_the_proxy_passes_an_exact_list_of_paths_and_nothing_else(tmp_path: Path) -> None:
    proxy = Proxy("fl.example.org", "8443", tmp_path / "server.pem", tmp_path / "server.key")
    text = proxy.nginx_config(tmp_path, 9000, tmp_path / "ca.crt")
    passed = [line.split()[2] for line in text.splitlines() if line.strip().startswith("location =")]
    assert passed == [f"/v1/fleet/{path}" for path in FLEET_PATHS]
    assert "location / { return 403; }" in text
    assert "control" not in text
    assert CONNECTION == "here"
