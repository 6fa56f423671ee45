"""The only door to the network: a reverse proxy that passes what a site needs, and nothing else.

Flower's SuperLink serves three APIs on one port: Fleet (sites), Control (who may submit and register) and Runtime
(its own processes). Only Fleet asks for a key. So the SuperLink listens on 127.0.0.1 alone, and nginx in front of it
ends the TLS and passes an exact list of Fleet paths.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fedpews.errors import ConfigError

FLEET_PATHS = (
    "activate-node",
    "confirm-message-received",
    "deactivate-node",
    "get-fab",
    "get-run",
    "pull-messages",
    "pull-object",
    "push-messages",
    "push-object",
    "send-node-heartbeat",
)
"""What a registered site calls (flwr 1.41 and 1.42). Registering is not among it: the operator does that, locally."""

TEMPLATE = """# written by fedpews; the SuperLink itself listens on 127.0.0.1 only
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log {folder}/access.log combined;
    # messages are passed on as they come: nothing of them is ever put on disk here
    proxy_request_buffering off;
    proxy_max_temp_file_size 0;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server_tokens off;
    client_max_body_size {megabytes}m;
    limit_req_zone $binary_remote_addr zone=sites:1m rate=100r/s;
    server {{
        listen {listen} ssl;
        server_name {name};
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.2 TLSv1.3;
        limit_req zone=sites burst=400 nodelay;
        proxy_http_version 1.1;
        proxy_read_timeout 600s;
        proxy_send_timeout 600s;
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_ssl_trusted_certificate {inner_authority};
        location / {{ return 403; }}
{locations}
    }}
}}
"""


@dataclass(frozen=True)
class Door:
    """Where sites come in.

    Args:
        name: the host's name, as the certificate has it.
        listen: the address and port to listen on, such as ``8443`` or ``127.0.0.1:8443``.
        megabytes: the largest piece of a message; Flower cuts arrays into pieces of at most 20 MB.
    """

    name: str
    listen: str
    certificate: Path
    key: Path
    megabytes: int = 64


def nginx_config(door: Door, folder: Path, superlink_port: int, inner_authority: Path) -> str:
    """The proxy's configuration. Each path is matched exactly and written out anew, so no ``..`` gets past it."""
    to = f"https://127.0.0.1:{superlink_port}/v1/fleet"
    locations = [
        f"        location = /v1/fleet/{path} {{ limit_except POST {{ deny all; }} proxy_pass {to}/{path}; }}"
        for path in FLEET_PATHS
    ]
    return TEMPLATE.format(
        folder=folder,
        megabytes=door.megabytes,
        listen=door.listen,
        name=door.name,
        certificate=door.certificate,
        key=door.key,
        inner_authority=inner_authority,
        locations="\n".join(locations),
    )


def find_nginx() -> str | None:
    """The proxy's program; Debian has it where only root looks."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")


def need_nginx() -> str:
    found = find_nginx()
    if found is None:
        raise ConfigError(
            "nginx is not installed, and the SuperLink must not face the network without it: "
            "apt-get install nginx-light (or your system's nginx)"
        )
    return found
