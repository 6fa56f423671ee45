"""Why a site is not taken: its clock, or the coordinator's certificate."""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from fedpews.flower.deploy.keys import ServerKeys, make_server_keys
from fedpews.flower.deploy.site_process import AHEAD, BEHIND, explain_contact


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ServerKeys:
    return make_server_keys(tmp_path_factory.mktemp("keys"))


@contextmanager
def coordinator(keys: ServerKeys, ahead: float = 0, date: str | None = None) -> Iterator[str]:
    """A server that refuses everything, as the proxy does, with a clock that is so many seconds ahead."""

    class Refuse(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(403)
            self.send_header("Date", date or formatdate(time.time() + ahead, usegmt=True))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys.certificate, keys.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("ahead", "said"), [(0, None), (200, None), (400, "s behind"), (-30, r"3\d s ahead of")]
)
def test_a_clock_that_flower_will_not_take_is_said(keys: ServerKeys, ahead: float, said: str | None) -> None:
    with coordinator(keys, ahead) as address:
        found = explain_contact(address, keys.authority)

    assert found is None if said is None else re.search(said, str(found))


def test_the_bounds_are_flowers() -> None:
    assert (AHEAD, BEHIND) == (SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)


def test_a_certificate_of_another_authority_is_said(keys: ServerKeys, tmp_path: Path) -> None:
    other = make_server_keys(tmp_path)

    with coordinator(keys) as address:
        found = explain_contact(address, other.authority)

    assert "certificate is not accepted" in str(found)


@pytest.mark.parametrize("date", ["yesterday", "Mon, 99 Nov 2026 00:00:00 GMT"])
def test_a_date_that_is_none_says_nothing(keys: ServerKeys, date: str) -> None:
    with coordinator(keys, date=date) as address:
        assert explain_contact(address, keys.authority) is None


def test_a_coordinator_that_cannot_be_reached_is_said(keys: ServerKeys) -> None:
    found = explain_contact("127.0.0.1:9", keys.authority, timeout=1)

    assert "cannot be reached at 127.0.0.1:9 (Connection refused); trying again" in str(found)
