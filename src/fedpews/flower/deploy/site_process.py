"""`fedpews site`: a SuperNode and its warm executor, started again when one of them ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from fedpews.flower.deploy.app_folder import Pin
from fedpews.flower.deploy.keys import YEARS, make_private, make_server_keys, pem_key, write_private
from fedpews.flower.deploy.processes import LOOPBACK, Processes, free_port, key_values, program
from fedpews.flower.logs import Follower, clear_failure, raise_failure, site_folder
from fedpews.outside import check_plain
from fedpews.results.layout import SITE_STATUS

RESTART_SECONDS = 5.0
CONTACT_SECONDS = 30.0
"""How often to check that the coordinator can still be reached."""
NOT_ACTIVATED = "[code: 2004]"
"""In the SuperNode's log: the coordinator knows no such key, or the site's last connection has not ended there."""
AHEAD, BEHIND = 5, 305
"""Seconds that a site's clock may differ for flwr; it answers anything else with a 401 that does not say why."""
SUPERNODE, EXECUTOR = "supernode", "executor"


@dataclass
class SiteProcess:
    """A site's two programs. They listen on loopback only, and only the executor knows the SuperNode's secret.

    Args:
        superlink: the coordinator's address, ``host:port``.
        authority: the certificate authority that vouches for it.
        key: the site's private key.
        folder: Flower's home and logs of this site.
        settings: ``--node-config``: site, data, state-dir, device, workers.
        certificate: the site's, for a coordinator that asks for one.
        report: called with every line for the user.
    """

    pin: Pin
    superlink: str
    authority: Path
    key: Path
    folder: Path
    settings: Mapping[str, Any]
    certificate: Path | None = None
    report: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self.processes = Processes(self.folder)
        self._state = site_folder(self.settings)
        self._status = Follower(self._state / SITE_STATUS)
        self._log = Follower(self.processes.log(SUPERNODE))
        self._contact_at, self._contact, self._reason = 0.0, "not tried", ""
        self._connect_to = self.superlink, self.authority

    def run(self) -> None:
        """Run until this site is stopped or cannot take part; leaves no process behind."""
        for path in (self.authority, self.key, self.certificate):
            if path is not None:
                check_plain(path)
        self.report(f"this site runs only the app {self.pin.hash} ({self.pin.folder})")
        self.processes.run(self.start, self.tend)

    def start(self) -> None:
        write_private(make_private(self.folder) / "secret", secrets.token_bytes(32))
        clear_failure(self._state)
        if self.certificate is not None:
            self._connect_to = self._open_tunnel(self.certificate)
        self._start_pair()

    def tend(self) -> None:
        """Show new status lines, and restart what ended. Raises what keeps this site from taking part.

        Both are restarted together: a new SuperNode gives new tasks. The SuperLink accepts a node again only when its
        old heartbeat has run out, so this may take several tries.
        """
        for line in self._status.new():
            self.report(line)
        raise_failure(self._state)
        self._check_contact()
        codes = {name: self.processes.ended(name) for name in (SUPERNODE, EXECUTOR)}
        ended = {name: code for name, code in codes.items() if code is not None}
        if ended:
            self._report_ended(ended)
            time.sleep(RESTART_SECONDS)
            self.processes.stop_all()
            self._start_pair()

    def _report_ended(self, ended: Mapping[str, int]) -> None:
        log = self.processes.log
        reason = ", ".join(
            f"the {name} ended with code {code} (see {log(name)})" for name, code in ended.items()
        )
        if any(NOT_ACTIVATED in line for line in self._log.new()):
            reason = (
                "the coordinator refuses this site: its key is not approved there (fedpews flower approve), "
                f"or its last connection has not run out yet (a minute); see {log(SUPERNODE)}"
            )
        if reason != self._reason:
            self.report(f"{reason}; trying again")
        self._reason = reason

    def _check_contact(self) -> None:
        """Report when the coordinator cannot be reached, and when it can be again.

        Flower's own programs try for ever, and end without a reason if the clock or the certificate is wrong.
        """
        if time.monotonic() < self._contact_at:
            return
        problem = explain_contact(self.superlink, self.authority)
        self._contact_at = time.monotonic() + (CONTACT_SECONDS if problem is None else RESTART_SECONDS)
        text = problem or f"the coordinator answers at {self.superlink}"
        # the seconds of a clock differ every time
        kind = re.sub("[0-9]+", "", text)
        if kind != self._contact:
            self.report(text)
        self._contact = kind

    def _start_pair(self) -> None:
        port, secret, (superlink, authority) = str(free_port()), str(self.folder / "secret"), self._connect_to
        command = [program("flower-supernode"), "--superlink", superlink]
        command += ["--root-certificates", str(authority), "--auth-supernode-private-key", str(self.key)]
        command += ["--isolation", "process", "--superexec-auth-secret-file", secret]
        command += ["--host", LOOPBACK, "--port", port, "--node-config", key_values(self.settings)]
        self.processes.start(SUPERNODE, command)
        executor = [sys.executable, "-m", "fedpews.flower.deploy.executor", f"{LOOPBACK}:{port}", secret]
        executor += [str(self.pin.folder), self.pin.hash, json.dumps(dict(self.settings))]
        self.processes.start(EXECUTOR, executor)

    def _open_tunnel(self, certificate: Path) -> tuple[str, Path]:
        """Pass connections of this machine on to the coordinator with the site's certificate, which flwr cannot show.

        Returns:
            the address to connect to instead, and the authority that vouches for it.
        """
        folder, port = self.folder / "tunnel", free_port()
        keys = make_server_keys(folder, LOOPBACK, YEARS)
        write_private(folder / "site.key", pem_key(self.key))
        inner = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        inner.load_cert_chain(keys.certificate, keys.key)
        outer = ssl.create_default_context(cafile=self.authority)
        outer.load_cert_chain(certificate, folder / "site.key")
        host, _, number = self.superlink.rpartition(":")

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(2**16):
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                above, below = await asyncio.open_connection(host.strip("[]"), int(number), ssl=outer)
            except OSError:
                writer.close()
                return
            await asyncio.gather(pump(reader, below), pump(above, writer))

        async def listen() -> None:
            server = await asyncio.start_server(connect, LOOPBACK, port, ssl=inner)
            await server.serve_forever()

        threading.Thread(target=lambda: asyncio.run(listen()), daemon=True).start()
        return f"{LOOPBACK}:{port}", keys.authority


def explain_contact(superlink: str, authority: Path, timeout: float = 5) -> str | None:
    """Why this site cannot connect: the address, the coordinator's certificate or a clock; None if it can.

    Args:
        superlink: the coordinator's address, ``host:port``.
        authority: the certificate authority that vouches for it.
    """
    host, _, port = superlink.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=authority)
        connection = HTTPSConnection(host.strip("[]"), int(port), timeout=timeout, context=context)
        with contextlib.closing(connection):
            # every answer has the time in its header, a refusal too
            connection.request("HEAD", "/")
            date = connection.getresponse().headers.get("Date", "")
            now = time.time()
        # the header has whole seconds, rounded down
        ahead = now - (parsedate_to_datetime(date).timestamp() + 0.5)
    except ssl.SSLCertVerificationError as error:
        return f"the coordinator's certificate is not accepted: {error.verify_message}"
    except OSError as error:
        return f"the coordinator cannot be reached at {superlink} ({error.strerror or error}); trying again"
    except (HTTPException, ValueError):
        return None
    if -BEHIND < ahead < AHEAD:
        return None
    word = "ahead of" if ahead > 0 else "behind"
    return (
        f"this site's clock is {abs(ahead):.0f} s {word} the coordinator's, and Flower refuses what it sends. "
        "Set it by NTP: timedatectl set-ntp true"
    )
