"""The coordinator's side, closed by default: a SuperLink on 127.0.0.1, and a proxy that lets only sites in."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpews.errors import ConfigError, RunFailed
from fedpews.flower.deploy.keys import YEARS, ServerKeys, fingerprint, make_server_keys
from fedpews.flower.deploy.processes import Processes
from fedpews.flower.deploy.programs import LOOPBACK, environment, free_ports, key_values, program
from fedpews.flower.deploy.proxy import Door, need_nginx, nginx_config
from fedpews.flower.notices import Follower

CONNECTION = "here"
"""What ``flwr`` calls this SuperLink, in the coordinator's own Flower home."""
START_SECONDS = 120.0
PORT_FILE = "superlink-port"
UNKNOWN_KEY = re.compile(r"public key: b'(.*?)', exception: No SuperNode found")
"""In the SuperLink's log (flwr 1.41): a site whose key is not registered."""


class Coordinator:
    """A SuperLink and its proxy in one folder, which belongs to the operator alone.

    Args:
        folder: Flower's home, logs, the SuperLink's own certificate and its database.
        door: where sites come in; None is no door, for sites on this machine only.
        keep: whether registered sites are remembered over a restart.
    """

    def __init__(self, folder: Path, door: Door | None, keep: bool = True) -> None:
        self.folder, self.door, self.keep = folder, door, keep
        (self.port,) = free_ports(1)
        self.processes = Processes()

    @property
    def inner(self) -> ServerKeys:
        """The SuperLink's own certificate: local programs and the proxy trust it, nobody else needs to."""
        place = self.folder / "inner"
        return ServerKeys(place / "ca.crt", place / "server.pem", place / "server.key")

    def start(self) -> None:
        """Start both; they run until ``processes.stop_all``."""
        nginx = None if self.door is None else need_nginx()
        for name in ("logs", "home", "proxy"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        make_server_keys(self.folder / "inner", LOOPBACK, YEARS)
        write_connection(self.folder / "home", self.port, self.inner.authority)
        (self.folder / PORT_FILE).write_text(str(self.port))
        command = [program("flower-superlink"), "--host", LOOPBACK, "--port", str(self.port)]
        command += ["--ssl-ca-certfile", str(self.inner.authority)]
        command += ["--ssl-certfile", str(self.inner.certificate), "--ssl-keyfile", str(self.inner.key)]
        command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        if self.keep:
            command += ["--database", str(self.folder / "superlink.db")]
        self._start("superlink", command)
        self._wait("superlink", self.port)
        if self.door is not None and nginx is not None:
            config = self.folder / "proxy" / "nginx.conf"
            config.write_text(nginx_config(self.door, self.folder / "proxy", self.port, self.inner.authority))
            self._start("proxy", [nginx, "-c", str(config), "-e", str(self.folder / "proxy" / "error.log")])
            host, _, port = self.door.listen.rpartition(":")
            self._wait("proxy", int(port), host or LOOPBACK)

    def check(self) -> None:
        """Raise when one of the two has ended."""
        for name in ("superlink",) if self.door is None else ("superlink", "proxy"):
            code = self.processes.ended(name)
            if code is not None:
                what = "SuperLink" if name == "superlink" else "proxy"
                raise RunFailed(
                    f"the {what} ended with code {code} (see {self.log(name)}); the rounds so far are saved, "
                    "go on with --resume"
                )

    def register(self, public_key: Path) -> None:
        """Let the holder of a key in. Only from this machine: the door does not pass it."""
        flwr(self.folder, "supernode", "register", str(public_key), CONNECTION)

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _start(self, name: str, command: list[str]) -> None:
        self.processes.start(name, command, environment(self.folder / "home"), self.log(name))

    def _wait(self, name: str, port: int, host: str = LOOPBACK) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.processes.ended(name) is None:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex((host, port)) == 0:
                    return
            time.sleep(0.2)
        raise RunFailed(f"the {name} did not start; see {self.log(name)}")


def write_connection(home: Path, port: int, authority: Path) -> None:
    """Flower's own settings, from which ``flwr run APP here`` knows where to go."""
    (home / "config.toml").write_text(
        f'[superlink.{CONNECTION}]\naddress = "{LOOPBACK}:{port}"\nroot-certificates = "{authority}"\n'
    )


def flwr(folder: Path, *arguments: str) -> str:
    """One of Flower's commands, at the coordinator whose folder this is; what it printed."""
    if not (folder / "home" / "config.toml").exists():
        raise ConfigError(
            f"{folder} is no coordinator's folder; start one with: fedpews flower serve {folder}"
        )
    done = subprocess.run(
        [program("flwr"), *arguments],
        env=environment(folder / "home"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunFailed(
            f"flwr {' '.join(arguments[:2])} failed: {(done.stderr or done.stdout).strip()[-300:]}"
        )
    return done.stdout


def run_command(app: Path, settings: Mapping[str, Any]) -> list[str]:
    """The command that submits an app and follows its log."""
    return [program("flwr"), "run", str(app), CONNECTION, "--stream", "-c", key_values(settings)]


def unknown_keys(log: Sequence[str]) -> list[str]:
    """The fingerprints of keys that are not registered, of sites that tried to connect."""
    found = (UNKNOWN_KEY.search(line) for line in log)
    return [fingerprint(match[1].replace("\\n", "\n").encode()) for match in found if match]


def serve(coordinator: Coordinator, say: Callable[[str], None], poll_seconds: float = 1.0) -> None:
    """Run until one of the two ends or we are stopped; leaves nothing behind."""
    try:
        coordinator.start()
        door = coordinator.door
        say(
            f"SuperLink on {LOOPBACK}:{coordinator.port}; "
            + ("no door" if door is None else f"sites come in at {door.name}, {door.listen}")
        )
        log, said = Follower(coordinator.log("superlink")), set[str]()
        while True:
            coordinator.check()
            for key in unknown_keys(log.new()):
                if key not in said:
                    said.add(key)
                    say(
                        f"a site with the key {key} is not let in: it is not approved (fedpews flower approve)"
                    )
            time.sleep(poll_seconds)
    finally:
        coordinator.processes.stop_all()
