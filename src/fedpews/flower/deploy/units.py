"""systemd units for a coordinator and for a site."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fedpews.flower.deploy.site_process import SiteOptions

UNIT = """[Unit]
Description={what}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
Restart=always
RestartSec=10
User=fedpews
UMask=0077
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ReadWritePaths={writable}

[Install]
WantedBy=multi-user.target
"""


def site_unit(options: SiteOptions) -> str:
    """A unit that runs this site; its user reads the app, the data and the key, and writes only the two folders."""
    settings = dict(options.settings)
    state = str(settings.pop("state-dir"))
    command = [_fedpews(), "site", str(options.pin.folder), "--superlink", options.superlink]
    command += ["--ca", str(options.authority), "--key", str(options.key)]
    command += ["--folder", str(options.folder), "--state-dir", state]
    for key, value in settings.items():
        command += [f"--{key}", str(value)]
    return _unit(f"fedpews site {settings['site']}", command, [state, str(options.folder)])


def coordinator_unit(folder: Path, name: str, listen: str, certificate: Path | None, key: Path | None) -> str:
    """A unit that runs the coordinator of a folder."""
    command = [_fedpews(), "flower", "serve", str(folder), "--name", name, "--listen", listen]
    if certificate is not None and key is not None:
        command += ["--certificate", str(certificate.resolve()), "--key", str(key.resolve())]
    return _unit(f"fedpews coordinator {name}", command, [str(folder)])


def _unit(what: str, command: Sequence[str], writable: Sequence[str]) -> str:
    # systemd reads % as the start of a specifier
    line = shlex.join(command).replace("%", "%%")
    return UNIT.format(what=what, command=line, writable=" ".join(sorted(set(writable))))


def _fedpews() -> str:
    return str(Path(sys.executable).with_name("fedpews"))
