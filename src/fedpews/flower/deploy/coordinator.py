"""The coordinator, closed by default: a SuperLink on 127.0.0.1, and a proxy that passes only what sites need.

Flower's SuperLink serves three APIs on one port: Fleet (for sites), Control (to submit runs and register keys) and
Runtime (for its own processes). Only Fleet asks for a key. So the SuperLink listens on 127.0.0.1 alone, and nginx in
front of it ends the TLS and passes an exact list of Fleet paths.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpews.errors import ConfigError, RunFailed
from fedpews.flower.deploy import template
from fedpews.flower.deploy.keys import YEARS, ServerKeys, fingerprint, make_private, make_server_keys
from fedpews.flower.deploy.processes import LOOPBACK, Processes, environment, free_port, key_values, program
from fedpews.flower.logs import Follower

FLEET_PATHS = {
    "activate-node": "16k",
    "confirm-message-received": "16k",
    "deactivate-node": "16k",
    "get-fab": "16k",
    "get-run": "16k",
    "pull-messages": "16k",
    "pull-object": "16k",
    "push-messages": "64k",
    "push-object": "8m",
    "send-node-heartbeat": "16k",
}
"""The paths that a registered site calls (flwr 1.41 and 1.42), with the largest body of each.

flwr unpacks a body before it checks the key, and nested messages take many times their bytes. Only push-object, which
has none, may be large: Flower cuts arrays into pieces of 5 MB.
"""

CONNECTION = "here"
"""The name of this SuperLink for ``flwr``, in the coordinator's Flower home."""
START_SECONDS = 120.0
UNKNOWN_KEY = re.compile(r"public key: b'(.*?)', exception: No SuperNode found")
"""In the SuperLink's log (flwr 1.41): a site whose key is not registered."""


@dataclass(frozen=True)
class Proxy:
    """Where sites connect.

    Args:
        name: the host's name, as in the certificate.
        listen: the port or address and port to listen on, such as ``8443`` or ``127.0.0.1:8443``.
        site_authority: signs the certificates that sites must show; None asks for none.
        connections: the most at once from one address.
    """

    name: str
    listen: str
    certificate: Path
    key: Path
    site_authority: Path | None = None
    connections: int = 64

    def nginx_config(self, folder: Path, superlink_port: int, inner_authority: Path) -> str:
        """nginx's configuration. Each path is matched exactly and written out anew, so no ``..`` gets past it."""
        to = f"https://{LOOPBACK}:{superlink_port}/v1/fleet"
        locations = "\n".join(
            f"        location = /v1/fleet/{path} {{ limit_except POST {{ deny all; }} client_max_body_size {most}; "
            f"client_body_buffer_size {most}; "
            f"{'' if most == '16k' else 'limit_req zone=bodies burst=200; '}proxy_pass {to}/{path}; }}"
            for path, most in FLEET_PATHS.items()
        )
        verify = f"ssl_verify_client on; ssl_client_certificate {self.site_authority};"
        return template(
            "nginx.conf",
            folder=folder,
            inner_authority=inner_authority,
            locations=locations,
            verify_client=verify if self.site_authority else "",
            **vars(self),
        )


def find_nginx() -> str | None:
    """The path of nginx, also where Debian has it, for root only."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")


class Coordinator:
    """A SuperLink and its proxy in one folder, which belongs to the operator alone.

    Args:
        folder: Flower's home, logs, the SuperLink's own certificate and its database.
        proxy: where sites connect; None is for sites on this machine only.
        keep: whether registered sites are remembered over a restart.
    """

    def __init__(self, folder: Path, proxy: Proxy | None, keep: bool = True) -> None:
        self.folder, self.proxy, self.keep = folder, proxy, keep
        self.port, self.processes = free_port(), Processes(folder)

    @property
    def inner(self) -> ServerKeys:
        """The SuperLink's own certificate, which only local programs and the proxy need to trust."""
        return ServerKeys.in_folder(self.folder / "inner")

    def start(self) -> None:
        """Start both; they run until ``processes.stop_all``."""
        nginx = find_nginx()
        if self.proxy is not None and nginx is None:
            raise ConfigError(
                "nginx is not installed, and the SuperLink must not face the network without it: "
                "apt-get install nginx-light (or your system's nginx)"
            )
        for folder in (self.folder, self.folder / "home", self.folder / "proxy"):
            make_private(folder)
        make_server_keys(self.folder / "inner", LOOPBACK, YEARS)
        # from which ``flwr run APP here`` knows the address
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink.{CONNECTION}]\naddress = "{LOOPBACK}:{self.port}"\n'
            f'root-certificates = "{self.inner.authority}"\n'
        )
        command = [program("flower-superlink"), "--host", LOOPBACK, "--port", str(self.port)]
        command += ["--ssl-ca-certfile", str(self.inner.authority)]
        command += ["--ssl-certfile", str(self.inner.certificate), "--ssl-keyfile", str(self.inner.key)]
        command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        if self.keep:
            command += ["--database", str(self.folder / "superlink.db")]
        self._start("superlink", command, LOOPBACK, self.port)
        if self.proxy is not None and nginx is not None:
            folder = self.folder / "proxy"
            config = self.proxy.nginx_config(folder, self.port, self.inner.authority)
            (folder / "nginx.conf").write_text(config)
            command = [nginx, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
            host, _, port = self.proxy.listen.rpartition(":")
            self._start("proxy", command, host or LOOPBACK, int(port))

    def run(self, report: Callable[[str], None]) -> None:
        """Run until a program ends or we are stopped; ``report`` is called with every line for the operator."""
        log, reported = Follower(self.processes.log("superlink")), set[str]()

        def start() -> None:
            self.start()
            proxy = self.proxy
            where = "no proxy" if proxy is None else f"sites connect to {proxy.name}, {proxy.listen}"
            report(f"SuperLink on {LOOPBACK}:{self.port}; {where}")

        def tend() -> None:
            self.check()
            for key in set(unknown_keys(log.new())) - reported:
                reported.add(key)
                report(f"a site with the key {key} is refused: it is not approved (fedpews flower approve)")

        self.processes.run(start, tend)

    def check(self) -> None:
        """Raise if one of the two has ended."""
        for name in ("superlink",) if self.proxy is None else ("superlink", "proxy"):
            code = self.processes.ended(name)
            if code is not None:
                raise RunFailed(
                    f"the {name} ended with code {code} (see {self.processes.log(name)}); the rounds so far are "
                    "saved, go on with --resume"
                )

    def _start(self, name: str, command: list[str], host: str, port: int) -> None:
        """Start a program and wait until it listens."""
        self.processes.start(name, command)
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.processes.ended(name) is None:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex((host, port)) == 0:
                    return
            time.sleep(0.2)
        raise RunFailed(f"the {name} did not start; see {self.processes.log(name)}")


def register(folder: Path, public_key: Path) -> None:
    """Admit a key at the coordinator of a folder. Only from this machine: the proxy does not pass it."""
    if not (folder / "home" / "config.toml").exists():
        raise ConfigError(
            f"{folder} is no coordinator's folder; start one with: fedpews flower serve {folder}"
        )
    done = subprocess.run(
        [program("flwr"), "supernode", "register", str(public_key), CONNECTION],
        env=environment(folder / "home"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunFailed(f"flwr supernode register failed: {(done.stderr or done.stdout).strip()[-300:]}")


def run_command(app: Path, settings: Mapping[str, Any]) -> list[str]:
    """The command that submits an app and follows its log."""
    return [program("flwr"), "run", str(app), CONNECTION, "--stream", "-c", key_values(settings)]


def unknown_keys(log: Sequence[str]) -> list[str]:
    """The fingerprints of keys that are not registered, of sites that tried to connect."""
    matches = (UNKNOWN_KEY.search(line) for line in log)
    return [fingerprint(match[1].replace("\\n", "\n").encode()) for match in matches if match]
