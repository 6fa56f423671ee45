"""A stranger on the network, and a server that turns: neither gets anywhere."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import socket
import ssl
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
from fedpews.flower.deploy.keys import (
    issue_site_certificate,
    make_server_keys,
    make_site_authority,
    make_site_key,
    pem_key,
    write_private,
)
from fedpews.flower.deploy.processes import LOOPBACK, Processes, free_port
from fedpews.flower.deploy.site_process import SiteProcess
from waiting import when

needs_nginx = pytest.mark.skipif(
    find_nginx() is None, reason="nginx is not installed (apt-get install nginx)"
)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[Coordinator, str, Path]]:
    """A coordinator as `fedpews flower serve` starts it, its address, and its authority."""
    keys = make_server_keys(tmp_path / "certificates", LOOPBACK)
    port = free_port()
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
    port = free_port()
    command = [shutil.which("flower-supernode", path=str(Path(sys.executable).parent)) or "flower-supernode"]
    command += ["--superlink", address, "--root-certificates", str(authority), "--host", LOOPBACK]
    command += ["--auth-supernode-private-key", str(private), "--port", str(port), "--max-retries", "0"]
    processes = Processes(tmp_path)
    try:
        processes.start("stranger", command)
        when(lambda: processes.ended("stranger") is not None)
        assert processes.ended("stranger"), processes.log("stranger").read_text()
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
    site = SiteProcess(pin, address, authority, private, tmp_path / "site-0", settings)
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
    assert pin.hash in said
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


@contextlib.contextmanager
def nginx_alone(folder: Path, site_authority: Path | None = None, connections: int = 64) -> Iterator[Path]:
    """The proxy without a SuperLink behind it, so that 502 is the answer to whatever it passes on; its authority."""
    keys, ports = make_server_keys(folder / "certificates", LOOPBACK), (free_port(), free_port())
    listen = f"{LOOPBACK}:{ports[0]}"
    proxy = Proxy("localhost", listen, keys.certificate, keys.key, site_authority, connections)
    (folder / "nginx.conf").write_text(proxy.nginx_config(folder, ports[1], keys.authority))
    (folder / "port").write_text(str(ports[0]))
    processes = Processes(folder)
    command = [find_nginx() or "nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    try:
        processes.start("proxy", command)
        when(lambda: listens(ports[0]))
        yield keys.authority
    finally:
        processes.stop_all()


@contextlib.contextmanager
def sending(
    folder: Path, trusted: ssl.SSLContext, path: str, size: int, sent: int
) -> Iterator[http.client.HTTPSConnection]:
    """A request whose body has so many bytes, of which some are sent."""
    port = int((folder / "port").read_text())
    with contextlib.closing(
        http.client.HTTPSConnection(LOOPBACK, port, context=trusted, timeout=60)
    ) as connection:
        connection.putrequest("POST", f"/v1/fleet/{path}")
        connection.putheader("Content-Length", str(size))
        connection.endheaders()
        with contextlib.suppress(OSError):  # the proxy answers and closes before it has read it
            connection.send(b"0" * sent)
        yield connection


def send(folder: Path, trusted: ssl.SSLContext, path: str, size: int) -> int:
    """The status of the answer."""
    with sending(folder, trusted, path, size, size) as connection, connection.getresponse() as answer:
        return answer.status


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


@needs_nginx
def test_a_body_larger_than_its_path_allows_is_not_passed_on(tmp_path: Path) -> None:
    """flwr unpacks a body before it checks the key: 40 MB once cost 1.5 GB."""
    with nginx_alone(tmp_path) as authority:
        trusted = ssl.create_default_context(cafile=authority)
        for path, most in FLEET_PATHS.items():
            size = int(most[:-1]) * {"k": 2**10, "m": 2**20}[most[-1]]
            assert send(tmp_path, trusted, path, size + 1) == 413, path
            assert send(tmp_path, trusted, path, size) == 502, path


@needs_nginx
def test_senders_that_never_finish_take_no_more_connections_than_an_address_may_have(tmp_path: Path) -> None:
    with nginx_alone(tmp_path, connections=4) as authority, contextlib.ExitStack() as open_ones:
        trusted = ssl.create_default_context(cafile=authority)
        for _ in range(4):
            open_ones.enter_context(sending(tmp_path, trusted, "push-object", 1000, 10))
        # nothing of the four is passed on before it is whole, and a fifth is refused
        when(lambda: send(tmp_path, trusted, "push-object", 10) == 503)
        assert "connect() failed" not in (tmp_path / "error.log").read_text()


@needs_nginx
def test_nothing_is_answered_without_tls(tmp_path: Path) -> None:
    with nginx_alone(tmp_path):
        port = int((tmp_path / "port").read_text())
        with contextlib.closing(http.client.HTTPConnection(LOOPBACK, port, timeout=60)) as connection:
            connection.request("POST", "/v1/fleet/pull-messages", b"")
            with connection.getresponse() as answer:
                assert (answer.status, b"HTTPS port" in answer.read()) == (400, True)


@needs_nginx
def test_the_folders_of_a_coordinator_and_a_site_are_closed_to_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "start", lambda *_: None)
    monkeypatch.setattr(Coordinator, "_start", lambda *_: None)
    private, _ = make_site_key(tmp_path / "keys", 0)
    keys = make_server_keys(tmp_path / "certificates", LOOPBACK)
    make_site_authority(tmp_path / "coordinator")
    Coordinator(tmp_path / "coordinator", Proxy("localhost", "8443", keys.certificate, keys.key)).start()
    new_app(tmp_path / "app", starter())
    settings = {"site": 0, "state-dir": str(tmp_path / "state")}
    pin = Pin.of(tmp_path / "app")
    SiteProcess(pin, "localhost:8443", keys.authority, private, tmp_path / "site", settings).start()
    closed = {
        path: (tmp_path / path).stat().st_mode & 0o777
        for path in ("coordinator", "coordinator/sites/ca.key", "site", "site/secret", "keys/site-0")
    }
    assert set(closed.values()) == {0o700, 0o600}, closed
    assert len((tmp_path / "site" / "secret").read_bytes()) == 32


@needs_nginx
def test_with_site_certificates_nothing_of_a_stranger_is_passed_on(tmp_path: Path) -> None:
    private, public = make_site_key(tmp_path / "keys", 0)
    write_private(tmp_path / "site.key", pem_key(private))
    authority = make_site_authority(tmp_path / "ours").certificate
    with nginx_alone(tmp_path, site_authority=authority) as server:
        stranger, forger, site = (ssl.create_default_context(cafile=server) for _ in range(3))
        forger.load_cert_chain(issue_site_certificate(tmp_path / "other", public, 0), tmp_path / "site.key")
        site.load_cert_chain(issue_site_certificate(tmp_path / "ours", public, 0), tmp_path / "site.key")
        assert send(tmp_path, stranger, "push-object", 10) == 400
        assert send(tmp_path, forger, "push-object", 10) == 400
        assert send(tmp_path, site, "push-object", 10) == 502


@needs_nginx
@pytest.mark.slow
def test_a_site_shows_its_certificate_to_a_coordinator_that_asks_for_it(tmp_path: Path) -> None:
    folder, port = tmp_path / "coordinator", free_port()
    keys = make_server_keys(tmp_path / "certificates", LOOPBACK)
    authority, address = make_site_authority(folder).certificate, f"{LOOPBACK}:{port}"
    coordinator = Coordinator(folder, Proxy("localhost", address, keys.certificate, keys.key, authority))
    private, public = make_site_key(tmp_path / "keys", 0)
    new_app(tmp_path / "app", starter())
    settings = {"site": 0, "state-dir": str(tmp_path / "state")}
    certificate = issue_site_certificate(folder, public, 0)
    pin = Pin.of(tmp_path / "app")
    site = SiteProcess(pin, address, keys.authority, private, tmp_path / "site", settings, certificate)
    try:
        coordinator.start()
        register(folder, public)
        site.start()
        log = folder / "proxy" / "access.log"
        when(lambda: re.search(r'activate-node HTTP/1.1" 200', log.read_text()) is not None)
    finally:
        site.processes.stop_all()
        coordinator.processes.stop_all()
