"""`fedpews site`: a SuperNode and its warm executor, started again when one of them ends."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpews.flower.deploy.clocks import explain_contact
from fedpews.flower.deploy.pin import Pin
from fedpews.flower.deploy.processes import Processes
from fedpews.flower.deploy.programs import LOOPBACK, environment, free_ports, key_values, program
from fedpews.flower.failure import forget_failure, raise_failure
from fedpews.flower.handlers import site_folder
from fedpews.flower.notices import Follower
from fedpews.outside import check_plain
from fedpews.results.layout import SITE_STATUS

RESTART_SECONDS = 5.0
POLL_SECONDS = 0.5
CONTACT_SECONDS = 30.0
"""How often to see whether the coordinator can still be reached."""
NOT_ACTIVATED = "[code: 2004]"
"""In the SuperNode's log: the coordinator knows no such key, or the site's last connection has not ended there."""
SUPERNODE, EXECUTOR = "supernode", "executor"


@dataclass(frozen=True)
class SiteOptions:
    """What a site needs to know.

    Args:
        superlink: the coordinator's address, ``host:port``.
        authority: the certificate authority that vouches for it.
        key: the site's private key.
        folder: Flower's home and logs of this site.
        settings: ``--node-config``: site, data, state-dir, device, workers.
    """

    pin: Pin
    superlink: str
    authority: Path
    key: Path
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)


class SiteProcess:
    """A site's two programs. Only loopback is listened on, and only the executor knows the SuperNode's secret."""

    def __init__(self, options: SiteOptions, say: Callable[[str], None] = print) -> None:
        self.options, self.say = options, say
        self.processes = Processes()
        self._restart_at: dict[str, float] = {}
        self._own = site_folder(options.settings)
        self._status = Follower(self._own / SITE_STATUS)
        self._log = Follower(self.log(SUPERNODE))
        self._contact_at, self._contact, self._reason = 0.0, "not tried", ""

    def start(self) -> None:
        home, logs = self.options.folder / "home", self.options.folder / "logs"
        home.mkdir(parents=True, exist_ok=True)
        logs.mkdir(exist_ok=True)
        self.options.folder.chmod(0o700)
        secret = self.options.folder / "secret"
        descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
        forget_failure(self._own)
        self._start_pair()

    def tend(self) -> None:
        """Show what is new, and start again what ended. Raises what keeps this site from taking part.

        The two belong together: a SuperNode that is new gives new tasks. The SuperLink takes a node back only when its
        old heartbeat has run out, so this may take several tries.
        """
        for line in self._status.new():
            self.say(line)
        raise_failure(self._own)
        self._check_contact()
        ended = {
            name: code for name in (SUPERNODE, EXECUTOR) if (code := self.processes.ended(name)) is not None
        }
        if not ended:
            return
        if not self._restart_at:
            self._say_ended(ended)
            self._restart_at[SUPERNODE] = time.monotonic() + RESTART_SECONDS
        elif time.monotonic() >= self._restart_at[SUPERNODE]:
            self.processes.stop_all()
            self._restart_at = {}
            self._start_pair()

    def _say_ended(self, ended: Mapping[str, int]) -> None:
        reason = ", ".join(
            f"the {name} ended with code {code} (see {self.log(name)})" for name, code in ended.items()
        )
        if any(NOT_ACTIVATED in line for line in self._log.new()):
            reason = (
                "the coordinator does not let this site in: its key is not approved there (fedpews flower approve), "
                f"or its last connection has not run out yet (a minute); see {self.log(SUPERNODE)}"
            )
        if reason != self._reason:
            self.say(f"{reason}; trying again")
        self._reason = reason

    def _check_contact(self) -> None:
        """Say when the coordinator cannot be reached, and when it can be again.

        Flower's own programs try for ever, and end without a reason when the clock or the certificate is wrong.
        """
        if time.monotonic() < self._contact_at:
            return
        options = self.options
        found = explain_contact(options.superlink, options.authority)
        self._contact_at = time.monotonic() + (CONTACT_SECONDS if found is None else RESTART_SECONDS)
        text = found or f"the coordinator answers at {options.superlink}"
        # a clock's seconds are never twice the same
        kind = re.sub("[0-9]+", "", text)
        if kind != self._contact:
            self.say(text)
        self._contact = kind

    def log(self, name: str) -> Path:
        return self.options.folder / "logs" / f"{name}.log"

    def _start_pair(self) -> None:
        options, (port,) = self.options, free_ports(1)
        secret, env = options.folder / "secret", environment(options.folder / "home")
        command = [program("flower-supernode"), "--superlink", options.superlink]
        command += ["--root-certificates", str(options.authority)]
        command += ["--auth-supernode-private-key", str(options.key)]
        command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
        command += ["--host", LOOPBACK, "--port", str(port), "--node-config", key_values(options.settings)]
        self.processes.start(SUPERNODE, command, env, self.log(SUPERNODE))
        executor = [sys.executable, "-m", "fedpews.flower.deploy.executor", f"{LOOPBACK}:{port}", str(secret)]
        executor += [str(options.pin.folder), options.pin.hash, json.dumps(dict(options.settings))]
        self.processes.start(EXECUTOR, executor, env, self.log(EXECUTOR))


def run_site(options: SiteOptions, say: Callable[[str], None]) -> None:
    """Run until stopped, or until it is clear that this site cannot take part; leaves nothing behind."""
    for path in (options.authority, options.key):
        check_plain(path)
    site = SiteProcess(options, say)
    try:
        site.start()
        say(f"this site runs only the app {options.pin.hash} ({options.pin.folder})")
        while True:
            site.tend()
            time.sleep(POLL_SECONDS)
    finally:
        site.processes.stop_all()
