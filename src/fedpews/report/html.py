"""Runs as one HTML page that needs nothing else: no file beside it, no request, no build.

While runs go on, ``serve`` shows it to this machine only, read-only.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b, sha256
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any

from fedpews.report.collect import collect
from fedpews.report.runs import Run, find_runs, folders_of_runs
from fedpews.results import layout
from fedpews.results.files import write_atomically

STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "base.js", "charts.js", "masks.js", "page.js")

HOST = "127.0.0.1"

WAITING = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>waiting</title></head><body style="font: 18px system-ui, sans-serif; margin: 3rem">
<p>No run has finished its first round yet. This page looks again every two seconds.</p></body></html>
"""


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of one run or of several side by side."""
    return write_html(path, make_report(find_runs(folders)))


def write_html(path: Path, text: str) -> Path:
    """Write a page, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode(errors="backslashreplace"))
    return path


def make_report(runs: Sequence[Run]) -> str:
    """The page as text. It makes no request."""
    return render(collect(runs))


def render(
    data: Mapping[str, Any], live: bool = False, page: str = "page.html", scripts: Sequence[str] = SCRIPTS
) -> str:
    """The page of a document, by default of one that ``collect`` returns.

    A live page polls its own server, any other makes no request. ``page`` is the file with the skip link, in its first
    line, and the content; shell.html is around it.

    Names in the document come from folders and configurations of others: they stay text. Everything in it is
    escaped, scripts put it on the page as text only, and the policy lets no script run but the page's own.
    """
    style, script = _read(STYLES), _read(scripts)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            "style-src 'unsafe-inline'",
            "connect-src 'self'" if live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    parts = {
        "policy": policy,
        "title": escape(str(data["title"])),
        "style": style,
        "plain": "".join(f"<p>{escape(sentence)}</p>" for sentence in data["headline"]),
        "live": "true" if live else "false",
        "script": script,
        "data": as_script(data),
    }
    skip, _, main = _read([page]).partition("\n")
    template = _read(["shell.html"]).replace("{{ skip }}", skip).replace("{{ main }}", main) + "\n"
    # one pass from left to right: inserted text is not searched again
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: parts[match[1]], template)


def as_script(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element, whatever its strings hold.

    >>> as_script({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _read(names: Sequence[str]) -> str:
    folder = files("fedpews.report") / "page"
    return "\n".join((folder / name).read_text(encoding="utf-8").rstrip() for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def serve(folders: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """A server on 127.0.0.1, not yet running; port 0 takes any that is free."""
    latest = Latest(folders)

    class Handler(_Handler):
        news = staticmethod(latest.get)

    return ThreadingHTTPServer((HOST, port), Handler)


class Latest:
    """What the folders hold now, read again only when a file changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders, self._lock = list(folders), Lock()
        self._tag = ""
        self._document: dict[str, Any] | None = None

    def get(self) -> tuple[str, dict[str, Any] | None]:
        """A tag that changes with the document, and the document; None before the first round is finished."""
        with self._lock:
            tag = _tag(self._folders)
            if tag != self._tag:
                runs = find_runs(self._folders, only_ready=True)
                self._document = collect(runs) if runs else None
                self._tag = tag
            return self._tag, self._document


def _tag(folders: Sequence[Path]) -> str:
    digest = blake2b(digest_size=12)
    for folder in folders_of_runs(folders, missing_ok=True):
        for name in (layout.ROUNDS, layout.NEURONS, layout.FEDERATION, layout.SUMMARY):
            file = folder / name
            if file.exists():
                state = file.stat()
                digest.update(f"{file}|{state.st_size}|{state.st_mtime_ns}\n".encode())
    return f'"{digest.hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    news: Callable[[], tuple[str, dict[str, Any] | None]]
    server_version = "fedpews"
    sys_version = ""

    def do_GET(self) -> None:
        # a page of another site that resolves its name to this machine still sends its own name as the host
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            _, document = self.news()
            page = WAITING if document is None else render(document, live=True)
            self._answer(page.encode(), "text/html; charset=utf-8")
        elif self.path == "/data.json":
            tag, document = self.news()
            if self.headers.get("If-None-Match") == tag:
                self.send_response(HTTPStatus.NOT_MODIFIED)
                self.end_headers()
            elif document is None:
                # nothing yet, or nothing at this moment, while a resumed run writes its rounds again: that is no error
                self._nothing()
            else:
                body = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
                self._answer(body, "application/json", tag)
        elif self.path == "/favicon.ico":
            self._nothing()  # a browser asks for it by itself
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _nothing(self) -> None:
        self.send_response(HTTPStatus.NO_CONTENT)
        self.end_headers()

    def _answer(self, body: bytes, kind: str, tag: str | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag is not None:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for every two seconds would bury the run's own."""
