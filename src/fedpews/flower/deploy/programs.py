"""Flower's own programs: where they are, and the environment they are given."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpews.errors import ConfigError

LOOPBACK = "127.0.0.1"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def program(name: str) -> str:
    """Flower's commands lie beside the Python that runs us."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} is not installed: pip install 'fedpews[flower]'")
    return found


def environment(home: Path) -> dict[str, str]:
    """Each party has its own Flower home, as on machines of its own. Flower finds its programs by PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(home)}


def key_values(settings: Mapping[str, Any]) -> str:
    """Settings as Flower's command line wants them.

    >>> key_values({"site": 0, "data": "folder:/srv"})
    'site=0 data="folder:/srv"'
    """
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())


def free_ports(count: int) -> Sequence[int]:
    """Ports that nobody uses now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
