"""What a stranger without a key costs the coordinator: memory of the SuperLink, and the wait of another client.

    python benchmarks/unkeyed.py

A stranger posts bodies of empty nested messages to push-messages, which flwr unpacks before it checks the key, while
another client sends small requests. Three times: to the SuperLink itself (what a proxy without limits passes on),
through the proxy, and through the proxy with site certificates, of which the other client has one.
"""

from __future__ import annotations

import http.client
import ssl
import tempfile
import threading
import time
from pathlib import Path

import psutil

from fedpews.flower.deploy.coordinator import Coordinator, Proxy
from fedpews.flower.deploy.keys import (
    issue_site_certificate,
    make_server_keys,
    make_site_authority,
    make_site_key,
    pem_key,
    write_private,
)
from fedpews.flower.deploy.processes import LOOPBACK, free_port

EMPTY = b"\x12\x00"
"""An empty message of PushMessagesRequest.messages_list, in two bytes."""

BODIES = ((10, 1), (40, 1), (0.0625, 400))
"""Megabytes of a body, and how many of them, four at a time."""


def post(port: int, trusted: ssl.SSLContext, path: str, body: bytes) -> str:
    connection = http.client.HTTPSConnection(LOOPBACK, port, context=trusted, timeout=120)
    try:
        connection.request("POST", f"/v1/fleet/{path}", body, {"Content-Type": "application/protobuf"})
        return str(connection.getresponse().status)
    except OSError as error:  # the proxy closes while a body is still sent
        return type(error).__name__
    finally:
        connection.close()


def measure(superlink: int, port: int, stranger: ssl.SSLContext, client: ssl.SSLContext) -> None:
    for megabytes, count in BODIES:
        flood(superlink, port, stranger, client, megabytes, count)


def flood(
    superlink: int, port: int, stranger: ssl.SSLContext, client: ssl.SSLContext, megabytes: float, count: int
) -> None:
    """Send so many bodies, and print what they cost."""
    body = EMPTY * int(megabytes * 2**19)
    process, over = psutil.Process(superlink), threading.Event()
    before, most = process.memory_info().rss, 0
    waits: list[float] = []
    answers: list[str] = []

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, process.memory_info().rss)
            time.sleep(0.01)

    def other() -> None:
        while not over.is_set():
            began = time.monotonic()
            post(port, client, "send-node-heartbeat", b"")
            waits.append(time.monotonic() - began)
            time.sleep(0.05)

    def post_many(share: int) -> None:
        answers.extend(post(port, stranger, "push-messages", body) for _ in range(share))

    observers = [threading.Thread(target=observer) for observer in (watch, other)]
    senders = [threading.Thread(target=post_many, args=[-(-count // 4)]) for _ in range(min(count, 4))]
    began = time.monotonic()
    for thread in (*observers, *senders):
        thread.start()
    for thread in senders:
        thread.join()
    seconds = time.monotonic() - began
    over.set()
    for thread in observers:
        thread.join()
    said = ", ".join(f"{answers.count(status)} x {status}" for status in sorted(set(answers)))
    print(
        f"  {count:3} x {megabytes:6} MB: {(most - before) / 2**20:6.0f} MB more, {seconds:5.1f} s, another client "
        f"waits {max(waits):5.2f} s at most (answers: {said})"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = make_server_keys(folder / "certificates", LOOPBACK)
        private, public = make_site_key(folder / "keys", 0)
        for words, direct, certificates in (
            ("the SuperLink itself", True, False),
            ("through the proxy", False, False),
            ("through the proxy, with site certificates", False, True),
        ):
            port = free_port()
            home = folder / words.replace(" ", "-")
            authority = make_site_authority(home).certificate if certificates else None
            proxy = Proxy("localhost", f"{LOOPBACK}:{port}", keys.certificate, keys.key, authority)
            coordinator = Coordinator(home, proxy)
            try:
                coordinator.start()
                trusts = coordinator.inner.authority if direct else keys.authority
                stranger, client = (ssl.create_default_context(cafile=trusts) for _ in range(2))
                if certificates:
                    write_private(folder / "site.key", pem_key(private))
                    client.load_cert_chain(issue_site_certificate(home, public, 0), folder / "site.key")
                print(words)
                pid = coordinator.processes.pid("superlink")
                measure(pid, coordinator.port if direct else port, stranger, client)
            finally:
                coordinator.processes.stop_all()


if __name__ == "__main__":
    main()
